"""Dense steps before a codec: as if there were none at first, then as if it began there."""

import pytest
import torch
from pydantic import ValidationError
from stepping import flatten, make_linear, make_sgd, run_step, train

from paceline.comm import LocalGroup
from paceline.replica.replica import Replica
from paceline.sync import EveryStep
from paceline.testing.rule_contract import check_rule

CODECS = {
    "int8": {"name": "int8", "dense_below": 0},
    "top_k": {"name": "top_k", "density": 0.3, "dense_below": 0},
    "one_bit": {"name": "one_bit", "dense_below": 0},
}


def uneven(rank, step):
    return 1.0 + (3 * rank + step) % 4


@pytest.fixture(params=CODECS)
def codec(request):
    return CODECS[request.param]


def test_without_an_end_they_are_every_step_without_a_codec(codec):
    none = train(3, EveryStep(), 6, uneven, dtype=torch.float32)
    assert torch.equal(train(3, EveryStep(codec=codec, dense_steps=6), 6, uneven, dtype=torch.float32), none)
    assert not torch.equal(train(3, EveryStep(codec=codec, dense_steps=5), 6, uneven, dtype=torch.float32), none)


def test_after_them_the_codec_begins_with_nothing_held_back(codec):
    def work(group):
        module = make_linear(dtype=torch.float32)
        optimizer = make_sgd(module, 0.9)
        for sync, steps in ((EveryStep(), range(3)), (EveryStep(codec=codec), range(3, 9))):
            replica = Replica(module, optimizer, group=group, sync=sync)
            replica.begin_anew()
            for step in steps:
                run_step(replica, step)
            replica.close()
        return flatten(module)

    def make_optimizer(module):
        return make_sgd(module, 0.9)

    rule = EveryStep(codec=codec, dense_steps=3)
    in_one = train(3, rule, 9, make_optimizer=make_optimizer, dtype=torch.float32)
    assert torch.equal(in_one[:, -1], torch.stack(LocalGroup.run(3, work)))


@pytest.mark.parametrize("landing", ["update", "next_forward"])
def test_what_a_step_sends_is_its_price_wherever_gradients_land(landing):
    rule = EveryStep(codec=CODECS["top_k"], dense_steps=2)

    def work(group):
        module = make_linear(dtype=torch.float32)
        replica = Replica(module, make_sgd(module), group=group, sync=rule, landing=landing)
        sent = [run_step(replica, step).wire_bytes for step in range(4)]
        replica.flush()
        after = flatten(module)
        replica.close()
        return sent, after

    dense, encoded = rule.traffic([parameter.shape for parameter in make_linear().parameters()], 2)
    assert dense.wire_bytes != encoded.wire_bytes
    for sent, after in LocalGroup.run(2, work):
        assert sent == [dense.wire_bytes] * 2 + [encoded.wire_bytes] * 2
        assert torch.equal(after, train(2, rule, 4, dtype=torch.float32)[0, -1])
    assert [(each.count(1), each.count(2), each.count(5)) for each in (dense, encoded)] == [(1, 2, 2), (0, 0, 3)]


def test_it_keeps_the_contract_of_rules(codec):
    """Also that a run killed before its codec begins, or after, goes on bit for bit."""
    check_rule(EveryStep(codec=codec, dense_steps=5))


def test_a_codec_that_carries_momentum_is_refused():
    with pytest.raises(ValidationError, match="dense_steps must be 0 with a codec that carries momentum, but got 3"):
        EveryStep(codec="dgc", dense_steps=3)
