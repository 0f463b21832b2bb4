"""Parameters that wait in CPU memory: the same numbers, on a device that mixes no tensors."""

import sys
from pathlib import Path

import pytest
import torch
from memory_models import compute_loss, make_transformer
from torch import nn

from paceline.errors import SettingsError
from paceline.memory import ParameterOffload, find_recomputable, recompute

sys.path.append(str(Path(__file__).parents[1] / "sync"))
from distant import DEVICE, DistantTensor, OnDevice


def train(module, num_steps=3):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        compute_loss(module).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("choice", ["none", "full", "selective"])
def test_steps_are_the_same_bit_for_bit(choice):
    """Embedding, tied head, norms, attention, gates and dropout."""
    plain, away = make_transformer(), make_transformer()
    if choice != "none":
        recompute(away, dict.fromkeys(find_recomputable(away), choice))
    offload = ParameterOffload(away, "cpu")
    expected, found = train(plain), train(away)
    assert offload.num_copies > 3 * len(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_nothing_is_mixed_on_another_device():
    """The device refuses tensors of the CPU; its attention is another kernel, which rounds in another order."""
    plain, away = make_transformer(dropout=0), make_transformer(dropout=0)
    expected = train(plain)
    with OnDevice():
        ParameterOffload(away, DEVICE)
        found = train(away)
    for name, value in expected.items():
        assert not isinstance(found[name], DistantTensor)
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


class Counted(nn.Module):
    """Layers whose copies are counted while the model runs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_no_weight_waits_on_the_device_from_forward_to_backward():
    module = Counted()
    offload = ParameterOffload(module, "cpu")
    loss = module(torch.randn(2, 64)).sum()
    assert len(offload._mode._origins) == 0, "copies are gone once their operation is done"
    assert offload.num_copies == 12
    loss.backward()
    assert offload.num_copies == 12 + 5, "backward needs the weights of all layers but the first"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_modules_that_pass_lists_of_weights(kind):
    torch.manual_seed(0)
    plain, away = kind(4, 5, num_layers=2), kind(4, 5, num_layers=2)
    away.load_state_dict(plain.state_dict())
    ParameterOffload(away, "cpu")
    x = torch.randn(3, 2, 4)
    for module in (plain, away):
        module(x)[0].square().sum().backward()
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(plain.parameters(), away.parameters(), strict=True)
    )


def test_the_model_sees_the_device_that_computes():
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("mask", torch.ones(3))

        def forward(self, x):
            return x * self.weight + torch.arange(3, device=self.weight.device) * self.mask + self.weight.shape[0]

    module = Asking()
    with OnDevice():
        ParameterOffload(module, DEVICE)
        assert module.mask.device == DEVICE
        assert module(torch.zeros(3)).tolist() == [3.0, 4.0, 5.0]
    assert module.weight.device.type == "cpu"


def test_parameters_that_change_before_backward_are_refused():
    module = Counted()
    ParameterOffload(module, "cpu")
    loss = module(torch.randn(2, 64)).sum()
    with torch.no_grad():
        module.layers[3].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"of shape \(64, 64\) has been changed in place in between"):
        loss.backward()


def test_a_forward_that_fails_leaves_nothing_behind():
    module = Counted()
    offload = ParameterOffload(module, "cpu")
    with pytest.raises(RuntimeError, match="shapes"):
        module(torch.ones(2, 3))
    num_copies = offload.num_copies
    module.layers[0].weight.sum()
    assert offload.num_copies == num_copies
    module(torch.ones(2, 64))


def test_batch_statistics_are_refused():
    with pytest.raises(SettingsError, match=r"must have no BatchNorm for memory\.offload parameters, but got 1; take"):
        ParameterOffload(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "cpu")


class WeightsChanged(nn.Module):
    """A forward that changes weights by functions that are given them, by parts of them, and by operators."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4, max_norm=0.5)
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight[0] = 0.0
            self.linear.weight[1:3].mul_(0.5)
            self.linear.weight.t()[0].add_(x[0])
            self.linear.bias -= 0.25
            nn.init.constant_(self.other.bias[:2], 3.0)
            nn.init.ones_(self.other.weight)
            torch._foreach_mul_([self.other.weight], 0.5)
            torch.clamp(self.linear.weight, -0.2, 0.3, out=self.linear.weight)
            self.other.weight.mul_(x.mean())
        return self.other(self.linear(x)) + self.embedding(torch.arange(len(x)))


def test_weights_that_forward_changes_are_changed_in_cpu_memory():
    found = []
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        module = WeightsChanged()
        if is_offloaded:
            ParameterOffload(module, "cpu")
        module(torch.randn(6, 4)).square().sum().backward()
        found.append([*module.parameters(), *(parameter.grad for parameter in module.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
