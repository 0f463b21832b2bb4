"""DiLoCo: its outer steps are torch's own, and its momentum belongs to all workers."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from stepping import descend, flatten, make_linear, make_sgd, run_step, train

from paceline.checkpoint import CheckpointStore
from paceline.comm import LocalGroup
from paceline.replica.replica import Replica
from paceline.replica.state import capture, restore
from paceline.sync import DiLoCo, LocalSGD, StreamingDiLoCo


def uneven(rank, step):
    return 1.0 + (3 * rank + step) % 4


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_with_a_rate_of_one_and_no_momentum_it_is_local_sgd(size):
    outer = train(size, DiLoCo(period=3, outer_learning_rate=1.0, outer_momentum=0.0), 8, uneven)
    local = train(size, LocalSGD(period=3), 8, uneven)
    if size > 1:
        assert torch.equal(outer, local)
    else:  # local SGD leaves a worker alone as it is; the outer parameters less the difference from them are rounded
        torch.testing.assert_close(outer, local, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("nesterov", [True, False])
def test_its_outer_steps_are_those_of_torch(nesterov):
    rule = DiLoCo(period=3, nesterov=nesterov, outer_momentum=0.9, outer_momentum_warmup=0)
    seen = train(2, rule, 12, uneven)
    common = flatten(make_linear()).requires_grad_()
    outer = torch.optim.SGD([common], lr=0.7, momentum=0.9, nesterov=nesterov)
    for first in range(0, 12, 3):
        steps = range(first, first + 3)
        weights = [sum(uneven(rank, step) for step in steps) for rank in range(2)]
        ends = [descend(common.detach(), rank, steps) for rank in range(2)]
        mean = sum(weight * end for weight, end in zip(weights, ends, strict=True)) / sum(weights)
        before = common.detach().clone()
        common.grad = before - mean
        outer.step()
        torch.testing.assert_close(seen[0, first + 2], common.detach(), rtol=1e-11, atol=1e-12)
        assert torch.equal(seen[0, first + 2], seen[1, first + 2])
        if first == 0:  # momentum that begins as the first difference: not 0.7 times it
            factor = 0.7 * 1.9 if nesterov else 0.7
            torch.testing.assert_close(common.detach() - before, factor * (mean - before))


@pytest.mark.parametrize(("num_steps", "rounds"), [(300, 6), (1200, 25), (10_000, 25), (20, 0)])
def test_its_momentum_rises_over_a_third_of_the_run(num_steps, rounds):
    rule = DiLoCo().fit_length(num_steps)
    assert rule.outer_momentum_warmup == rounds
    assert rule.fit_length(10 * num_steps) == rule, "what is chosen stays"
    assert DiLoCo(outer_momentum_warmup=3).fit_length(num_steps).outer_momentum_warmup == 3


@pytest.mark.parametrize("make_rule", [DiLoCo, partial(StreamingDiLoCo, num_fragments=2)], ids=["whole", "fragments"])
@pytest.mark.parametrize(
    ("given", "told"),
    [({}, None), ({"outer_momentum_warmup": 9}, "rises over 9 rounds from here on, but over 2 before")],
)
def test_a_lengthened_run_goes_on_with_its_own_warmup_unless_another_is_given(make_rule, given, told):
    """6 rounds, then 66: by itself the longer run would have a warm-up of 22 rounds."""

    def run(group, first, num_steps, rule, state):
        module = make_linear()
        optimizer = make_sgd(module)
        replica = Replica(module, optimizer, group=group, sync=rule)
        if state is not None:
            for part, saved in zip((module, optimizer, replica), state, strict=True):
                part.load_state_dict(saved)
        for step in range(first, num_steps):
            run_step(replica, step)
        saved = [copy.deepcopy(part.state_dict()) for part in (module, optimizer, replica)]
        replica.close()
        return flatten(module), saved

    rule = make_rule(period=2, outer_momentum=0.9)
    whole = LocalGroup.run(2, lambda group: run(group, 0, 24, rule.fit_length(12), None))
    begun = LocalGroup.run(2, lambda group: run(group, 0, 12, rule.fit_length(12), None))
    longer = make_rule(period=2, outer_momentum=0.9, **given).fit_length(132)
    with pytest.warns(UserWarning, match=told) if told else nullcontext():
        ended = LocalGroup.run(2, lambda group: run(group, 12, 24, longer, begun[group.rank][1]))
    assert torch.equal(ended[0][0], whole[0][0]) == (not given)


def test_its_momentum_is_saved_once_and_travels_to_workers_that_join(tmp_path):
    rule = DiLoCo(period=3, outer_momentum=0.9, outer_momentum_warmup=4)

    def fail(path, reason):
        raise AssertionError(f"{path} is damaged: {reason}")

    def work(group, num_before):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync=rule)
        with CheckpointStore(tmp_path) as store:
            if num_before:
                restore(store.find_newest_valid(fail) if group.rank == 0 else None, replica)
            else:
                for step in range(7):
                    run_step(replica, step, uneven(group.rank, step))
                tensors, document = capture(replica)
                if group.rank == 0:
                    store.save(tensors, document, 7)
        begun = flatten(module)
        _, shared = replica.state.sync_state()
        shared = {name: tensor.clone() for name, tensor in shared.items()}
        with replica.consensus():
            consensus = flatten(module)
        for step in (7, 8):
            run_step(replica, step, uneven(group.rank, step))
        replica.close()
        return begun, shared, consensus, flatten(module)

    saved = LocalGroup.run(3, lambda group: work(group, 0))
    assert {name.split("/")[0] for name in saved[0][1]} == {
        "parameters", "velocity", "rounds", "outer_momentum_warmup",
    }  # fmt: skip
    joined = LocalGroup.run(5, lambda group: work(group, 3))
    for begun, shared, consensus, _ in joined:
        assert all(torch.equal(tensor, saved[0][1][name]) for name, tensor in shared.items())
        # The model is saved in its own dtype; the mean of equal parameters is rounded once more.
        torch.testing.assert_close(begun, saved[0][2], rtol=1e-14, atol=1e-15)
        torch.testing.assert_close(consensus, begun, rtol=1e-14, atol=1e-15)
    outer = torch.cat([saved[0][1][f"parameters/{name}"].flatten() for name in ("weight", "bias")])
    velocity = torch.cat([saved[0][1][f"velocity/{name}"].flatten() for name in ("weight", "bias")])
    weights = [sum(uneven(rank, step) for step in (7, 8)) for rank in range(5)]
    ends = [descend(joined[0][0], rank, (7, 8)) for rank in range(5)]
    difference = outer - sum(weight * end for weight, end in zip(weights, ends, strict=True)) / sum(weights)
    momentum = 0.9 * 2 / 4  # in the third round, after two
    velocity = momentum * velocity + difference
    expected = outer - 0.7 * (difference + momentum * velocity)
    for *_, after in joined:
        torch.testing.assert_close(after, expected, rtol=1e-11, atol=1e-12)
