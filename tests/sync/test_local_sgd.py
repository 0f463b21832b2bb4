"""Local SGD: averages by weight, what codecs hold back, BatchNorm, loss scaling, and what is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from stepping import descend, flatten, make_linear, make_samples, make_sgd, run_step, train
from torch import nn

from paceline.checkpoint import CheckpointStore
from paceline.comm import LocalGroup
from paceline.compression.codec import FeedbackDroppedWarning
from paceline.errors import NonFiniteError
from paceline.replica.replica import Replica
from paceline.replica.state import capture, restore
from paceline.sync import EveryStep, LocalSGD
from paceline.sync.batch_statistics import pool_moments


def uneven(rank, step):
    return 1.0 + (3 * rank + step) % 4


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_a_period_of_one_it_is_every_step(size, momentum):
    def weigh(rank, step):
        return 1.0 + rank  # momentum averages like parameters only where weights stay the same

    def optimizer(module):
        return make_sgd(module, momentum)

    local = train(size, LocalSGD(period=1), 8, weigh, optimizer)
    every = train(size, EveryStep(), 8, weigh, optimizer)
    # Each step adds a few roundings of float64.
    torch.testing.assert_close(local, every, rtol=1e-13, atol=1e-14)


def test_with_adam_a_period_of_one_is_not_every_step():
    def optimizer(module):
        return torch.optim.Adam(module.parameters(), lr=0.05)

    local = train(2, LocalSGD(period=1), 8, make_optimizer=optimizer)
    every = train(2, EveryStep(), 8, make_optimizer=optimizer)
    assert (local - every).abs().max() > 1e-3


@pytest.mark.parametrize("size", [2, 3, 5])
def test_it_ends_at_the_mean_by_the_samples_that_each_has_used(size):
    """Also where a worker has none in a step, or none in a whole period."""

    def weigh(rank, step):
        return 0.0 if (rank == 1 and step < 6) or (rank + step) % 4 == 0 else uneven(rank, step)

    seen = train(size, LocalSGD(period=3), 9, weigh)
    common = flatten(make_linear())
    for first in (0, 3, 6):
        steps = range(first, first + 3)
        weights = [sum(weigh(rank, step) for step in steps) for rank in range(size)]
        ends = [descend(common, rank, steps, weigh) for rank in range(size)]
        common = sum(weight * end for weight, end in zip(weights, ends, strict=True)) / sum(weights)
        for rank in range(size):
            torch.testing.assert_close(seen[rank, first + 2], common, rtol=1e-12, atol=1e-13)
            assert torch.equal(seen[rank, first + 2], seen[0, first + 2]), "the same bits on every worker"
        assert not torch.equal(seen[0, first + 1], seen[-1, first + 1]), "workers differ inside a period"


def test_a_period_in_which_nobody_has_a_sample_changes_nothing():
    seen = train(2, LocalSGD(period=2), 6, lambda rank, step: 0.0 if step in (2, 3) else 1.0)
    assert torch.equal(seen[:, 3], seen[:, 1])
    assert not torch.equal(seen[:, 5], seen[:, 3])


def test_a_worker_alone_does_what_a_plain_loop_does():
    seen = train(1, LocalSGD(period=3), 7)
    assert torch.equal(seen[0, -1], descend(flatten(make_linear()), 0, range(7)))


@pytest.mark.parametrize("codec", ["int8", "top_k", "one_bit", "power_sgd"])
@pytest.mark.parametrize("period", [1, 4])
def test_what_has_arrived_and_what_is_held_back_are_the_differences(codec, period):
    """With gradients that do not depend on parameters, workers go as far together as the gradients say."""
    settings = {"top_k": {"density": 0.1}, "power_sgd": {"low_rank": 1}}.get(codec, {})
    rule = LocalSGD(period=period, codec={"name": codec, "dense_below": 0, **settings})

    def work(group):
        module = nn.Linear(40, 30, bias=False)
        nn.init.zeros_(module.weight)
        replica = Replica(module, make_sgd(module, learning_rate=1.0), group=group, sync=rule)
        given = torch.zeros(30, 40, dtype=torch.float64)
        for first in range(0, 12, period):
            gone, weights = [0, 0, 0], [0.0, 0.0, 0.0]
            for step in range(first, first + period):
                gradients = [
                    torch.randn(30, 40, generator=torch.Generator().manual_seed(9 * step + r)) for r in range(3)
                ]
                given_weights = [1.0, 3.0, 2.0 if step < 8 else 0.0]
                for rank in range(3):
                    weights[rank] += given_weights[rank]
                    gone[rank] = gone[rank] - (gradients[rank] if given_weights[rank] else 0)
                replica.backward(
                    (replica(torch.eye(40)).T * gradients[group.rank]).sum(), weight=given_weights[group.rank]
                )
                replica.update()
            given += sum(weight * where for weight, where in zip(weights, gone, strict=True)) / sum(weights)
        state, _ = replica.state.sync_state()
        replica.close()
        return module.weight.detach().double(), given, {name.split("/")[-1]: kept for name, kept in state.items()}

    results = LocalGroup.run(3, work)
    arrived, given, _ = results[0]
    assert all(torch.equal(arrived, other) for other, *_ in results)
    held_back = sum(state["worker"].double().reshape(30, 40) for *_, state in results)
    if owners := [state["owner"].double().flatten() for *_, state in results if "owner" in state]:
        held_back += torch.cat(owners).view(30, 40)
    assert held_back.abs().max() > 0.01
    # What is held back of differences x_before - x is subtracted; float32 rounds each of a few additions a step.
    assert (arrived - held_back - given).abs().max() < 3e-5 * given.abs().max()


def test_the_consensus_inside_a_period_is_the_mean_by_weight():
    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync=LocalSGD(period=4))
        with replica.consensus():
            before = flatten(module)
        for step in range(6):
            run_step(replica, step, uneven(group.rank, step))
        own = flatten(module)
        with replica.consensus():
            inside = flatten(module)
        assert torch.equal(flatten(module), own)
        assert torch.equal(before, flatten(make_linear()))
        replica.close()
        return own, inside, uneven(group.rank, 4) + uneven(group.rank, 5)

    results = LocalGroup.run(3, work)
    mean = sum(weight * own for own, _, weight in results) / sum(weight for *_, weight in results)
    for own, inside, _ in results:
        torch.testing.assert_close(inside, mean, rtol=1e-13, atol=1e-14)
        assert not torch.equal(own, inside)
        assert torch.equal(inside, results[0][1])


def test_statistics_of_batches_are_pooled_where_workers_meet_and_counts_are_not():
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))

    def work(group, period):
        module = copy.deepcopy(start)
        replica = Replica(module, make_sgd(module), group=group, sync=LocalSGD(period=period))
        for step in range(3):
            weight = 0.0 if group.rank == 2 and step == 0 else uneven(group.rank, step)
            inputs, _ = make_samples(group.rank, step, torch.float32)
            if weight:
                replica.backward(replica(4 * group.rank + inputs).square().mean(), weight=weight)
            else:
                replica.backward(torch.zeros(()), weight=0.0)
            replica.update()
        replica.close()
        norm = module[1]
        return norm.running_mean.clone(), norm.running_var.clone(), int(norm.num_batches_tracked)

    own = LocalGroup.run(3, lambda group: work(group, 4))
    pooled = LocalGroup.run(3, lambda group: work(group, 3))
    weights = [sum(uneven(rank, step) for step in range(3)) for rank in range(3)]
    weights[2] -= uneven(2, 0)
    mean, variance = pool_moments([(mean, variance) for mean, variance, _ in own], weights)
    for got_mean, got_variance, _ in pooled:
        assert torch.equal(got_mean, mean.float())
        assert torch.equal(got_variance, variance.float())
    assert [count for *_, count in pooled] == [3, 3, 2]
    average = sum(m * v for m, (_, v, _) in zip(weights, own, strict=True)) / sum(weights)
    assert (variance.float() > 1.3 * average).any(), "averaged variances would be too small"


def test_an_overflow_on_one_worker_skips_its_step_and_no_other():
    """Its period counts with its samples, as it was: weights stay those that all have agreed on."""

    def work(group):
        module = make_linear(dtype=torch.float32)
        replica = Replica(module, make_sgd(module), group=group, sync=LocalSGD(period=2), precision="fp16")
        skipped, seen = [], []
        for step in range(4):
            handle = None
            if step == 2 and group.rank == 1:
                handle = module.weight.register_hook(lambda gradient: gradient * torch.inf)
            inputs, targets = make_samples(group.rank, step, torch.float32)
            before = flatten(module)
            replica.backward(0.01 * F.mse_loss(replica(inputs).float(), targets), weight=1.0 + group.rank)
            result = replica.update()
            if handle is not None:
                handle.remove()
            skipped.append(result.skipped)
            seen.append((before, flatten(module)))
        replica.close()
        return skipped, seen, replica.loss_scale

    (skipped_0, seen_0, scale_0), (skipped_1, seen_1, scale_1) = LocalGroup.run(2, work)
    assert (skipped_0, skipped_1) == ([False] * 4, [False, False, True, False])
    assert torch.equal(*seen_1[2])
    assert not torch.equal(*seen_0[2])
    assert torch.equal(seen_0[3][1], seen_1[3][1])
    assert seen_0[3][1].isfinite().all()
    assert scale_1 < scale_0


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_parameters_that_are_not_finite_are_refused_by_all_and_arrive_on_none(codec):
    def work(group):
        module = make_linear(dtype=torch.float32)
        rule = LocalSGD(period=2, codec={"name": codec, "dense_below": 0})
        replica = Replica(module, make_sgd(module), group=group, sync=rule)
        run_step(replica, 0)
        if group.rank == 1:
            replica.optimizer.param_groups[0]["lr"] = torch.inf
        with pytest.raises(NonFiniteError, match="since those of rank 1 are not; lower"):
            run_step(replica, 1)
        replica.close()
        return flatten(module)

    mine, other = LocalGroup.run(2, work)
    assert mine.isfinite().all()
    assert not other.isfinite().all()


@pytest.mark.filterwarnings("error")
def test_what_a_codec_holds_back_is_saved_and_that_of_another_codec_lost_with_a_warning(tmp_path):
    def fail(path, reason):
        raise AssertionError(f"{path} is damaged: {reason}")

    def go_on(group, density, size_before, name="top_k"):
        module = make_linear(dtype=torch.float32)
        fields = {"density": density} if name == "top_k" else {}
        rule = LocalSGD(period=2, codec={"name": name, "dense_below": 0, **fields})
        replica = Replica(module, make_sgd(module), group=group, sync=rule)
        store = CheckpointStore(tmp_path)
        if size_before:
            restore(store.find_newest_valid(fail) if group.rank == 0 else None, replica)
        else:
            for step in range(5):
                run_step(replica, step)
            tensors, document = capture(replica)
            if group.rank == 0:
                store.save(tensors, document, 5)
        own, shared = replica.state.sync_state()
        replica.close()
        store.close()
        held_back = {name: kept.clone() for name, kept in own.items()}
        return held_back, {name: tensor.clone() for name, tensor in shared.items()}

    saved = LocalGroup.run(2, lambda group: go_on(group, 0.2, 0))
    for size in (2, 3):
        loaded = LocalGroup.run(size, lambda group: go_on(group, 0.2, 2))
        for name in saved[0][0]:
            before = sum(own[name] for own, _ in saved)
            assert before.abs().max() > 0
            torch.testing.assert_close(sum(own[name] for own, _ in loaded), before)
        for _, shared in loaded:
            assert shared.keys() == saved[0][1].keys()
            assert all(torch.equal(tensor, saved[0][1][name]) for name, tensor in shared.items())
    with pytest.warns(FeedbackDroppedWarning, match="residuals of another codec are dropped"):
        LocalGroup.run(2, lambda group: go_on(group, 0.2, 2, "int8"))


def test_what_cannot_work_is_refused():
    with pytest.raises(ValidationError, match="must not carry momentum, but got dgc"):
        LocalSGD(codec="dgc")
    with pytest.raises(ValidationError, match=r"codec 'top_k' with program 'double_tree'"):
        LocalSGD(codec="top_k", program="double_tree")
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        LocalSGD(period=0)
