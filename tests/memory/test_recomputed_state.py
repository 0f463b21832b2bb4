"""What a recomputed block keeps between forwards, and changes in place, is as without recomputation."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from paceline.errors import SettingsError
from paceline.memory import recompute


class Moving(nn.Module):
    """A block whose every forward multiplies by another number."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.count, self.seen, self.mean, self.table = 0, [], torch.ones(4), None
        self.drawn = torch.Generator().manual_seed(1), np.random.default_rng(2)
        self.torchs, self.numpys, self.pythons = *self.drawn, random.Random(3)
        self.numpys_old = np.random.RandomState(4)
        if kind == "buffers that share memory":
            self.register_buffer("means", torch.ones(2, 4))
            self.register_buffer("last", self.means[1])

    def forward(self, x):
        return x + self.second(self.first(x * self.factor(x.detach().mean(0))).tanh())

    def factor(self, mean):
        match self.kind:
            case "generators":
                drawn = self.numpys.random() * self.pythons.random() * self.numpys_old.rand()
                return torch.rand(4, generator=self.torchs) * drawn
            case "a number":
                self.count += 1
                return 0.5**self.count
            case "a list":
                self.seen.append(mean)
                return len(self.seen)
            case "a tensor":
                self.mean = self.mean + mean
                return self.mean
            case "a tensor in place":
                self.mean.mul_(0.5)
                return self.mean.clone()
            case "a table made at first use":
                if self.table is None:
                    self.table = torch.arange(4.0)
                    return 1.0
                return self.table
            case "buffers that share memory":
                self.means[1] += mean
                return self.last.clone()


@pytest.mark.parametrize("choice", ["full", "selective"])
@pytest.mark.parametrize(
    "kind",
    [
        "generators",
        "a number",
        "a list",
        "a tensor",
        "a tensor in place",
        "a table made at first use",
        "buffers that share memory",
    ],
)
def test_what_modules_keep_is_as_without(kind, choice):
    def train(choices):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), Moving(kind), Moving(kind))
        recompute(module, dict.fromkeys(choices, choice))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            for loss in [module(torch.randn(6, 4)).square().mean() for _ in range(2)]:
                loss.backward()
            optimizer.step()
        block = module[2]
        kept = [*block.parameters(), *block.buffers(), block.mean, block.torchs.get_state()]
        return kept, (block.count, len(block.seen), block.numpys.random(), block.pythons.random())

    plain, saving = train([]), train(["1", "2"])
    assert plain[1] == saving[1]
    assert all(torch.equal(one, other) for one, other in zip(plain[0], saving[0], strict=True))


def test_buffers_that_share_memory_are_tested_as_such():
    block = Moving("buffers that share memory")
    assert block.last.untyped_storage().data_ptr() == block.means.untyped_storage().data_ptr()


class Changing(nn.Module):
    """A block that changes products in place."""

    def __init__(self, kind):
        super().__init__()
        self.inner = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}.get(kind, nn.Linear)(4, 4).double()
        self.relu = nn.ReLU(inplace=True)
        self.outer = nn.Linear(4, 4).double()

    def forward(self, x):
        y = self.inner(x)
        return x + self.outer(y[0]) if isinstance(y, tuple) else x + self.outer(self.relu(y)).mul_(2).tanh()


@pytest.mark.parametrize("kind", ["gru", "lstm", "rnn", "relu"])
@pytest.mark.parametrize("choice", ["full", "selective"])
def test_products_that_are_changed_in_place_are_computed_again(kind, choice):
    def train(choices):
        torch.manual_seed(0)
        module = nn.Sequential(Changing(kind), Changing(kind))
        recompute(module, dict.fromkeys(choices, choice))
        module(torch.randn(3, 5, 4).double()).square().sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(train([]), train(["0", "1"]), strict=True))


class Averaged(nn.Module):
    """A block whose forward moves a parameter that has no gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return x + self.linear(x * self.mean).tanh()


def test_parameters_that_each_run_changes_are_refused():
    module = nn.Sequential(Averaged(), Averaged())
    recompute(module, {"0": "full"})
    with pytest.raises(SettingsError, match="each run of it changes mean; register it as a buffer"):
        module(torch.randn(2, 4)).sum().backward()


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.embedding = nn.Embedding(5, 4, max_norm=0.5)

    def forward(self, x):
        return x + self.linear(x + self.embedding.weight[0] + self.embedding(torch.arange(3))).tanh()


def test_parameters_that_a_second_run_leaves_may_change():
    def train(choices):
        torch.manual_seed(0)
        module = nn.Sequential(Renormed(), Renormed())
        recompute(module, dict.fromkeys(choices, "full"))
        module[0].embedding(torch.arange(5))  # so that rows have their norms before they are read
        module(torch.randn(3, 4)).square().sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(train([]), train(["0"]), strict=True))


def test_a_retained_graph_may_run_backward_again():
    def train(choices):
        torch.manual_seed(0)
        module = nn.Sequential(Moving("a tensor in place"), nn.BatchNorm1d(4), Moving("a number"))
        recompute(module, dict.fromkeys(choices, "full"))
        loss = module(torch.randn(6, 4)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [*(parameter.grad for parameter in module.parameters()), module[0].mean]

    assert all(torch.equal(one, other) for one, other in zip(train([]), train(["0", "2"]), strict=True))
