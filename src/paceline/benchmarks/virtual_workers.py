"""`bench virtual_workers`: what training that is the same on any number of workers costs, and what it spares."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.problems import joined, make_optimizer
from paceline.comm import Group
from paceline.data import Loader, Spec
from paceline.launch.processes import run_in_processes
from paceline.recipes.transformer_lm import TransformerLM
from paceline.registry import register
from paceline.replica.replica import Replica

Weights = npt.NDArray[Any]


@register("virtual_workers")
class VirtualWorkersBenchmark(Benchmark):
    """Training with virtual workers beside training without, at several numbers of workers.

    Both sides run in the same processes, of one thread each, and take steps in turn on the same global batches. The
    difference of weights is the largest, relative to the largest weight, from those of one worker after all steps.
    """

    model: TransformerLM = TransformerLM(width=128, num_layers=4, num_heads=4, dropout=0.0)
    num_virtual_workers: int = Field(default=12, ge=1)
    global_batch: int = Field(default=24, ge=1)
    """Sequences of 64 bytes in a step."""
    num_workers: tuple[int, ...] = (1, 2, 3, 4)
    """Numbers of workers; the first is 1, which the others are compared with."""
    num_steps: int = Field(default=40, ge=4)
    """Steps of each side."""

    def measure(self) -> list[BenchmarkRow]:
        """Train at each number of workers."""
        rows: list[BenchmarkRow] = []
        alone: tuple[Weights, Weights] | None = None
        for number in self.num_workers:
            exact, fast = run_in_processes(number, _train, self.model_dump(mode="json"))[0]
            case = f"{number} workers, {self.num_virtual_workers} virtual"
            rows.append(BenchmarkRow.of_pairs(self.name, case, "step time", "s", exact.times_s, fast.times_s, "fast"))
            alone = alone or (exact.weights, fast.weights)
            distances = _distance(exact.weights, alone[0]), _distance(fast.weights, alone[1])
            for metric, unit, (ours, reference) in (
                ("difference of weights from 1 worker's", "", distances),
                ("bytes sent", "MB", (exact.wire_bytes / 1e6, fast.wire_bytes / 1e6)),
            ):
                ratio = ours / reference if reference else 0.0
                rows.append(BenchmarkRow(self.name, case, metric, unit, ours, reference, "fast", ratio))
        return rows


@dataclass
class _Side:
    times_s: list[float] = field(default_factory=list)
    wire_bytes: int = 0
    weights: Weights = field(default_factory=lambda: np.zeros(0, dtype=np.float32))


def _train(settings: dict[str, object]) -> tuple[_Side, _Side]:
    """Train both sides in turn; return exact and fast."""
    bench = VirtualWorkersBenchmark.model_validate(settings)
    with joined() as group:
        steps = [_start(bench, group, number) for number in (bench.num_virtual_workers, None)]
        sides = (_Side(), _Side())
        for number in range(bench.num_steps):
            for which in (0, 1) if number % 2 else (1, 0):
                group.barrier()
                began_s = time.perf_counter()
                module, sides[which].wire_bytes = next(steps[which])
                if number >= min(4, bench.num_steps - 1):  # the first learn the order of gradients
                    sides[which].times_s.append(time.perf_counter() - began_s)
                sides[which].weights = parameters_to_vector(module.parameters()).detach().numpy()
    return sides


def _start(bench: VirtualWorkersBenchmark, group: Group, number: int | None) -> Iterator[tuple[nn.Module, int]]:
    """Yield the module and the bytes sent after each step."""
    torch.manual_seed(0)
    module = bench.model.build(Spec(256, (64,)))
    tokens = (torch.randint(256, (1024, 1)) + torch.arange(65) * torch.randint(1, 4, (1024, 1))) % 256
    replica = Replica(module, make_optimizer(module), group=group, num_virtual_workers=number)
    dataset = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    for batch in Loader(dataset, bench.global_batch, group=group, num_virtual_workers=number):
        loss = F.cross_entropy(replica(batch.inputs).flatten(0, 1), batch.targets.flatten())
        replica.backward(loss, weight=batch.count(), last=batch.last)
        if batch.last:
            yield module, replica.update().wire_bytes


def _distance(weights: Weights, expected: Weights) -> float:
    return float(np.abs(weights - expected).max() / np.abs(expected).max())
