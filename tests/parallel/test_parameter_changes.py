"""What a loop does to parameters and gradients by itself is done to all of them, where ranks have parts."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional, init
from torch.nn.utils import clip_grad_value_

from paceline.comm import join
from paceline.comm.group import Group
from paceline.comm.local_group import LocalGroup
from paceline.errors import SettingsError
from paceline.parallel import parallelize
from paceline.replica import Replica
from paceline.replica.state import full_state_dict
from paceline.testing.processes import run_processes
from paceline.topology.layout import Layout

TOLERANCE = 1e-12
"""In float64; a change that a rank has lost, or made to its part alone, is off by more than 1e-3."""
SHARDED = [Layout(sharded=2, zero_stage=stage) for stage in (3, 2, 1)]
LAYOUTS = [Layout(), Layout(tensor=2), *SHARDED]


class Merging(nn.Linear):
    """A linear map with an adapter of low rank, which is part of its weight in evaluation."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        self.reduce, self.extend = nn.Parameter(torch.ones(2, num_inputs)), nn.Parameter(torch.zeros(num_outputs, 2))
        self.is_merged = False

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if self.is_merged == mode:
            self.weight.data += (self.extend @ self.reduce) * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return made if self.is_merged else made + x @ self.reduce.T @ self.extend.T


class Chained(nn.Module):
    """Columns, rows, and a whole head over a tensor axis; five rows are two uneven parts of a sharded one."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.shrink, self.head = nn.Linear(4, 6), nn.Linear(6, 4), Merging(4, 5)
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.shrink(torch.tanh(self.expand(x)))) * self.scale  # type: ignore[no-any-return]


def whole_numbers(like: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, like.numel(), dtype=torch.float64).view(like.shape)


def matrices(model: Any) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.dim()]


def write_rows(model: Any) -> None:
    with torch.no_grad():
        for parameter in matrices(model):
            parameter[0] = 0
            parameter[1].mul_(0.5)
    for layer in (model.expand, model.shrink, model.head):
        layer.weight.data[2] = 0.1
        layer.weight.data[:, 1:3] *= 2
        first, *_ = layer.weight.data.unbind(0)
        first[1:].add_(0.3)


def write_by_mask(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data[parameter.data.abs() < 0.1] = 0.2
        parameter.data.masked_fill_(parameter.data > 0.4, 0.3)


def assign(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9
    for layer in (model.expand, model.shrink, model.head):
        layer.weight.data = functional.normalize(layer.weight.data, dim=1)
    model.head.bias.data = torch.ones(5).double() / 4


def swap(model: Any) -> None:
    """Try other parameters, as a moving average does for an evaluation, and a step beside those that are back."""
    kept = {}
    for name, parameter in model.named_parameters():
        kept[name] = parameter.data
        parameter.data = parameter.data * 0.5 + 0.1
    for name, parameter in model.named_parameters():
        tried, parameter.data = parameter.data, kept[name]
        parameter.data.add_(tried, alpha=0.01)


def average(model: Any) -> None:
    """Go on from an average that a copy of the whole model has."""
    torch.manual_seed(5)
    averaged = Chained().double()
    with torch.no_grad():
        for mine, parameter in zip(averaged.parameters(), model.parameters(), strict=True):
            mine.lerp_(parameter, 0.9)
            mine.copy_(0.5 * mine + 0.5 * parameter)
            parameter.data = torch.where(mine > 0, mine * 0.5 + parameter * 0.5, parameter)


def combine(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(whole_numbers(parameter)).add_(whole_numbers(parameter), alpha=0.1)
            parameter.lerp_(whole_numbers(parameter), 0.1)
        model.expand.weight.div_(model.expand.weight.norm(dim=0, keepdim=True))
        model.shrink.weight.copy_(model.expand.weight.T)


def draw(model: Any) -> None:
    torch.manual_seed(3)
    model.expand.reset_parameters()
    init.xavier_uniform_(model.shrink.weight)
    init.normal_(model.head.weight, std=0.2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
            parameter.add_(torch.empty_like(parameter).log_normal_(), alpha=0.01)
            parameter.add_(torch.randint_like(parameter, 4).random_(5), alpha=0.01)


def load(model: Any) -> None:
    torch.manual_seed(4)
    model.load_state_dict(Chained().double().state_dict())
    memory = io.BytesIO()
    torch.save(model.state_dict(), memory)
    model.shrink.load_state_dict(nn.Linear(6, 4).double().state_dict())
    memory.seek(0)
    model.load_state_dict(torch.load(memory, weights_only=False))


def freeze(model: Any) -> None:
    model.head.bias.requires_grad = False
    model.expand.weight.requires_grad_(False)


def evaluate(model: Any) -> None:
    model.eval()


Line = Callable[[Any], None]
LINES: list[Line] = [write_rows, write_by_mask, assign, swap, average, combine, draw, load, evaluate, freeze]


def change_gradients(model: Any) -> None:
    clip_grad_value_(model.parameters(), 1e-2)
    model.head.weight.grad.mul_(0.5)


def train(group: Group, layout: Layout, *, changes_gradients: bool) -> list[list[float]]:
    """Return numbers of all parameters after each step, and after the line that follows it."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(8, 4).double(), torch.randn(8, 5).double()
    plan = {"expand": "columns", "shrink": "rows"}
    model = parallelize(Chained().double(), layout, group=group, tensor_plan=plan, sample=inputs[:1])
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)
    replica = Replica(model, optimizer, group=group, clip_norm=0.5)
    workers, found = replica.shard.data_parallel_group, []
    for line in [*LINES, write_rows]:
        model.train()
        x, y = (one.chunk(workers.size)[workers.rank] for one in (inputs, targets))
        replica.backward(functional.mse_loss(replica(x), y), weight=len(x))
        if changes_gradients:
            change_gradients(replica.module)
        if line in (assign, swap):
            replica.module.scale.grad = None
        replica.module.head.bias.grad = replica.module.shrink.weight.grad = None
        replica.update()
        found.append(numbers(replica))
        line(replica.module)
        found.append(numbers(replica))
    replica.module.head = nn.Linear(4, 5).double()
    with pytest.raises(SettingsError, match=r"head\.weight was replaced or removed since; change the model first"):
        replica(inputs)
    replica.close()
    return found


def numbers(replica: Replica) -> list[float]:
    state = full_state_dict(replica)
    return [number for name in sorted(state) for number in state[name].flatten().tolist()]


def sums_inside(layout: Layout) -> bool:
    """Return whether gradients are whole once backward has ended, so that a loop may change them."""
    return layout.zero_stage != 1 and not layout.is_plain


def train_in_all() -> list[list[list[float]]]:
    torch.set_num_threads(1)
    with join() as group:
        return [train(group, layout, changes_gradients=sums_inside(layout)) for layout in LAYOUTS]


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:.*had no gradient")
def test_what_a_loop_changes_between_steps_is_changed_in_all_of_a_parameter() -> None:
    expected = {changes: train(LocalGroup(), Layout(), changes_gradients=changes) for changes in (True, False)}
    ranks = run_processes(2, train_in_all, timeout_s=150.0)
    assert [rank.exit_code for rank in ranks] == [0, 0], "\n".join(rank.output for rank in ranks)
    for layout, found in zip(LAYOUTS, ranks[0].value, strict=True):
        for place, (mine, theirs) in enumerate(zip(expected[sums_inside(layout)], found, strict=True)):
            name = [*LINES, write_rows][place // 2].__name__
            where = f"{layout}, {'after' if place % 2 else 'before'} {name}"
            assert theirs == pytest.approx(mine, rel=TOLERANCE, abs=TOLERANCE), where
