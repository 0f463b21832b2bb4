"""Layouts assembled by hand from PyTorch's parts, as its tutorials do: what stands beside Paceline in `bench layouts`.

Each function takes the problem of this rank (samples of its own along data and sharded, the same along other axes) and
the mesh, and returns a step, which returns this rank's mean loss where it has one.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from paceline.benchmarks.problems import Problem, make_optimizer
from paceline.parallel.mesh import Mesh
from paceline.recipes.transformer_lm.model import Transformer, rotary_tables

Step = Callable[[], Tensor | None]


def make_tensor_step(problem: Problem, mesh: Mesh) -> Step:
    """`parallelize_module` with sequence parallelism and `loss_parallel`; along data one all-reduce of all gradients.

    DistributedDataParallel takes no DTensors, so that what overlaps backward elsewhere comes after it here.
    """
    module = problem.module
    assert isinstance(module, Transformer)
    _parallelize(module, mesh.device_mesh["tensor"])
    parameters = list(module.parameters())
    replicas = mesh.process_group("data")

    def average() -> None:
        if mesh.size("data") > 1:
            _average([parameter.grad for parameter in parameters], replicas)

    return _make_step(problem, module, make_optimizer(module), around=loss_parallel, after_backward=average)


def make_sharded_step(problem: Problem, mesh: Mesh, *, zero_stage: int) -> Step:
    """`fully_shard` on each layer and the rest, which keeps parameters from forward to backward in stage 2."""
    module = problem.module
    assert isinstance(module, Transformer)
    reshard = None if zero_stage == 3 else False  # None: torch's default
    for block in [*module.layers, module]:
        fully_shard(block, mesh=mesh.device_mesh["sharded"], reshard_after_forward=reshard)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    return _make_step(problem, module, make_optimizer(module))


def make_shared_optimizer_step(problem: Problem, mesh: Mesh) -> Step:
    """DistributedDataParallel with ZeroRedundancyOptimizer, both at their best: with views of buckets."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns, which concerns nobody else

    group = mesh.process_group("sharded")
    module = DistributedDataParallel(problem.module, process_group=group, gradient_as_bucket_view=True)
    own = make_optimizer(problem.module)
    optimizer = ZeroRedundancyOptimizer(
        problem.module.parameters(),
        optimizer_class=type(own),
        process_group=group,
        parameters_as_bucket_view=True,
        lr=own.defaults["lr"],
        fused=own.defaults["fused"],
    )
    return _make_step(problem, module, optimizer)


def make_pipeline_step(
    problem: Problem, mesh: Mesh, *, order: str, num_first_layers: int, num_micro_batches: int
) -> Step:
    """Two stages under torch's schedule, and an all-reduce of the tied embedding's gradient."""
    assert isinstance(problem.module, Transformer)
    place, group = mesh.coordinate("pipeline"), mesh.process_group("pipeline")
    module = _TwoStages(problem.module, place, num_first_layers)
    stage = PipelineStage(module, place, 2, torch.device("cpu"), group=group)
    kind = Schedule1F1B if order == "1f1b" else ScheduleGPipe
    schedule = kind(stage, num_micro_batches, loss_fn=_mean_loss)
    optimizer = make_optimizer(module)

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        if place == 0:
            schedule.step(problem.inputs)
        else:
            schedule.step(target=problem.targets, losses=losses)
        dist.all_reduce(module.embedding.weight.grad, group=group)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().detach() if losses else None

    return step


def make_single_step(problem: Problem, mesh: Mesh) -> Step:
    """All of it in the first process, while the others wait."""
    return _make_step(problem, problem.module, make_optimizer(problem.module)) if mesh.world.rank == 0 else lambda: None


def _parallelize(module: Transformer, device_mesh: DeviceMesh) -> None:
    """Cut a Transformer's matrices and, between them, its tokens, as PyTorch's tutorial of tensor parallelism does."""
    whole_block = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    for layer in module.layers:
        parallelize_module(
            layer,
            device_mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": whole_block,
                "attention.query_key_value": ColwiseParallel(),
                "attention.project": RowwiseParallel(output_layouts=Shard(1)),
                "mlp_norm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate": ColwiseParallel(),
                "mlp.expand": ColwiseParallel(),
                "mlp.project": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    parallelize_module(
        module,
        device_mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": whole_block,
        },
    )


class _TwoStages(nn.Module):
    """The first or the second of two stages of a Transformer; both hold the embedding."""

    def __init__(self, model: Transformer, place: int, num_first_layers: int) -> None:
        super().__init__()
        self._is_first = place == 0
        self._head_dim, self._rotary_base = model.head_dim, model.rotary_base
        self.embedding = model.embedding
        self.layers = model.layers[:num_first_layers] if self._is_first else model.layers[num_first_layers:]
        self.norm = nn.Identity() if self._is_first else model.norm

    def forward(self, value: Tensor) -> Tensor:
        x_BTW = self.embedding(value) if self._is_first else value
        rotary = rotary_tables(torch.arange(value.shape[1]), self._head_dim, self._rotary_base)
        for layer in self.layers:
            x_BTW = layer(x_BTW, rotary)
        return x_BTW if self._is_first else F.linear(self.norm(x_BTW), self.embedding.weight)


def _make_step(
    problem: Problem,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    after_backward: Callable[[], None] = lambda: None,
) -> Step:
    def step() -> Tensor:
        with around():
            loss = problem.loss(module)
            loss.backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _average(gradients: Iterable[Tensor | None], group: dist.ProcessGroup) -> None:
    """Average what each rank holds of the gradients, as one message."""
    with torch.no_grad():
        parts = [g.to_local() if isinstance(g, DTensor) else g for g in gradients if g is not None]
    message = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(message, group=group)
    message /= group.size()
    means = message.split([part.numel() for part in parts])
    torch._foreach_copy_(parts, [mean.view_as(part) for mean, part in zip(means, parts, strict=True)])


def _mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())
