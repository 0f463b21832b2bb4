"""Recomputation changes memory, and nothing else."""

import random

import numpy as np
import pytest
import torch
from memory_models import Pictures, compute_loss, loss_and_gradients, make_transformer
from torch import nn

from paceline.memory import counting, find_recomputable, recompute


def peak_activation_bytes(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with counting(module, optimizer, "cpu") as tracker:
        compute_loss(module).backward()
    return tracker.peak_activation_bytes


def test_blocks_are_the_repeated_parts():
    assert list(find_recomputable(make_transformer())) == ["layers.0", "layers.1", "layers.2"]
    assert list(find_recomputable(Pictures())) == ["stages.0.0", "stages.0.1", "stages.1.0"]
    dense = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    assert list(find_recomputable(dense)) == ["0"]
    assert find_recomputable(nn.Linear(2, 2)) == {}


@pytest.mark.parametrize("choice", ["full", "selective"])
def test_losses_gradients_and_random_numbers_are_the_same(choice):
    plain, saving = make_transformer(), make_transformer()
    recompute(saving, dict.fromkeys(find_recomputable(saving), choice))
    assert list(saving.state_dict()) == list(plain.state_dict())
    loss, gradients, drawn = loss_and_gradients(plain)
    saving_loss, saving_gradients, saving_drawn = loss_and_gradients(saving)
    assert torch.equal(loss, saving_loss)
    assert torch.equal(drawn, saving_drawn)
    assert gradients.keys() == saving_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, saving_gradients[name]), name


def test_dropout_matters_here():
    module = make_transformer()
    first, second = (loss_and_gradients(module, seed=seed)[0] for seed in (1, 2))
    assert not torch.equal(first, second)


def test_each_keeps_less_than_the_one_before():
    needed = []
    for choice in ("none", "selective", "full"):
        module = make_transformer(width=64)
        if choice != "none":
            recompute(module, dict.fromkeys(find_recomputable(module), choice))
        needed.append(peak_activation_bytes(module))
    none, selective, full = needed
    assert full < 0.6 * none
    assert full < selective < 0.8 * none


def test_a_block_that_is_left_out_keeps_all():
    module = make_transformer(width=64, num_layers=4)
    whole = peak_activation_bytes(module)
    recompute(module, {"layers.0": "full", "layers.1": "full"})
    half = peak_activation_bytes(module)
    recompute(module, {"layers.2": "full", "layers.3": "full"})
    assert peak_activation_bytes(module) < half < whole


def test_under_autocast():
    plain, saving = make_transformer(), make_transformer()
    recompute(saving, dict.fromkeys(find_recomputable(saving), "full"))
    found = []
    for module in (plain, saving):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.manual_seed(1)
            logits = module(torch.arange(16)[None])
        logits.float().square().mean().backward()
        found.append([p.grad for p in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("choice", ["full", "selective"])
def test_batch_statistics_count_a_batch_once(choice):
    """Computing a block again runs its BatchNorm again."""

    def train_step(choices):
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3, momentum=m), nn.ReLU()) for m in (0.1, None))
        module = nn.Sequential(*blocks)
        recompute(module, dict.fromkeys(choices, choice))
        module(torch.randn(4, 3, 8, 8)).square().mean().backward()
        return module

    plain, saving = train_step([]), train_step(["0", "1"])
    for (name, buffer), other in zip(plain.named_buffers(), saving.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    for parameter, other in zip(plain.parameters(), saving.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


class Averages(nn.Module):
    """Buffers of one's own, changed in place and replaced, that the output depends on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("last", None)
        self.register_buffer("power", torch.ones(1))
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.num_batches += 1
            self.mean.mul_(0.5).add_(x.detach().mean(0))
            self.last = self.mean.square() + (0 if self.last is None else self.last)
            self.power = self.power * 1.5
        return self.linear(x * self.mean.clone() / (1 + self.last) * self.power).relu()


class Unversioned(nn.Module):
    """Buffers that change without a new version: through ``.data``, as NumPy's array, and from NaN on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("power", torch.ones(()))
        self.register_buffer("bits", torch.full((2,), torch.nan))

    def forward(self, x):
        self.mean.data.mul_(0.5).add_(x.detach().mean(0))
        self.power.numpy()[...] *= 1.5
        self.bits.data[0] = -0.0 if self.bits[0] == 0 else 0.0
        return self.linear(x * self.mean.clone() * self.power.clone()).relu() * (2 + torch.sign(1 / self.bits[0]))


def stateful(kind):
    if kind == "unversioned":
        return nn.Sequential(Unversioned(), nn.Tanh())
    if kind == "own":
        return nn.Sequential(Averages(), nn.Tanh())
    if kind == "spectral":
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh())
    if kind == "spectral, by a hook":
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Tanh())
    return nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Tanh()
    )


@pytest.mark.parametrize("choice", ["full", "selective"])
@pytest.mark.parametrize("kind", ["own", "unversioned", "spectral", "spectral, by a hook", "instance"])
def test_every_buffer_comes_out_as_without_recomputation(kind, choice):
    """Also where several forwards wait for their backward, as in a pipeline, each with its own buffers."""

    def train(choices):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), stateful(kind), stateful(kind))
        recompute(module, dict.fromkeys(choices, choice))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            for loss in [module(torch.randn(6, 4)).square().sum() for _ in range(2)]:
                loss.backward()
            optimizer.step()
        buffers = {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
        return buffers | {name: parameter.detach() for name, parameter in module.named_parameters()}

    plain, saving = train([]), train(["1", "2"])
    assert plain.keys() == saving.keys()
    assert any(name.startswith("buffer ") for name in plain)
    for name, value in plain.items():
        assert torch.equal(value.nan_to_num(9.0), saving[name].nan_to_num(9.0)), name


def test_buffers_that_stay_are_not_kept_for_backward():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(1 << 18))

        def forward(self, x):
            return self.linear(x) * self.mask[0]

    module = nn.Sequential(Masked(), Masked(), Masked())
    recompute(module, dict.fromkeys(["0", "1", "2"], "full"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with counting(module, optimizer, "cpu") as tracker:
        module(torch.randn(2, 4)).sum().backward()
    assert tracker.peak_activation_bytes < 2 << 20, "each mask takes a MiB, and one at a time has a copy"


class Dropping(nn.Module):
    """A block that draws from Python's and NumPy's generators, as some token droppers do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        factor = random.random() * np.random.rand() * np.random.randn()
        return x + self.second(self.first(x).tanh() * factor)


@pytest.mark.parametrize("choice", ["full", "selective"])
def test_random_numbers_of_python_and_numpy_are_the_same(choice):
    def train(choices):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        module = nn.Sequential(Dropping(), Dropping())
        recompute(module, dict.fromkeys(choices, choice))
        for loss in [module(torch.ones(6, 4)).square().sum() for _ in range(2)]:
            loss.backward()
        return [parameter.grad for parameter in module.parameters()], random.random(), np.random.rand()

    plain, saving = train([]), train(["0", "1"])
    assert plain[1:] == saving[1:]
    assert all(torch.equal(one, other) for one, other in zip(plain[0], saving[0], strict=True))
