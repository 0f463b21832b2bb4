"""Synchronous steps before workers step alone: every_step's at first, then the rule from there."""

import pytest
import torch
from stepping import flatten, make_linear, make_sgd, run_step, train

from paceline.comm import LocalGroup
from paceline.errors import SettingsError
from paceline.replica.replica import Replica
from paceline.sync import DiLoCo, EveryStep, LocalSGD, PostLocalSGD, StreamingDiLoCo

RULES = {
    "local_sgd": LocalSGD(period=4),
    "local_sgd int8": LocalSGD(period=4, codec={"name": "int8", "dense_below": 0}),
    "post_local_sgd": PostLocalSGD(period=4),
    "diloco": DiLoCo(period=4),
    "streaming_diloco": StreamingDiLoCo(period=4, num_fragments=2, delay=1),
}


def uneven(rank, step):
    return 1.0 + (3 * rank + step) % 4


def after(rule, synchronous_steps):
    return rule.model_copy(update={"synchronous_steps": synchronous_steps})


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam], ids=["sgd", "adam"])
def test_without_an_end_they_are_every_step(rule, optimizer):
    def make_optimizer(module):
        return optimizer(module.parameters(), lr=0.05)

    every = train(3, EveryStep(), 8, uneven, make_optimizer)
    assert torch.equal(train(3, after(rule, 8), 8, uneven, make_optimizer), every)
    assert not torch.equal(train(3, after(rule, 2), 8, uneven, make_optimizer), every)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("num_synchronous", [1, 3, 6])
def test_after_them_the_rule_begins_as_from_scratch(rule, num_synchronous, size):
    """Parameters and the optimizer's momentum are what every_step left; turns and weights count from there."""

    def work(group):
        module = make_linear()
        optimizer = make_sgd(module, 0.9)
        seen, step = [], 0
        for sync, stop in ((EveryStep(), num_synchronous), (after(rule, 0), num_synchronous + 10)):
            replica = Replica(module, optimizer, group=group, sync=sync)
            replica.begin_anew()
            while step < stop:
                run_step(replica, step, uneven(group.rank, step))
                seen.append(flatten(module))
                step += 1
            replica.close()
        return torch.stack(seen)

    def make_optimizer(module):
        return make_sgd(module, 0.9)

    in_one = train(size, after(rule, num_synchronous), num_synchronous + 10, uneven, make_optimizer)
    # A replica counts weights in units of its first one, which rounds gradients otherwise; int8 rounds the more.
    tolerance = 1e-5 if rule.codec.name == "int8" else 1e-11
    torch.testing.assert_close(in_one, torch.stack(LocalGroup.run(size, work)), rtol=tolerance, atol=tolerance)


def test_going_back_to_them_is_refused(rule):
    def work(group):
        module = make_linear()
        early = Replica(module, make_sgd(module), group=group, sync=after(rule, 1))
        for step in range(3):
            run_step(early, step)
        own, shared = early.state.sync_state()
        module = make_linear()
        late = Replica(module, make_sgd(module), group=group, sync=after(rule, 5))
        module.load_state_dict(early.module.state_dict())
        late.optimizer.load_state_dict(early.optimizer.state_dict())
        late.load_state_dict(early.state_dict())
        late.state.load_sync_state([own] * 2, shared)
        with pytest.raises(SettingsError, match=r"synchronous_steps must be .* alone in step 3 already, but got 5"):
            run_step(late, 3)
        early.close()
        late.close()

    LocalGroup.run(2, work)


def test_their_price_is_that_of_every_step(rule):
    shapes = [parameter.shape for parameter in make_linear().parameters()]
    gradients, *differences = after(rule, 5).traffic(shapes, 3)
    (every,) = EveryStep().traffic(shapes, 3)
    assert gradients.wire_bytes == every.wire_bytes
    assert [gradients.count(num_steps) for num_steps in (3, 5, 9)] == [3, 5, 5]
    assert [each.wire_bytes for each in differences] == [each.wire_bytes for each in after(rule, 0).traffic(shapes, 3)]
    assert all([each.count(num_steps) for num_steps in (3, 5, 13)] == [0, 0, 2] for each in differences)
