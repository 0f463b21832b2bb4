"""Tensor plans that are found: what does not work in parts is left whole, the rest is shared."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import SettingsError
from paceline.parallel.tensor_check import SplitCheck
from paceline.parallel.tensor_derivation import find_plan
from paceline.parallel.tensor_plan import TensorPlan

WIDTH = 8


class Residual(nn.Module):
    """The first map's output goes around the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.second(x)


class Adapted(nn.Module):
    """Low-rank adaptation of a map, as in peft."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Standardised(nn.Linear):
    """A map whose weight is measured over all of its inputs first."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


class Reused(nn.Module):
    """The model's own forward uses a map's weight once more."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(torch.tanh(self.up(x)), self.up.weight.t()))


class Changed(nn.Module):
    """A map's output is changed in place, which autograd forbids for gathered columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.relu_()
        return self.second(x.softmax(-1))


class Generating(nn.Module):
    """Maps of one vector, which has no dim of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(4))
        self.first, self.second = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(x, self.second(self.first(self.vector)).view(4, WIDTH)))


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 4))


class Clipped(nn.Module):
    """Activations are clipped by a norm over all of them, which does nothing while they are small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x * (8 / x.norm(dim=-1, keepdim=True)).clamp(max=1))


class Late(Clipped):
    """Another function from the fourth forward in training on."""

    def __init__(self, *, in_buffer: bool = False) -> None:
        super().__init__()
        self.num_forwards: int | Tensor = 0
        if in_buffer:
            del self.num_forwards
            self.register_buffer("num_forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.num_forwards += self.training
        return self.second(x.softmax(-1) if self.num_forwards > 3 else x.relu())


class OneSided(Clipped):
    """Another function of what is negative in sum, which nothing is on the sample."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.uniform_(self.first.weight, 0.5, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.abs())
        return self.second(torch.where(x.sum(-1, keepdim=True) < 0, x.softmax(-1), x.relu()))


class Trained(Clipped):
    """Another function in training."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x.softmax(-1) if self.training else x.relu())


class WithMeasure(nn.Module):
    """A block that returns a number of what is between its maps too."""

    def __init__(self) -> None:
        super().__init__()
        self.block = MeasuringBlock()

    def forward(self, x: Tensor) -> Tensor:
        x, size = self.block(x)
        return x + size


class MeasuringBlock(Clipped):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        x = torch.tanh(self.first(x))
        return self.second(x), x.square().mean()


FOUND = {
    "one_sided": (OneSided, {"first": "gathered_columns", "second": "sliced_rows"}),
    "trained": (Trained, {"first": "gathered_columns", "second": "sliced_rows"}),
    "measured": (WithMeasure, {"block.first": "gathered_columns", "block.second": "sliced_rows"}),
    "clipped": (Clipped, {"first": "gathered_columns", "second": "sliced_rows"}),
    "late": (Late, {"first": "gathered_columns", "second": "sliced_rows"}),
    "late_in_buffer": (lambda: Late(in_buffer=True), {"first": "gathered_columns", "second": "sliced_rows"}),
    "residual": (Residual, {"first": "gathered_columns", "second": "sliced_rows"}),
    "adapted": (Adapted, {"base": "gathered_columns", "down": "gathered_columns", "up": "sliced_rows"}),
    "standardised": (
        lambda: nn.Sequential(Standardised(WIDTH, WIDTH), nn.Softmax(-1), Standardised(WIDTH, 4)),
        {"0": "gathered_columns", "2": "gathered_columns"},
    ),
    "reused": (Reused, {"head": "gathered_columns"}),
    "changed": (Changed, {"first": "sliced_rows", "second": "gathered_columns"}),
    "generating": (Generating, {"head": "gathered_columns"}),
    "normed": (normed, {"1": "gathered_columns"}),
}


@pytest.mark.parametrize("kind", FOUND)
def test_a_plan_shares_what_works_in_parts(kind: str) -> None:
    torch.manual_seed(0)
    make, styles = FOUND[kind]
    plan = find_plan(make().eval(), None, 2, torch.randn(3, WIDTH))
    assert dict(plan.styles) == styles


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.Conv1d(8, 8, 1)), "Sequential was found to be: it has no linear maps; take another layout"),
        (nn.Sequential(nn.Linear(3, 3)), r"the linear maps 0 \(3 to 3\); give its linear maps numbers .* 2 divides"),
    ],
)
def test_a_model_without_such_is_told_of_its_own_maps(model: nn.Module, said: str) -> None:
    sample = torch.randn(2, 8, 3) if isinstance(model[0], nn.Conv1d) else torch.randn(2, 3)
    with pytest.raises(SettingsError, match=said):
        find_plan(model, None, 2, sample)


@pytest.mark.parametrize(("make", "when"), [(Clipped, "are 10 times larger"), (Late, "after 1000 forwards")])
def test_a_plan_of_ones_own_is_refused_for_what_the_sample_does_not_show(make: type[nn.Module], when: str) -> None:
    torch.manual_seed(0)
    model, sample = make().eval(), torch.randn(3, WIDTH)
    with pytest.raises(SettingsError, match=f"but the model, whose maps first, second .* {when}; name these maps"):
        find_plan(model, {"first": "columns", "second": "rows"}, 2, sample)
    assert vars(model).get("num_forwards", 0) == 0


class Differs(nn.Module):
    """A module that becomes another one once it is split, for tokens of zeros or after some steps."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.first, self.when, self.num_forwards, self.is_split = nn.Linear(WIDTH, WIDTH), when, 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += self.training
        is_different = (x == 0).all(-1).any() if self.when == "zeros" else self.num_forwards > 3
        return self.first(x) * (2 if self.is_split and is_different else 1)


@pytest.mark.parametrize(("kind", "when"), [("zeros", "for a sample of other values"), ("late", "after 1000 forwards")])
def test_a_split_model_is_compared_where_the_sample_does_not_lead(kind: str, when: str) -> None:
    torch.manual_seed(0)
    model = Differs(kind).eval()
    check = SplitCheck(model, [(model, torch.randn(1, 16, WIDTH), False)], TensorPlan({}), position=0, size=1)
    assert check._find_difference() is None
    model.is_split = True
    said = check._find_difference()
    assert said is not None
    assert said.startswith("a split model must compute what the whole one does, but the model (Differs) returns")
    assert when in said
