"""Models as people write them, cut where their forward calls its blocks: a step is that of one process."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_on_ranks import open_mesh
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.data.batch import list_tensors
from paceline.parallel.pipeline import Pipeline, PipelineSettings
from paceline.testing.processes import check_exits, run_processes

WIDTH = 8
Named = namedtuple("Named", "logits hidden")  # as people write it


@dataclass
class Record:
    logits: Tensor
    hidden: Tensor


class Plain(nn.Module):
    """Blocks between an input and a head; `join` is what others do otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self.other = nn.Linear(WIDTH, 2)

    def apply_block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + torch.tanh(layer(x))

    def finish(self, x: Tensor) -> Any:
        return self.head(x)

    def forward(self, x: Tensor) -> Any:
        x = self.start(x)
        for layer in self.layers:
            x = self.apply_block(layer, x)
        return self.finish(x)


class InPlace(Plain):
    """What blocks return is changed in place; not only in ways of which the second changes nothing."""

    def apply_block(self, layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x)
        y.mul_(0.5).relu_()
        x = x + y
        x *= 0.9
        return x


class Reentrant(Plain):
    def apply_block(self, layer: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(layer, x, use_reentrant=True)
        return x + made


class Closures(Plain):
    """Blocks in functions that were made with the model, where the placeholders of other ranks do not come."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [lambda x, layer=layer: x + torch.tanh(layer(x)) for layer in self.layers]

    def forward(self, x: Tensor) -> Any:
        x = self.start(x)
        for step in self.steps:
            x = step(x)
        return self.head(x)


class Pairs(Plain):
    """One checkpoint around two blocks, between which no cut may be: its function is run again as a whole."""

    def forward(self, x: Tensor) -> Any:
        def run(x: Tensor) -> Tensor:
            return torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))

        made: Tensor = checkpoint(run, self.start(x), use_reentrant=False)
        return self.head(self.layers[2](made))


class Listed(Plain):
    """Parameters of each block in a list beside them, as a whole list for the second half."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))
        self.late = nn.ParameterList([torch.ones(WIDTH), torch.ones(5)])

    def forward(self, x: Tensor) -> Any:
        x = self.start(x)
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + layer(x) * scale[:WIDTH]
        first, second = self.late
        return self.head(x * first) * second


class OfTuple(Plain):
    def finish(self, x: Tensor) -> Any:
        return self.head(x), self.other(x)


class OfMapping(Plain):
    def finish(self, x: Tensor) -> Any:
        return {"logits": self.head(x), "parts": [self.other(x), (x[:, 0],)], "name": "mapping"}


class OfNamed(Plain):
    def finish(self, x: Tensor) -> Any:
        return Named(self.head(x), self.other(x))


class OfRecord(Plain):
    def finish(self, x: Tensor) -> Any:
        return Record(logits=self.head(x), hidden=self.other(x))


class OfNamespace(Plain):
    def finish(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=self.head(x), hidden=self.other(x))


class Halves(Plain):
    """Blocks that return views of one tensor, of which each next block and the one after it use one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Half() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        before = x = self.start(x)
        for layer in self.layers:
            x, before = layer(x + before)
        return self.head(x + before)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.both(x).chunk(2, -1)


class Waves(Plain):
    """Complex numbers cross the cuts."""

    def apply_block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.complex(layer(x.real), x.imag + 1) if x.is_complex() else torch.complex(x, layer(x))

    def finish(self, x: Tensor) -> Any:
        return self.head(x.abs())


class Slices(Plain):
    """Slices of a sequence that run as one, and a sequence that is made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        x = self.layers[:3](self.start(x))
        return nn.Sequential(self.layers[3], self.head)(x)


class Hidden(Plain):
    """Modules that nobody has registered, which are no parameters of one process's model either."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Linear(WIDTH, WIDTH)
        self.mix = lambda x: hidden(x)

    def apply_block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(layer(x)))


class Reader(nn.Module):
    """A head with another module's matrix, to which it only refers."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.others[0].weight)[:, :5]


class Refers(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head = Reader(self.start)  # type: ignore[assignment]


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(self.linear(x.real), x.imag if x.is_complex() else x)


class Size(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x.abs())
        return made


class DrawsToo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + 0 * F.dropout(x, 0.5, self.training)


class Noisy(Plain):
    """Noise that the forward adds before its blocks, one of which draws too, and takes off after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DrawsToo(), nn.Identity(), nn.Sequential(nn.LeakyReLU(1.0)), nn.Identity()])

    def forward(self, x: Tensor) -> Any:
        x = self.start(x)
        noise = torch.randn_like(x).bernoulli_(0.5)
        x = x + noise
        for layer in self.layers:
            x = layer(x)
        return self.head(x - noise)


def waves_in_sequence() -> nn.Module:
    return nn.Sequential(Wave(), Wave(), Wave(), Size())


def refer_in_sequence() -> nn.Module:
    start = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(start, nn.Linear(WIDTH, WIDTH), nn.Tanh(), Reader(start))


MODELS: list[Callable[[], nn.Module]] = [
    *(InPlace, Reentrant, Closures, Pairs, Listed, OfTuple, OfMapping, OfNamed, OfRecord, OfNamespace),
    *(Halves, Waves, Slices, Hidden, Refers, Noisy, waves_in_sequence, refer_in_sequence),
]


def sum_all(output: Any, targets: Tensor) -> Tensor:
    """Return a loss of all that a model returns, which it finds as its author would."""
    if isinstance(output, Named | Record | SimpleNamespace):
        output = (output.logits, output.hidden)
    if isinstance(output, dict):
        assert output["name"] == "mapping"
        output = (output["logits"], *output["parts"][0:1], output["parts"][1][0])
    first, *others = output if isinstance(output, tuple) else (output,)
    return F.cross_entropy(first, targets, reduction="sum") + sum(
        (one.square().sum() for one in others), torch.zeros(())
    )


def make(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def train(kind: Callable[[], nn.Module]) -> list[str]:
    """Return what is another in a pipeline than in one process."""
    torch.manual_seed(1)  # stages have drawn as much as their blocks do
    inputs, targets = torch.randn(8, WIDTH), torch.arange(8) % 5
    with open_mesh() as mesh:
        model, whole = (make(kind) for _ in range(2))
        pipeline = Pipeline(model, mesh, PipelineSettings(), inputs[:1])
        losses = pipeline.run(inputs, targets, sum_all)
        output = whole(inputs)
        loss = sum_all(output, targets)
        loss.backward()
        wrong = []
        if losses and not torch.allclose(sum(losses), loss.detach(), rtol=1e-5):
            wrong.append("loss")
        mine = dict(pipeline.module.named_parameters())
        for name, parameter in whole.named_parameters():
            found = mine[name].grad if name in mine else None
            if name in pipeline.shared:
                found = torch.zeros_like(parameter) if found is None else found.clone()
                mesh.group("pipeline").all_reduce(found, name=name).wait()
            elif name not in mine:
                continue
            expected = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            found = found if found is not None else torch.zeros_like(parameter)
            if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
                wrong.append(name)
        evaluated = pipeline.evaluate(inputs)
        if evaluated is not None:
            pairs = zip(list_tensors(evaluated), list_tensors(output), strict=True)
            same = all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)
            wrong += [] if same and type(evaluated) is type(output) else ["evaluation"]
        return wrong


def train_all() -> dict[str, list[str]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return {kind.__name__: train(kind) for kind in MODELS}


@pytest.fixture(scope="module")
def wrong() -> list[dict[str, list[str]]]:
    results = run_processes(2, train_all, timeout_s=50)
    check_exits(results)
    return [result.value for result in results]


@pytest.mark.parametrize("name", [kind.__name__ for kind in MODELS])
def test_a_step_is_that_of_one_process(wrong: list[dict[str, list[str]]], name: str) -> None:
    assert [said[name] for said in wrong] == [[], []]
