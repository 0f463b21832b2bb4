"""`bench replica`: a training step beside PyTorch's DistributedDataParallel, and alone beside a plain loop."""

import contextlib
import copy
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.nn.parallel import DistributedDataParallel

from paceline.benchmarks.base import Benchmark, Row, compare_pairs
from paceline.comm import Group, join
from paceline.data import Spec
from paceline.launch.local import start_processes
from paceline.recipes.resnet.model import ResNet
from paceline.recipes.transformer_lm.model import TransformerLM
from paceline.registry import register
from paceline.training.replica import Replica

Case = Literal["lm", "resnet", "lm-wire-bound", "solo-lm", "solo-resnet"]
Step = Callable[[], None]
_BATCH = {"lm": 8, "resnet": 32, "lm-wire-bound": 1, "solo-lm": 8, "solo-resnet": 32}


@register("replica")
class ReplicaBenchmark(Benchmark):
    """Step time and memory of a Replica beside DistributedDataParallel, and of a world of one beside a plain loop.

    Workers with one thread each hold both sides and take steps in turn (A B B A ...); a step's time is rank 0's from
    one barrier to the end of its update. DDP has gradient_as_bucket_view and zero_grad(set_to_none=True).
    """

    cases: tuple[Case, ...] = ("lm", "resnet", "lm-wire-bound", "solo-lm", "solo-resnet")
    """lm: about 12M parameters, 8 sequences of 128 bytes a worker, 1 if wire-bound; resnet: ResNet-18 at 32x32, 32."""
    num_pairs: int = Field(default=40, ge=4)
    """Timed pairs of steps of each case."""
    num_workers: int = Field(default=2, ge=2)
    memory: bool = True
    """Also compare peak memory (PSS), each side in processes of its own."""

    def measure(self) -> list[Row]:
        """Run all cases."""
        rows = []
        for case in self.cases:
            solo = case.startswith("solo")
            reference_name = "plain loop" if solo else "DDP"
            num_workers = 1 if solo else self.num_workers
            # Few pairs of a long step say as much as many of a short one.
            num_pairs = self.num_pairs * (3 if case == "lm-wire-bound" else 1)
            ours, reference = _launch(num_workers, _time_pairs, case, num_pairs)[0]
            ratio, upper = compare_pairs(ours, reference)
            rows.append(
                Row(
                    bench="replica",
                    case=case,
                    metric="step time",
                    unit="s",
                    ours=statistics.median(ours),
                    reference=statistics.median(reference),
                    reference_name=reference_name,
                    ratio=ratio,
                    ratio_upper=upper,
                )
            )
            if self.memory:
                ours_mib, reference_mib = (
                    sum(_launch(num_workers, _measure_memory, case, side).values()) / 2**20
                    for side in ("ours", "reference")
                )
                rows.append(
                    Row(
                        bench="replica",
                        case=case,
                        metric="peak memory",
                        unit="MiB",
                        ours=ours_mib,
                        reference=reference_mib,
                        reference_name=reference_name,
                        ratio=ours_mib / reference_mib,
                    )
                )
        return rows


@dataclass
class _Problem:
    """A model and one fixed batch."""

    module: nn.Module
    inputs: Tensor
    targets: Tensor

    def loss(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        return F.cross_entropy(model(self.inputs).flatten(0, -2), self.targets.flatten())


def _make_problem(case: Case, rank: int) -> _Problem:
    torch.manual_seed(0)
    batch = _BATCH[case]
    generator = torch.Generator().manual_seed(rank)
    module: nn.Module
    if "resnet" in case:
        module = ResNet(depth=18).build(Spec(10, (3, 32, 32)))
        inputs = torch.randn(batch, 3, 32, 32, generator=generator)
        return _Problem(module, inputs, torch.randint(10, (batch,), generator=generator))
    module = TransformerLM(width=384, num_layers=7, num_heads=6).build(Spec(256, (128,)))
    tokens = torch.randint(256, (batch, 129), generator=generator)
    return _Problem(module, tokens[:, :-1], tokens[:, 1:])


def _make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def _our_step(problem: _Problem, group: Group) -> Step:
    replica = Replica(problem.module, _make_optimizer(problem.module), group=group, hash_interval=0)

    def step() -> None:
        replica.backward(problem.loss(replica), weight=problem.targets.numel())
        replica.update()

    return step


def _reference_step(problem: _Problem, size: int) -> Step:
    module = problem.module
    if size > 1:
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = _make_optimizer(module)

    def step() -> None:
        problem.loss(module).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _time_pairs(case: Case, num_pairs: int) -> tuple[list[float], list[float]]:
    with _joined() as group:
        problem = _make_problem(case, group.rank)
        other = copy.deepcopy(problem)
        steps = {"ours": _our_step(problem, group), "reference": _reference_step(other, group.size)}
        times: dict[str, list[float]] = {side: [] for side in steps}
        for pair in range(-3, num_pairs):
            for side in ("ours", "reference") if pair % 2 else ("reference", "ours"):
                group.barrier()
                began_s = time.perf_counter()
                steps[side]()
                if pair >= 0:
                    times[side].append(time.perf_counter() - began_s)
    return times["ours"], times["reference"]


def _measure_memory(case: Case, side: Literal["ours", "reference"]) -> float:
    """Return this worker's peak PSS in bytes."""
    with _joined() as group, _peak_pss() as peak:
        problem = _make_problem(case, group.rank)
        step = _our_step(problem, group) if side == "ours" else _reference_step(problem, group.size)
        for _ in range(6):
            step()
    return peak[0]


@contextlib.contextmanager
def _joined() -> Iterator[Group]:
    """Join as one thread a worker, with torch's default group too, which DDP needs."""
    torch.set_num_threads(1)
    with join() as group:
        if group.size > 1:
            dist.init_process_group("gloo")
        try:
            yield group
        finally:
            if group.size > 1:
                group.barrier()
                dist.destroy_process_group()


@contextlib.contextmanager
def _peak_pss() -> Iterator[list[float]]:
    peak = [0.0]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    peak[0] = max(peak[0], 1024.0 * int(line.split()[1]))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def _launch(num_workers: int, function: Callable[..., Any], *arguments: Any) -> dict[int, Any]:
    """Run `function` in `num_workers` processes and return what each returned, by rank."""
    return start_processes(num_workers, function, *arguments, logs=DefaultLogsSpecs(os.devnull))
