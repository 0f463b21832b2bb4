"""Models, batches and steps that benchmarks of training measure, Paceline's and those beside it."""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.comm import Group, join
from paceline.data import Spec
from paceline.recipes.resnet.model import ResNet
from paceline.recipes.transformer_lm.model import TransformerLM
from paceline.replica.landing import Landing
from paceline.replica.replica import Replica
from paceline.replica.step_result import StepResult
from paceline.sync import EveryStep

Step = Callable[[], None]
Hook = Literal["fp16", "power_sgd"]


@dataclass
class Problem:
    """A model and one fixed batch."""

    module: nn.Module
    inputs: Tensor
    targets: Tensor

    def loss(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the mean loss of the batch."""
        return F.cross_entropy(model(self.inputs).flatten(0, -2), self.targets.flatten())

    def copy(self) -> "Problem":
        """Return the same problem with a model of its own."""
        return copy.deepcopy(self)


def make_problem(kind: Literal["lm", "resnet"], batch: int, rank: int) -> Problem:
    """Return a problem: lm, about 12M parameters and sequences of 128 bytes; resnet, ResNet-18 at 32x32."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(rank)
    module: nn.Module
    if kind == "resnet":
        module = ResNet(depth=18).build(Spec(10, (3, 32, 32)))
        inputs = torch.randn(batch, 3, 32, 32, generator=generator)
        return Problem(module, inputs, torch.randint(10, (batch,), generator=generator))
    module = TransformerLM(width=384, num_layers=7, num_heads=6).build(Spec(256, (128,)))
    tokens = torch.randint(256, (batch, 129), generator=generator)
    return Problem(module, tokens[:, :-1], tokens[:, 1:])


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every side."""
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def replica_step(
    problem: Problem,
    group: Group,
    sync: EveryStep | None = None,
    landing: Landing = "update",
    bucket_bytes: int | None = None,
    on_result: Callable[[StepResult], object] = lambda result: None,
) -> Step:
    """Return Paceline's step."""
    replica = Replica(
        problem.module,
        make_optimizer(problem.module),
        group=group,
        sync=sync or EveryStep(),
        landing=landing,
        bucket_bytes=bucket_bytes,
        hash_interval=0,
    )

    def step() -> None:
        replica.backward(problem.loss(replica), weight=problem.targets.numel())
        on_result(replica.update())

    return step


def plain_step(problem: Problem, module: nn.Module | None = None, after_backward: Step | None = None) -> Step:
    """Return a plain loop's step: alone, or of a `module` that exchanges gradients by itself."""
    model = module or problem.module
    optimizer = make_optimizer(model)

    def step() -> None:
        problem.loss(model).backward()
        if after_backward is not None:
            after_backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def floor_step(problem: Problem, group: Group) -> Step:
    """Return the step of workers that exchange one float, so that they still wait for each other."""
    return plain_step(problem, after_backward=lambda: group.all_reduce(torch.zeros(1), name="floor").wait())


def ddp_step(problem: Problem, hook: Hook | None = None) -> Step:
    """Return the step of DistributedDataParallel, at its best: gradients are views of its buckets."""
    if hook is None:
        return plain_step(problem, DistributedDataParallel(problem.module, gradient_as_bucket_view=True))
    if hook == "fp16":
        module = DistributedDataParallel(problem.module, gradient_as_bucket_view=True)
        module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        module = power_sgd_module(problem.module)
    return plain_step(problem, module)


def power_sgd_module(module: nn.Module) -> DistributedDataParallel:
    """Return DistributedDataParallel with its PowerSGD hook, of rank 4, from the third step on.

    It gets one bucket: with several, on gloo, it was seen to hang.
    """
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=10_000)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def take_turns(
    group: Group, steps: Mapping[str, Step], num_rounds: int, steps_per_turn: int = 1, *, num_untimed: int = 4
) -> dict[str, list[float]]:
    """Return the seconds of a step of each side, by round; sides take turns, and another begins each round."""
    sides = list(steps)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for index in range(-num_untimed, num_rounds):
        for side in sides[index % len(sides) :] + sides[: index % len(sides)]:
            group.barrier()
            began_s = time.perf_counter()
            for _ in range(steps_per_turn):
                steps[side]()
            if index >= 0:
                times[side].append((time.perf_counter() - began_s) / steps_per_turn)
    return times


@contextlib.contextmanager
def joined() -> Iterator[Group]:
    """Join as one thread a worker, with torch's default group too, which DDP needs."""
    torch.set_num_threads(1)
    with join() as group:
        if group.size > 1:
            backend = "nccl" if group.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=group.store, rank=group.rank, world_size=group.size)
        try:
            yield group
        finally:
            if group.size > 1:
                group.barrier()
                dist.destroy_process_group()
