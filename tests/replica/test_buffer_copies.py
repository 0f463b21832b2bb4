"""A step whose update is refused leaves buffers as they were; what is copied for that."""

import math

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import LocalGroup
from paceline.errors import NonFiniteError
from paceline.replica.buffer_copies import BufferCopies, list_spoilt_buffers


class Counting(nn.Module):
    """Has statistics of a norm, a buffer changed in place, one replaced by forward, and a constant."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        for name in ("count", "mean"):
            self.register_buffer(name, torch.zeros(3))
        self.register_buffer("mask", torch.full((3,), -math.inf))

    def forward(self, inputs):
        hidden = self.norm(self.linear(inputs))
        with torch.no_grad():
            self.count += 1
            self.mean = 0.9 * self.mean + hidden.mean(0)
        return hidden


def buffers_of(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def train(group, bad_steps, *, parts=2, **options):
    """Train eight steps; return the state after each, and the model."""
    model = Counting()
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))  # threads share torch's own
    replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group, **options)
    after = [buffers_of(model)]
    for step in range(8):
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + group.rank))
        if step in bad_steps and group.rank == 0:
            inputs[5] = math.nan
        pieces = inputs.chunk(parts)
        try:
            for number, piece in enumerate(pieces):
                replica.backward(replica(piece).square().mean(), weight=len(piece), last=number == parts - 1)
            replica.update()
        except NonFiniteError:
            assert step in bad_steps
        after.append(buffers_of(model))
    return after, model


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("options", [{}, {"sync": paceline.sync.EveryStep(codec="top_k")}], ids=["plain", "top_k"])
def test_a_refused_step_of_ones_own_loop_leaves_buffers_as_before_its_forwards(size, options):
    for after, model in LocalGroup.run(size, lambda group: train(group, {0, 3, 4}, **options)):
        for step in (0, 3, 4):
            for name, value in after[step].items():
                assert torch.equal(after[step + 1][name], value), (name, step)
        assert not torch.equal(after[3]["norm.running_mean"], after[2]["norm.running_mean"])
        assert after[-1]["count"][0] == 2 * 5
        assert not list_spoilt_buffers(model)


def test_a_large_constant_is_copied_only_once_forward_has_changed_it():
    module = nn.Module()
    module.register_buffer("table", torch.zeros(1 << 19))
    copies = BufferCopies(module, only_changing=True)
    assert copies._copies == [None]
    module.table[3] = 1
    copies.note()
    module.table[3] = 2
    copies.restore()
    assert module.table[3] == 1


def test_constants_without_numbers_are_not_spoilt_and_statistics_are():
    module = Counting()
    assert list_spoilt_buffers(module) == []
    module.mean = torch.full((3,), math.nan)
    module.norm.running_var[1] = math.inf
    assert list_spoilt_buffers(module) == ["mean", "norm.running_var"]
    assert list_spoilt_buffers(module, of_norms=False) == ["mean"]
