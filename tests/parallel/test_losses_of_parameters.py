"""Losses of a user's own loop that use parameters themselves: exact in a layout, or refused by the parameter's name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import paceline
from paceline.data.batch import Batch
from paceline.errors import SettingsError
from paceline.parallel import MixtureOfExperts, PipelineSettings
from paceline.replica import Loss
from paceline.testing.processes import run_processes

VOCABULARY, WIDTH = 16, 8
TOLERANCE = 1e-12
"""Rounding of float64; a penalty on a part of a parameter is off by more than 1e-3."""


class Block(nn.Module):
    def __init__(self, *, has_experts: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = MixtureOfExperts(WIDTH, num_experts=2, top_k=1) if has_experts else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, *, has_experts: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(has_experts=has_experts) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encode(tokens))

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def entropy(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def of_all(model: Any, output: Tensor, targets: Tensor) -> Tensor:
    return entropy(output, targets) + 0.01 * sum(parameter.square().sum() for parameter in model.parameters())


def of_norm(model: Any, output: Tensor, targets: Tensor) -> Tensor:
    return entropy(output, targets) + 0.1 * model.layers[1].qkv.weight.norm()


def of_largest(model: Any, output: Tensor, targets: Tensor) -> Tensor:
    largest = torch.stack([parameter.abs().max() for parameter in model.parameters()]).max()
    return entropy(output, targets) * (1 + largest) + model.layers[0].norm.weight @ model.layers[1].norm.bias


def of_gathered(model: Any, output: Tensor, targets: Tensor) -> Tensor:
    """Orthogonality, and the embedding's matrix in place of the head's."""
    matrices = [model.layers[0].qkv.weight, model.embedding.weight]
    qkv, table = (matrix.full_tensor() if hasattr(matrix, "full_tensor") else matrix for matrix in matrices)
    tied = table @ table.T
    return (
        entropy(output, targets) + 0.01 * (qkv.T @ qkv - torch.eye(WIDTH)).square().sum() + 0.01 * tied.square().mean()
    )


def of_matrices(model: Any, output: Tensor, targets: Tensor) -> Tensor:
    weight = model.layers[0].qkv.weight
    return entropy(output, targets) + 0.01 * (weight.T @ weight - torch.eye(WIDTH)).square().sum()


def of_head(model: Any, output: Tensor, targets: Tensor) -> Tensor:
    return entropy(output, targets) + 0.1 * model.head.weight.square().sum()


def of_slope(model: Any, output: Tensor, targets: Tensor) -> Tensor:
    """A penalty on gradients, whose own gradients pass through a block backwards."""
    probe = torch.linspace(-1, 1, targets.shape[1] * WIDTH, dtype=output.dtype).view(1, -1, WIDTH).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # the other has no second gradients
        (slope,) = torch.autograd.grad(model.layers[1](probe).square().sum(), probe, create_graph=True)
    return entropy(output, targets) + 1e-3 * slope.square().mean()


def of_output(model: Any, output: Tensor, targets: Tensor) -> Tensor:
    return entropy(output, targets)


def of_former(model: Any, output: Tensor, targets: Tensor) -> Tensor:
    """A criterion that was made before the layout, with parameters of then."""
    return entropy(output, targets) + 0.1 * sum(one.square().sum() for one in model.former)


def of_hooked(model: Any, output: Tensor, targets: Tensor) -> Tensor:
    """Activations that a user's hooks keep."""
    return entropy(output, targets) + 0.1 * sum(one.square().mean() for one in model.kept.values())


LossOfModel = Callable[[Any, Tensor, Tensor], Tensor]


def train(function: LossOfModel, layout: dict[str, Any] | None) -> list[float]:
    """Return the losses of five steps, whose first four updates count the penalty's gradients."""
    torch.manual_seed(0)
    cut = bool(layout and layout.get("cut"))
    layout = {axis: size for axis, size in layout.items() if axis != "cut"} if layout else None
    model: nn.Module = Net(has_experts=bool(layout and "expert" in layout)).double()
    tokens = torch.randint(VOCABULARY, (48, 9))
    dataset = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    if function is of_former:
        vars(model)["former"] = [*model.parameters()]
    if function is of_hooked:
        vars(model)["kept"] = kept = {}
        for name, layer in model.layers.named_children():
            layer.qkv.register_forward_hook(lambda _, args, output, name=name: kept.update({name: output}))
    if layout is not None:
        settings = PipelineSettings(num_micro_batches=2)
        model = paceline.parallelize(model, paceline.Layout(**layout), sample=tokens[:1, :-1], pipeline=settings)
    others = [parameter for name, parameter in model.named_parameters() if name != "head.weight"]
    groups = [{"params": [model.head.weight]}, {"params": others}]
    replica = paceline.Replica(model, torch.optim.SGD(groups, lr=0.1))
    losses, refused = [], []

    def measure_or_refuse(output: Tensor, part: Batch) -> Loss:
        try:
            return measure(function, model, output, part)
        except SettingsError as error:  # caught here, so that the first stage need not wait for this one's end
            refused.append(error)
            return measure(of_output, model, output, part)

    for batch in paceline.Loader(dataset, global_batch=8, num_steps=5):
        if replica.shard.pipeline is not None:
            replica.backward_through(batch, measure_or_refuse)
        else:
            with replica.shard.forward_context() if cut else torch.enable_grad():
                made = measure(function, replica, replica(batch.inputs), batch)
                replica.backward(made)
        losses.append(replica.update().loss)
    replica.close()
    if refused:
        raise refused[0]
    return losses


def measure(function: LossOfModel, model: Any, output: Tensor, batch: Batch) -> Loss:
    return Loss(function(model, output, batch.targets), batch.count(batch.targets >= 0))


ONCE = "gradients must be taken once over the"
LAYOUTS: list[tuple[dict[str, Any], dict[LossOfModel, str]]] = [
    ({"tensor": 2}, {of_all: "", of_norm: "", of_largest: "", of_gathered: "", of_matrices: "parameter.full_tensor()"}),
    ({"sharded": 2}, {of_all: "uses", of_norm: "layers.1.qkv.weight", of_matrices: "layers.0.qkv.weight", of_head: ""}),
    ({"sharded": 2, "zero_stage": 2}, {of_all: "", of_norm: "", of_matrices: ""}),
    ({"sharded": 2, "zero_stage": 1}, {of_all: "", of_norm: "", of_matrices: "", of_slope: ""}),
    ({"sharded": 2, "zero_stage": 2}, {of_slope: f"{ONCE} sharded"}),
    ({"context": 2}, {of_all: "", of_norm: "", of_slope: f"{ONCE} context"}),
    ({"pipeline": 2}, {of_head: "", of_all: "of which embedding is on another rank"}),
    ({"expert": 2}, {of_norm: "", of_all: "mlp."}),
    ({"tensor": 2, "cut": True}, {of_norm: ""}),
    ({"sharded": 2, "zero_stage": 1}, {of_former: "", of_hooked: ""}),
    ({"context": 2}, {of_former: "", of_hooked: ""}),
    ({"expert": 2}, {of_former: "as it was before, which expert(2) has replaced", of_hooked: ""}),
]


FORMER = "must use the parameters that the model has since parallelize"
KEPT = "uses values of the block around layers.0.qkv of which each rank has a part"
QUICK: list[tuple[dict[str, Any], dict[LossOfModel, str]]] = [
    ({"tensor": 2}, {of_norm: "", of_slope: f"{ONCE} tensor", of_former: FORMER, of_hooked: KEPT}),
    ({"sharded": 2}, {of_norm: "layers.1.qkv.weight", of_slope: f"{ONCE} sharded axis", of_former: FORMER}),
]


def try_losses(is_quick: bool) -> list[list[float] | str]:
    """Return losses, or what was refused, of each layout's losses in turn."""
    torch.set_num_threads(1)
    said: list[list[float] | str] = []
    for layout, expected in QUICK if is_quick else LAYOUTS:
        for function in expected:
            try:
                with paceline.join():
                    said.append(train(function, layout))
            except SettingsError as error:
                said.append(str(error))
    return said


@pytest.mark.timeout(180)
@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_loss_that_uses_parameters_is_exact_or_refused_by_name(is_quick: bool) -> None:
    cases = [(layout, *case) for layout, expected in (QUICK if is_quick else LAYOUTS) for case in expected.items()]
    alone: dict[tuple[LossOfModel, bool], list[float]] = {}
    for rank, result in enumerate(run_processes(2, try_losses, {"is_quick": is_quick}, timeout_s=160)):
        assert result.exit_code == 0, result.output
        for (layout, function, refusal), said in zip(cases, result.value, strict=True):
            where = f"{function.__name__} in {layout} on rank {rank}: {said}"
            if refusal:
                is_without_loss = "pipeline" in layout and rank == 0
                assert is_without_loss or (isinstance(said, str) and refusal in said), where
                continue
            key = function, "expert" in layout
            if key not in alone:
                alone[key] = train(function, {"expert": 1} if "expert" in layout else None)
            assert said == pytest.approx(alone[key], rel=TOLERANCE, abs=TOLERANCE), where
