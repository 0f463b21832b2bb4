"""Bits that flip on one worker: found before the update or at the next comparison, named, and healed."""

import pytest
import torch
from torch import nn

from paceline.comm import LocalGroup
from paceline.errors import DivergenceError
from paceline.replica import Replica
from paceline.replica.hashing import find_difference, hash_tensor
from paceline.replica.healing import GradientComparison, heal


def flip(tensor, element=0, bit=1):
    """Flip a bit of an element, in place."""
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[element] ^= 1 << bit


def train(group, *, odd, flips, heals, steps=6):
    """Train some steps; what `flips` says is damaged on rank `odd`. Return the parameters, and what was healed."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))  # threads share torch's own
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    replica = Replica(model, optimizer, group=group, hash_interval=2, ema=0.9)
    found = []

    def heal_replica(everybody, targets):
        healed = heal(everybody, group, targets)
        found.append(healed)
        return healed is not None

    if heals:
        replica.comparison.heal = heal_replica
    comparison = GradientComparison(dict(model.named_parameters()), replica.shard, 1, found.append if heals else None)

    def compare(step):
        if group.rank == odd and step == 3 and flips == "gradient":
            flip(model[0].weight.grad)
        comparison.check(step)

    replica.state.compare_gradients_with(compare)
    for step in range(steps):
        if group.rank == odd and step == 3 and flips == "parameter":
            flip(model[0].weight, bit=20)  # rounding could take a lower one back
        if group.rank == odd and step == 3 and flips == "optimizer":
            flip(optimizer.state[model[1].weight]["exp_avg"])
        if group.rank == odd and step == 3 and flips == "average":
            flip(replica.state.average.tensors["0.weight"], bit=20)
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + group.rank))
        replica.backward(replica(inputs).square().mean(), weight=3)
        replica.update()
    averages = replica.state.average.tensors.values()
    return [value.detach().clone() for value in (*model.parameters(), *averages)], found


@pytest.mark.parametrize("odd", [0, 2])
def test_a_flipped_bit_of_a_summed_gradient_is_healed_before_it_reaches_the_parameters(odd):
    """Fault 18: a flipped bit in one replica's gradient."""
    clean = LocalGroup.run(3, lambda group: train(group, odd=None, flips="", heals=True))
    assert not any(found for _, found in clean)
    healed = LocalGroup.run(3, lambda group: train(group, odd=odd, flips="gradient", heals=True))
    for (parameters, found), (expected, _) in zip(healed, clean, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(parameters, expected, strict=True)), "bit for bit"
        (one,) = found
        assert (one.ranks, one.source_rank) == ([odd], 1 if odd == 0 else 0)
        assert one.difference == f"rank {odd} differs from the others, first in gradient of 0.weight"


@pytest.mark.parametrize("flips", ["parameter", "optimizer", "average"])
def test_an_odd_replica_takes_the_state_of_the_majority(flips):
    results = LocalGroup.run(3, lambda group: train(group, odd=1, flips=flips, heals=True))
    (first, found), *others = results
    assert len(found) >= 1
    assert found[0].ranks == [1]
    for parameters, _ in others:
        assert all(torch.equal(one, other) for one, other in zip(parameters, first, strict=True))


@pytest.mark.parametrize("flips", ["gradient", "parameter"])
def test_without_healing_the_odd_rank_is_named(flips):
    with pytest.raises(DivergenceError, match=r"at step \d, rank 1 differs|at step \d rank 1 differs"):
        LocalGroup.run(3, lambda group: train(group, odd=1, flips=flips, heals=False))


@pytest.mark.parametrize("flips", ["gradient", "parameter"])
def test_of_two_nobody_is_odd(flips):
    with pytest.raises(DivergenceError, match=r"at step \d the 2 ranks differ"):
        LocalGroup.run(2, lambda group: train(group, odd=1, flips=flips, heals=True))


def test_numbers_are_healed_with_tensors():
    def work(group):
        state = {"step": 3 + (group.rank == 2)}
        tensor = torch.full((2,), 1.0 + (group.rank == 2))
        hashes = {"step": hash(state["step"]) & 0xFFFF, "tensor": hash_tensor(tensor)}
        heal(find_difference(hashes, group), group, {"step": (state, "step"), "tensor": tensor})
        return state["step"], tensor.tolist()

    assert LocalGroup.run(3, work) == [(3, [1.0, 1.0])] * 3


def test_another_order_of_the_optimizers_state_is_no_difference():
    def work(group):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        replica = Replica(model, optimizer, group=group)
        replica.backward(replica(torch.ones(1, 2)).sum(), weight=1)
        replica.update()
        if group.rank == 1:
            state = optimizer.state[model.weight]
            optimizer.state[model.weight] = {key: state[key] for key in reversed(list(state))}
        found = []
        replica.comparison.heal = lambda everybody, targets: found.append(everybody) or True
        replica.compare()
        return found

    assert LocalGroup.run(3, work) == [[], [], []]
