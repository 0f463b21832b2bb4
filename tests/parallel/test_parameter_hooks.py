"""Hooks on gradients, and parameters without dims, do in every layout what they do in one process, or are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from paceline.comm import join
from paceline.comm.group import Group
from paceline.comm.local_group import LocalGroup
from paceline.data import Batch, Interval
from paceline.errors import SettingsError
from paceline.parallel import MixtureOfExperts, PipelineSettings, parallelize
from paceline.parallel.expert import check_experts
from paceline.parallel.parameter_hooks import check_hooks, warn_of_hooks
from paceline.replica import Loss, Replica
from paceline.replica.state import capture
from paceline.testing.processes import run_processes
from paceline.topology.layout import Layout

TOLERANCE = 1e-12
"""In float64, where sums in another order differ by some 1e-16 of their terms."""
LAYOUTS = {
    "stage 2": Layout(sharded=2, zero_stage=2),
    "stage 3": Layout(sharded=2),
    "pipeline": Layout(pipeline=2),
}
EXPERTS = Layout(expert=2)


class Hooked(nn.Module):
    """Blocks with linear hooks on parameters and on results between them, also at cuts, and scales without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.tensor(3.0))
        rows = (torch.arange(6) > 2).double()
        self.first.weight.register_hook(lambda gradient: gradient * rows[:, None])
        self.blocks[1].weight.register_hook(lambda gradient: gradient * 3)
        self.blocks[3].bias.register_hook(lambda gradient: gradient * 0)

    def forward(self, x: Tensor) -> Tensor:
        x = first = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + block(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
        return self.scale.exp() * x + self.scale * first


class Routed(Hooked):
    """A model that runs some of its blocks for some samples only, and reads the weights of one outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x @ self.first.weight[:4, :4])
        places = (x[:, 0] > 0).int() + 2 * (x[:, 1] > 0).int()
        for number, expert in enumerate(self.experts):
            if len(rows := (places == number).nonzero().squeeze(-1)):
                x = x.index_add(0, rows, expert(x[rows]))
        return x @ self.blocks[0].weight


class Mixed(Hooked):
    """A model with experts, of whose parameters the expert axis makes others."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = MixtureOfExperts(6, num_experts=2, top_k=1)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.mixture(x[:, None])[:, 0]


def train(group: Group, layout: Layout, kind: type[Hooked] = Hooked) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = kind().double()
    inputs, targets = torch.randn(8, 4).double(), torch.randn(8, 6).double()
    pipeline = PipelineSettings(num_micro_batches=2, cuts=("blocks.2",))
    module = parallelize(model, layout, group=group, pipeline=pipeline, sample=inputs[:1])
    optimizer = torch.optim.AdamW(module.parameters(), 0.05, weight_decay=0.1)
    replica = Replica(module, optimizer, group=group, clip_norm=0.5, hash_interval=1)
    workers = replica.shard.data_parallel_group
    found: dict[str, Tensor] = {}
    for step in range(3):
        if replica.shard.pipeline is not None:
            batch = Batch((inputs, targets), 8, Interval(0, 8))
            replica.backward_through(batch, lambda out, part: Loss(mse_loss(out, part.targets), len(part.targets)))
        else:
            x, y = (one.chunk(workers.size)[workers.rank].chunk(2) for one in (inputs, targets))
            for number in range(2):
                replica.backward(mse_loss(replica(x[number]), y[number]), weight=len(x[number]), last=number == 1)
        norm = replica.update().gradient_norm
        found[f"norm {step}"] = torch.tensor(float(norm or 0.0))
    return found | capture(replica)[0]


def train_in_all() -> dict[str, Any]:
    torch.set_num_threads(1)
    with join() as group:
        found = {name: train(group, layout) for name, layout in LAYOUTS.items()}
        found["routed"] = train(group, LAYOUTS["stage 3"], Routed)
        found["experts"] = train(group, EXPERTS, Mixed)
    return {name: {key: value.tolist() for key, value in one.items()} for name, one in found.items()}


@pytest.mark.filterwarnings("ignore:.* parameters had no gradient")
def test_linear_hooks_and_parameters_without_dims_train_as_in_one_process() -> None:
    plain, routed, mixed = (train(LocalGroup(), Layout(), kind) for kind in (Hooked, Routed, Mixed))
    ranks = run_processes(2, train_in_all, timeout_s=50.0)
    assert [rank.exit_code for rank in ranks] == [0, 0], "\n".join(rank.output for rank in ranks)
    torch.manual_seed(0)
    for key, value in Hooked().double().state_dict().items():
        moved = (plain[f"model/{key}"] - value).abs().reshape(len(value) if value.dim() else 1, -1).amax(1)
        assert key == "unused" or moved.any(), key
    for name, found in ranks[0].value.items():
        expected = {"routed": routed, "experts": mixed}.get(name, plain)
        assert found.keys() == expected.keys(), name
        distances = {
            key: float((torch.tensor(found[key], dtype=value.dtype) - value).abs().max())
            for key, value in expected.items()
        }
        assert {key: d for key, d in distances.items() if d > TOLERANCE} == {}, name


def test_hooks_that_see_a_workers_own_gradient_are_told_by_name_and_not_run() -> None:
    model, seen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), []
    warn_of_hooks(model, Layout())
    model[1].weight.register_hook(lambda gradient: seen.append(1))
    for layout in (Layout(), Layout(sharded=2, zero_stage=1), Layout(context=2)):
        with pytest.warns(UserWarning, match=r"hooks on the gradient of 1\.weight see that of each worker's own sam"):
            warn_of_hooks(model, layout)
    for layout in (Layout(pipeline=2), Layout(sharded=2), Layout(tensor=2), Layout(expert=2)):
        warn_of_hooks(model, layout)  # which refuses those that are not linear
    model[0].bias.register_post_accumulate_grad_hook(log_nothing)
    with pytest.warns(UserWarning, match=r"of 0\.bias \(and 1 more parameters\) see"):
        warn_of_hooks(model, Layout())
    assert not seen


def wrap_hooked(group: Group) -> None:
    model = nn.Linear(3, 3)
    model.weight.register_hook(lambda gradient: gradient * 2)
    Replica(model, torch.optim.SGD(model.parameters(), 0.1), group=group)


def test_a_replica_of_several_workers_warns_of_hooks_once() -> None:
    wrap_hooked(LocalGroup())
    with pytest.warns(UserWarning, match="hooks on the gradient of weight see") as caught:
        LocalGroup.run(2, wrap_hooked)
    assert len(caught) == 1


def log_nothing(_: Tensor) -> None: ...


REFUSED = {
    "clamp": lambda gradient: gradient.clamp(-1e-3, 1e-3),
    "norm": lambda gradient: gradient / (gradient.norm() + 1e-3),
    "shift": lambda gradient: gradient + 1e-2,
    "fails": lambda gradient: gradient.view(2, -1),
}


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), EXPERTS])
def test_hooks_that_are_right_for_whole_gradients_only_are_refused_by_name(layout: Layout) -> None:
    for hook in REFUSED.values():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight.register_hook(hook)
        with pytest.raises(
            SettingsError, match=r"must be linear .* but those of 1\.weight are not; do it in a pre-hook"
        ):
            check_hooks(model, layout)
        check_hooks(model, Layout(sharded=2, zero_stage=1))
    for right in (log_nothing, lambda gradient: gradient * 1e-3, lambda gradient: gradient.mul_(0)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            model = nn.Linear(30, 30).to(dtype)
            model.weight.register_hook(right)
            check_hooks(model, layout)
    model = nn.Linear(3, 3)
    model.bias.register_post_accumulate_grad_hook(log_nothing)
    with pytest.raises(SettingsError, match=r"must be those of register_hook for .* those of bias are not"):
        check_hooks(model, layout)
    model = nn.Linear(3, 3)
    model.bias.register_hook(log_nothing)
    with pytest.raises(SettingsError, match="must have no hooks on its gradient for tensor"):
        check_hooks(model, Layout(tensor=2))
    mixed = Mixed()
    mixed.mixture.experts.expand.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(SettingsError, match=r"no hooks .* for expert\(2\), .* but mixture\.experts\.expand has"):
        check_experts(mixed, EXPERTS)
