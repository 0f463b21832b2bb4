"""SCAFFOLD: corrections cancel over workers, and the point where all stop is the optimum."""

import pytest
import torch
from stepping import flatten, make_linear, make_samples, make_sgd, run_step, train

from paceline.checkpoint import CheckpointStore
from paceline.comm import LocalGroup
from paceline.replica.replica import Replica
from paceline.replica.state import capture, restore
from paceline.sync import EveryStep, LocalSGD, Scaffold


@pytest.mark.parametrize("size", [2, 3, 5])
def test_with_a_period_of_one_it_is_every_step(size):
    def weigh(rank, step):
        return 1.0 + rank

    scaffold = train(size, Scaffold(period=1), 10, weigh)
    torch.testing.assert_close(scaffold, train(size, EveryStep(), 10, weigh), rtol=1e-12, atol=1e-13)


def test_its_first_period_is_that_of_local_sgd():
    scaffold, local = train(3, Scaffold(period=4), 8), train(3, LocalSGD(period=4), 8)
    assert torch.equal(scaffold[:, :4], local[:, :4])
    assert not torch.allclose(scaffold[:, 4], local[:, 4])


def _descend_all(rule, num_steps, clip_norm=None):
    """Return how far three workers with fixed data of their own end from the optimum of all data."""

    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync=rule, clip_norm=clip_norm)
        for _ in range(num_steps):
            run_step(replica, 0)  # always the same samples
        replica.close()
        return flatten(module)

    samples = [make_samples(rank, 0) for rank in range(3)]
    inputs = torch.cat([x for x, _ in samples])
    extended = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=1)
    solution = torch.linalg.lstsq(extended, torch.cat([y for _, y in samples])).solution
    optimum = torch.cat([solution[:3].T.flatten(), solution[3]])
    return float((LocalGroup.run(3, work)[0] - optimum).norm() / optimum.norm())


def test_it_ends_at_the_optimum_where_local_sgd_ends_beside_it():
    assert _descend_all(LocalSGD(period=10), 400) > 0.15
    assert _descend_all(Scaffold(period=10), 400) < 0.01


def test_control_variates_are_means_of_gradients_and_their_mean_is_everybodys():
    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module, learning_rate=0.1), group=group, sync=Scaffold(period=3))
        before = flatten(module)
        for step in range(3):
            run_step(replica, step, 1.0 + group.rank)
        own, shared = replica.state.sync_state()
        own = torch.cat([own[f"own/{name}"].flatten() for name in ("weight", "bias")])
        common = torch.cat([shared[f"variates/{name}"].flatten() for name in ("weight", "bias")])
        replica.close()
        return before, own, common, flatten(module)

    results = LocalGroup.run(3, work)
    mean = sum((1 + rank) * own for rank, (_, own, *_) in enumerate(results)) / 6
    for before, own, common, after in results:
        torch.testing.assert_close(common, mean, rtol=1e-12, atol=1e-13)
        assert not torch.allclose(own, common)
        # The paper's option II in the first period, summed over workers: (x - y) / (steps * learning rate).
        torch.testing.assert_close(common, (before - after) / 0.3, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("size_after", [2, 3, 5])
def test_it_goes_on_from_its_checkpoint_among_as_many_and_among_others(size_after, tmp_path):
    rule = Scaffold(period=3, codec={"name": "int8", "dense_below": 0})

    def fail(path, reason):
        raise AssertionError(f"{path} is damaged: {reason}")

    def work(group, first):
        module = make_linear(seed=first, dtype=torch.float32)
        replica = Replica(module, make_sgd(module, 0.9), group=group, sync=rule)
        with CheckpointStore(tmp_path) as store:
            if first:
                restore(store.find_newest_valid(fail) if group.rank == 0 else None, replica)
            for step in range(first, 9):
                if step == 5 and not first:
                    tensors, document = capture(replica)
                    if group.rank == 0:
                        store.save(tensors, document, step)
                run_step(replica, step, 1.0 + group.rank)
        own, shared = replica.state.sync_state()
        replica.close()
        return flatten(module), {name: tensor.clone() for name, tensor in (own | shared).items()}

    straight = LocalGroup.run(3, lambda group: work(group, 0))
    resumed = LocalGroup.run(size_after, lambda group: work(group, 5))
    if size_after == 3:
        for (one, one_state), (other, other_state) in zip(straight, resumed, strict=True):
            assert torch.equal(one, other)
            assert one_state.keys() == other_state.keys()
            assert all(torch.equal(tensor, other_state[name]) for name, tensor in one_state.items())
    assert all(torch.equal(where, resumed[0][0]) for where, _ in resumed)
    assert resumed[0][0].isfinite().all()


def _read_variates(replica):
    own, shared = replica.state.sync_state()
    names = ("weight", "bias")
    own = torch.cat([own[f"own/{name}"].flatten() for name in names])
    return own.clone(), torch.cat([shared[f"variates/{name}"].flatten() for name in names])


def test_corrections_add_up_to_0_after_two_changes_without_an_exchange_in_between():
    def open_replica(group, own=None):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync=Scaffold(period=3))
        if own is not None:
            replica.state.load_own_state(own)
        return replica

    def train_two(group):
        replica = open_replica(group)
        for step in range(3):
            run_step(replica, step, 1.0 + group.rank)
        own = replica.state.own_state()
        replica.close()
        return own

    def change(owns, is_new):
        def work(group):
            replica = open_replica(group, owns[group.rank])
            replica.state.settle(replica.optimizer, is_new=is_new[group.rank])
            result = replica.state.own_state(), *_read_variates(replica)
            replica.close()
            return result

        return LocalGroup.run(len(owns), work)

    first, second = LocalGroup.run(2, train_two)
    joined = change([first, second, first], [False, False, True])
    weights = (1, 2, 0)
    torch.testing.assert_close(sum(w * own for w, (_, own, _) in zip(weights, joined, strict=True)) / 3, joined[0][2])
    torch.testing.assert_close(joined[2][1], joined[2][2])

    left = change([joined[1][0], joined[2][0]], [False, False])
    for _, own, common in left:
        torch.testing.assert_close(own, left[0][1])  # the only variates that are left are the second worker's
        torch.testing.assert_close(common, left[0][1])
    assert not torch.allclose(left[0][2], joined[0][2])


@pytest.mark.filterwarnings("ignore::paceline.replica.UnusedParametersWarning")
def test_a_parameter_that_only_others_use_is_corrected_and_one_that_nobody_uses_left_alone():
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.some = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.nobodys = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.everybodys = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, is_used):
            return self.everybodys.square().sum() + (3 * self.some.sum() if is_used else 0)

    def work(group):
        module = Branches()
        replica = Replica(module, make_sgd(module), group=group, sync=Scaffold(period=2))
        for _ in range(3):
            replica.backward(replica(group.rank == 0), weight=1.0)
            replica.update()
        replica.close()
        return module.some.detach().clone(), module.nobodys.detach().clone()

    results = LocalGroup.run(2, work)
    # Two plain steps of 0.05 * 3 on one worker of two, then one of 0.05 * 1.5 on both.
    for some, nobodys in results:
        torch.testing.assert_close(some, torch.full_like(some, 1 - 0.05 * 3 - 0.05 * 1.5))
        assert torch.equal(nobodys, torch.ones_like(nobodys))


def test_an_overflow_leaves_no_trace_in_the_control_variates():
    def work(group):
        module = make_linear(dtype=torch.float32)
        replica = Replica(module, make_sgd(module), group=group, sync=Scaffold(period=2), precision="fp16")
        skipped = []
        for step in range(6):
            handle = None
            if step in (2, 3) and group.rank == 1:
                handle = module.weight.register_hook(lambda gradient: gradient * torch.inf)
            inputs, targets = make_samples(group.rank, step, torch.float32)
            replica.backward(0.01 * torch.nn.functional.mse_loss(replica(inputs).float(), targets), weight=1.0)
            skipped.append(replica.update().skipped)
            if handle is not None:
                handle.remove()
        own, shared = replica.state.sync_state()
        replica.close()
        return skipped, all(bool(tensor.isfinite().all()) for tensor in (own | shared).values())

    (skipped_0, finite_0), (skipped_1, finite_1) = LocalGroup.run(2, work)
    assert (skipped_0, skipped_1) == ([False] * 6, [False, False, True, True, False, False])
    assert finite_0
    assert finite_1
