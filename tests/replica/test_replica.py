"""A replica against the plain loop it stands for."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.comm import LocalGroup
from paceline.errors import DivergenceError, NonFiniteError
from paceline.replica import Replica, UnusedParametersWarning
from paceline.replica.buckets import plan_layout
from paceline.sync import DPSGD, LocalSGD
from training_models import make_batch, make_module, make_replica, run_one_step


def train_plainly(num_steps, *, clip_norm=None, momentum=0.9):
    module = make_module()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.3, momentum=momentum)
    losses = []
    for step in range(num_steps):
        inputs, targets = make_batch(seed=step)
        optimizer.zero_grad()
        loss = F.cross_entropy(module(inputs), targets)
        loss.backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, module


def train_replicas(num_workers, cuts, num_steps, *, num_micro_batches=1, clip_norm=None, bucket_bytes=200, **options):
    base = make_module()

    def worker(group):
        module = copy.deepcopy(base)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.3, momentum=0.9)
        replica = Replica(
            module,
            optimizer,
            group=group,
            clip_norm=clip_norm,
            bucket_bytes=bucket_bytes,
            hash_interval=1,
            **options,
        )
        losses = []
        for step in range(num_steps):
            inputs, targets = make_batch(seed=step)
            mine = slice(cuts[group.rank], cuts[group.rank + 1])
            parts = zip(
                inputs[mine].tensor_split(num_micro_batches),
                targets[mine].tensor_split(num_micro_batches),
                strict=True,
            )
            for number, (x, y) in enumerate(parts):
                weight = len(x)
                if weight == 0:
                    x, y = inputs[:1], targets[:1]
                loss = F.cross_entropy(replica(x), y)
                replica.backward(loss, weight=weight, last=number == num_micro_batches - 1)
            losses.append(replica.update().loss)
        return losses, module

    return LocalGroup.run(num_workers, worker)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize(
    ("num_workers", "cuts", "num_micro_batches"),
    [
        (1, (0, 12), 1),
        (1, (0, 12), 4),
        (2, (0, 6, 12), 1),
        (3, (0, 1, 5, 12), 1),
        (3, (0, 4, 8, 12), 4),
        (4, (0, 0, 2, 3, 12), 2),
    ],
)
def test_uneven_workers_equal_one_plain_loop(num_workers, cuts, num_micro_batches, clip_norm):
    losses, module = train_plainly(6, clip_norm=clip_norm)
    results = train_replicas(num_workers, cuts, 6, num_micro_batches=num_micro_batches, clip_norm=clip_norm)
    for their_losses, theirs in results:
        # float32 sums in another order: 6 steps keep them within a few roundings of 1e-7.
        assert their_losses == pytest.approx(losses, abs=2e-6)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(theirs.get_parameter(name), parameter, atol=2e-6, rtol=0)
            assert torch.equal(theirs.get_parameter(name), results[0][1].get_parameter(name))


def test_a_world_of_one_does_bitwise_what_a_plain_loop_does():
    losses, module = train_plainly(6, clip_norm=0.05)
    ((their_losses, theirs),) = train_replicas(1, (0, 12), 6, clip_norm=0.05)
    assert their_losses == pytest.approx(losses, rel=1e-15)
    for name, parameter in module.named_parameters():
        assert torch.equal(theirs.get_parameter(name), parameter)


def test_bucket_size_changes_nothing_with_two_workers():
    results = [train_replicas(2, (0, 5, 12), 4, bucket_bytes=size)[0][1] for size in (1, 200, 2**20)]
    for name, parameter in results[0].named_parameters():
        for other in results[1:]:
            assert torch.equal(other.get_parameter(name), parameter)


def test_buckets_are_launched_while_backward_runs():
    """The first bucket's all-reduce begins before the last gradient is ready."""
    events = []

    class Recording(LocalGroup):
        def all_reduce(self, tensor, *, name):
            if self.rank == 0:
                events.append(name)
            return super().all_reduce(tensor, name=name)

    groups = Recording.create(2)

    def worker(group):
        module = make_module()
        replica = make_replica(module, groups[group.rank], bucket_bytes=200)
        run_one_step(replica)
        if group.rank == 0:
            events.clear()
            module.embedding.weight.register_post_accumulate_grad_hook(lambda _: events.append("last gradient"))
        run_one_step(replica)

    LocalGroup.run(2, worker)
    assert "last gradient" in events
    assert events.index("bucket 0") < events.index("last gradient")


def test_accumulation_exchanges_nothing():
    counts = []

    def worker(group):
        replica = make_replica(make_module(), group)
        run_one_step(replica)
        inputs, targets = make_batch()
        before = group._sequence
        for _ in range(3):
            replica.backward(F.cross_entropy(replica(inputs), targets), weight=12, last=False)
        counts.append(group._sequence - before)
        replica.backward(F.cross_entropy(replica(inputs), targets), weight=12)
        replica.update()

    LocalGroup.run(2, worker)
    assert counts == [0, 0]


def test_ranks_whose_gradients_become_ready_in_different_orders_agree_on_one():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def worker(group):
        module = Branches()
        replica = make_replica(module, group, bucket_bytes=1, hash_interval=1)
        for _ in range(3):
            x = torch.ones(2, 4) * (group.rank + 1)
            first, second = (module.left, module.right) if group.rank == 0 else (module.right, module.left)
            replica.backward(second(first(x)).square().mean(), weight=1)
            replica.update()
        return replica.state.document()["gradients"]["layout"]

    layouts = LocalGroup.run(2, worker)
    assert layouts[0] == layouts[1]
    assert len(layouts[0]) == 4


def test_unused_parameters_are_named_once_and_keep_no_gradient():
    def worker(group):
        replica = make_replica(make_module(), group, bucket_bytes=2**20)
        before = replica.module.optional.weight.detach().clone()
        results = [run_one_step(replica, use_optional=False) for _ in range(2)]
        assert torch.equal(replica.module.optional.weight, before)
        return [result.newly_unused for result in results]

    with pytest.warns(UnusedParametersWarning, match=r"optional\.(weight|bias)"):
        told = LocalGroup.run(2, worker)
    for first, second in told:
        assert sorted(first) == ["optional.bias", "optional.weight"]
        assert second == []


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_unused_parameter_has_no_gradient_when_the_optimizer_steps(num_workers):
    """With a gradient of zeros instead of none, weight decay would still change it."""

    def worker(group):
        module = make_module()
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, weight_decay=0.5)
        replica = Replica(module, optimizer, group=group)
        before = module.optional.weight.detach().clone()
        run_one_step(replica, use_optional=False)
        assert torch.equal(module.optional.weight, before)

    with pytest.warns(UnusedParametersWarning):
        LocalGroup.run(num_workers, worker)


def test_a_parameter_that_only_one_rank_used_gets_its_gradient_on_all():
    def worker(group):
        replica = make_replica(make_module(), group, hash_interval=1)
        for _ in range(3):
            result = run_one_step(replica, use_optional=group.rank == 1)
            assert result.newly_unused == []
        return replica.module.optional.weight.detach().clone()

    weights = LocalGroup.run(2, worker)
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], make_module().optional.weight)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_zero_grad_of_the_user_is_harmless(set_to_none, num_workers):
    def worker(group, zero):
        replica = make_replica(make_module(), group)
        for _ in range(3):
            if zero:
                replica.optimizer.zero_grad(set_to_none=set_to_none)
            run_one_step(replica)
        return replica.module.block.weight.detach().clone()

    plain = LocalGroup.run(num_workers, lambda group: worker(group, False))
    zeroed = LocalGroup.run(num_workers, lambda group: worker(group, True))
    assert torch.equal(plain[0], zeroed[0])


def test_weights_that_change_from_step_to_step_stay_exact():
    """The weight is counted in units of the last step's: the unit must not show in the result."""

    def worker(group, weights):
        replica = make_replica(make_module(), group)
        return [run_one_step(replica, weight=weight).loss for weight in weights], replica.module.block.weight.detach()

    even = LocalGroup.run(2, lambda group: worker(group, [12.0] * 4))
    odd = LocalGroup.run(2, lambda group: worker(group, [3.0, 100.0, 7.0, 1e-3]))
    assert odd[0][0] == pytest.approx(even[0][0], abs=1e-6)
    torch.testing.assert_close(odd[0][1], even[0][1], atol=1e-6, rtol=0)


def test_a_sum_with_its_weight_equals_the_mean():
    inputs, targets = make_batch()

    def worker(group, reduction):
        replica = make_replica(make_module(), group)
        for _ in range(2):
            loss = F.cross_entropy(replica(inputs), targets, reduction=reduction)
            replica.backward(loss, weight=12, reduction=reduction)
            result = replica.update()
        return result.loss, replica.module.block.weight.detach()

    mean, total = (LocalGroup.run(2, lambda group, r=r: worker(group, r))[0] for r in ("mean", "sum"))
    assert total[0] == pytest.approx(mean[0], abs=1e-6)
    torch.testing.assert_close(total[1], mean[1], atol=1e-6, rtol=0)


def test_parameters_come_from_rank_0():
    def worker(group):
        module = make_module(seed=group.rank)
        make_replica(module, group)
        return module.state_dict()

    states = LocalGroup.run(3, worker)
    for name, tensor in make_module(seed=0).state_dict().items():
        assert all(torch.equal(state[name], tensor) for state in states)


def test_a_change_on_one_rank_is_found_and_named():
    def worker(group):
        replica = make_replica(make_module(), group, hash_interval=2)
        for step in range(4):
            if step == 1 and group.rank == 2:
                with torch.no_grad():
                    replica.module.optional.bias[3] += 1e-3
            run_one_step(replica)

    with pytest.raises(DivergenceError, match=r"at step 2 rank 2 differs from the others.*parameter optional\.bias;"):
        LocalGroup.run(3, worker)


class Counting(nn.Module):
    """A table, statistics of each worker's own samples, of torch's making and not, and a count that is alike."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.seen += x.detach().mean(0)
        self.scratch += x.detach().mean(0)
        self.num_calls += 1
        return self.norm(self.map(x)) + self.table + self.frozen


def compare_after(change, num_steps=3):
    """Train three workers some steps, let rank 1 make a change, and compare."""

    def worker(group):
        module = make_module(make=Counting)
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)
        replica = Replica(module, optimizer, group=group, hash_interval=1)
        for _ in range(num_steps):
            generator = torch.Generator().manual_seed(group.rank)
            replica.backward(replica(torch.randn(5, 4, generator=generator)).square().mean(), weight=5.0)
            replica.update()
        if group.rank == 1:
            with torch.no_grad():
                change(module, optimizer)
        replica.compare()
        replica.close()

    LocalGroup.run(3, worker, timeout_s=20)


def test_what_is_each_workers_own_may_differ():
    compare_after(lambda module, _: (module.norm.running_mean.add_(1), module.seen.add_(1), module.scratch.add_(1)))


CHANGES = {
    "parameter frozen": lambda module, _: module.frozen[0].add_(1e-3),
    "optimizer state exp_avg_sq of map.bias": lambda module, optimizer: _state_of(module, optimizer)["exp_avg_sq"].add_(
        1
    ),
    "optimizer state step of map.bias": lambda module, optimizer: _state_of(module, optimizer)["step"].add_(1),
    "optimizer state note of map.bias": lambda module, optimizer: _state_of(module, optimizer).update(note=1),
    "buffer table": lambda module, _: module.table[0].add_(1),
    "buffer num_calls": lambda module, _: module.num_calls.add_(1),
}


def _state_of(module, optimizer):
    return optimizer.state[module.map.bias]


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_replicas_hold_alike_is_compared(name):
    with pytest.raises(DivergenceError, match=f"at step 3 rank 1 differs from the others, first in {re.escape(name)};"):
        compare_after(CHANGES[name])


def test_statistics_of_a_worker_without_samples_are_its_own():
    def worker(group):
        module = make_module(make=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        replica = make_replica(module, group, hash_interval=1)
        if group.rank == 1:
            replica.backward(torch.zeros(()), weight=0.0)
        else:
            replica.backward(replica(torch.randn(5, 4)).square().mean(), weight=5.0)
        replica.update()
        replica.close()
        return int(module[1].num_batches_tracked)

    assert LocalGroup.run(3, worker, timeout_s=20) == [1, 0, 1]


def test_a_table_that_differs_at_the_first_comparison_is_found():
    with pytest.raises(DivergenceError, match="at step 0 rank 1 differs from the others, first in buffer table;"):
        compare_after(CHANGES["buffer table"], num_steps=0)


def test_a_loss_that_is_not_finite_names_step_and_rank_and_changes_nothing():
    states = {}

    def worker(group):
        replica = make_replica(make_module(), group)
        run_one_step(replica)
        states[group.rank] = replica.module.block.weight.detach().clone()
        try:
            run_one_step(replica, scale=float("nan") if group.rank == 1 else 1.0)
        finally:
            assert torch.equal(states[group.rank], replica.module.block.weight)

    with pytest.raises(NonFiniteError, match=r"at step 1 it is not on rank 1 \(nan\)"):
        LocalGroup.run(3, worker)


def test_a_gradient_norm_that_is_not_finite_is_an_error():
    replica = make_replica(make_module(), clip_norm=1.0)
    inputs, targets = make_batch()
    loss = F.cross_entropy(replica(inputs), targets)
    loss.register_hook(lambda gradient: gradient * float("inf"))
    replica.backward(loss, weight=1.0)
    with pytest.raises(NonFiniteError, match="gradient norm must be finite, but at step 0"):
        replica.update()


def test_a_request_to_stop_reaches_every_rank_in_the_same_step():
    def worker(group):
        replica = make_replica(make_module(), group)
        stops = []
        for step in range(4):
            if step == 2 and group.rank == 1:
                replica.membership.request_stop("a test")
            stops.append(run_one_step(replica).stop)
        return stops

    assert LocalGroup.run(3, worker) == [[False, False, True, True]] * 3


@pytest.mark.filterwarnings("ignore::paceline.replica.worker_state.IdleRuleWarning")
@pytest.mark.parametrize(("sync", "last"), [(DPSGD(), 19), (LocalSGD(period=100), 19), (LocalSGD(period=8), 7)])
def test_workers_that_synchronise_seldom_or_never_vote_and_stop_after_the_same_step(sync, last):
    """A vote is told in step 10 and counted in step 19, unless workers meet before."""

    def worker(group):
        replica = make_replica(make_module(), group, sync=sync)
        stops = []
        for step in range(20):
            if step == 4 and group.rank == 1:
                replica.membership.request_stop("a test")
            stops.append(run_one_step(replica).stop)
        replica.close()
        return stops.index(True)

    assert LocalGroup.run(3, worker) == [last] * 3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_mixed_precision_learns_what_full_precision_does(precision, num_workers):
    dtypes = {}

    def worker(group, precision):
        replica = make_replica(make_module(), group, precision=precision, hash_interval=1, clip_norm=1.0)
        results = [run_one_step(replica) for _ in range(8)]
        dtypes[precision] = replica(make_batch()[0]).dtype
        return [result.loss for result in results if not result.skipped], replica

    reference, _ = LocalGroup.run(num_workers, lambda group: worker(group, "fp32"))[0]
    losses, replica = LocalGroup.run(num_workers, lambda group: worker(group, precision))[0]
    assert dtypes == {"fp32": torch.float32, precision: {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    assert all(parameter.dtype == torch.float32 for parameter in replica.module.parameters())
    assert losses[-1] < losses[0]
    assert len(losses) >= 6  # fp16 skips a step or two while it finds its scale
    # 8 bits of mantissa: a part in 256 of a loss of about 2.4, twice for forward and backward.
    assert losses == pytest.approx(reference[: len(losses)], abs=0.02)
    assert (replica.loss_scale is not None) == (precision == "fp16")


def test_an_fp16_overflow_skips_the_step_on_every_rank_and_lowers_the_scale():
    def worker(group):
        replica = make_replica(make_module(), group, precision="fp16", hash_interval=1)
        run_one_step(replica)
        before, scale = replica.module.block.weight.detach().clone(), replica.loss_scale
        inputs, targets = make_batch()
        loss = F.cross_entropy(replica(inputs), targets)
        if group.rank == 1:
            loss.register_hook(lambda gradient: gradient * float("inf"))
        replica.backward(loss, weight=12)
        result = replica.update()
        assert torch.equal(before, replica.module.block.weight)
        return result.skipped, replica.loss_scale < scale

    assert LocalGroup.run(2, worker) == [(True, True)] * 2


def test_state_continues_bit_for_bit_with_three_workers_and_learnt_buckets():
    def worker(group, stop_at=None):
        module = make_module()
        replica = make_replica(module, group, bucket_bytes=200)
        for step in range(6):
            if step == stop_at:
                state, weights = replica.state.document(), copy.deepcopy(module.state_dict())
                module = make_module(seed=5)
                replica = make_replica(module, group, bucket_bytes=200)
                module.load_state_dict(weights)
                replica.state.load_document(state)
            inputs, targets = make_batch(seed=step + 10 * group.rank)
            replica.backward(F.cross_entropy(replica(inputs), targets), weight=group.rank + 1)
            replica.update()
        return module.state_dict(), replica.state.document()

    straight = LocalGroup.run(3, worker)[0]
    resumed = LocalGroup.run(3, lambda group: worker(group, stop_at=3))[0]
    assert straight[1] == resumed[1]
    assert straight[1]["gradients"]["layout"] != [[]]
    for name, tensor in straight[0].items():
        assert torch.equal(tensor, resumed[0][name])


def test_layout_keeps_order_and_separates_dtypes():
    parameters = {
        "a": nn.Parameter(torch.zeros(10)),
        "b": nn.Parameter(torch.zeros(10, dtype=torch.float64)),
        "c": nn.Parameter(torch.zeros(10)),
        "d": nn.Parameter(torch.zeros(100)),
    }
    assert plan_layout(parameters, ["d", "a", "b", "c"], 100) == [["d"], ["a", "c"], ["b"]]
