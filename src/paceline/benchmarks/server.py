"""`bench server`: how many pushes a second an asynchronous server takes, beside bare messages of the same bytes."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.problems import joined
from paceline.benchmarks.workers import Workers
from paceline.comm import Group
from paceline.data import Spec
from paceline.recipes.transformer_lm.model import TransformerLM
from paceline.registry import register
from paceline.sync import ASGD, Rule
from paceline.sync.synchroniser import LocalStep, WorkerContext

Swap = Callable[[int], None]
"""Pushes and pulls so many times, on a worker; serves them, on rank 0."""


@register("server")
class ServerBenchmark(Benchmark):
    """Pushes a second of one asynchronous server, beside torch's send and receive of the same bytes.

    Rank 0 only serves; each other worker pushes gradients and pulls parameters, and computes nothing. Beside it the
    same processes send as many bytes to rank 0 and receive as many; there a thread for each worker receives and sends,
    without an optimizer or a copy. Rounds of both take turns.
    """

    width: int = Field(default=128, ge=2)
    num_layers: int = Field(default=5, ge=1)
    """Layers of the Transformer whose parameters are pushed; about 1M, 4 MB."""
    rule: Rule = ASGD()
    num_pushes: int = Field(default=30, ge=1)
    """Pushes of each worker in a round."""
    num_rounds: int = Field(default=15, ge=2)
    """Rounds of each side."""
    workers: Workers = Workers(num_workers=3)
    """Workers of the benchmark; one of them is the server."""

    def measure(self) -> list[BenchmarkRow]:
        """Time both sides."""
        results = self.workers.start(
            time_rounds,
            self.rule.model_dump(mode="json"),
            self.width,
            self.num_layers,
            self.num_pushes,
            self.num_rounds,
        )
        pushers = self.workers.num_workers - 1
        ours, reference = (
            [
                pushers * self.num_pushes / max(times)
                for times in zip(*(mine[side] for mine in results.values()), strict=True)
            ]
            for side in ("ours", "bare")
        )
        num_bytes = results[0]["num_bytes"]
        case = f"{self.rule.name}, {pushers} workers, {num_bytes / 1e6:.1f} MB each way"
        return [BenchmarkRow.of_pairs(self.name, case, "pushes", "1/s", ours, reference, "bare send and receive")]


def time_rounds(rule: dict[str, Any], width: int, num_layers: int, num_pushes: int, num_rounds: int) -> dict[str, Any]:
    """Return the seconds of each round, as this worker sees them, by side. Every worker runs it."""
    with joined() as group:
        torch.manual_seed(0)
        module = TransformerLM(width=width, num_layers=num_layers, num_heads=2).build(Spec(256, (128,)))
        num_elements = sum(parameter.numel() for parameter in module.parameters())
        synchroniser = Rule.model_validate(rule).start_synchroniser(
            WorkerContext(module, torch.optim.SGD(module.parameters(), lr=1e-6), group)
        )
        assert synchroniser is not None
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        number = 0

        def ours(count: int) -> None:
            nonlocal number
            for _ in range(count if group.rank else 0):
                step = LocalStep(number, weight=1.0)
                synchroniser.before_update(step)
                synchroniser.after_update(step)
                number += 1

        sides: dict[str, Swap] = {"ours": ours, "bare": _make_bare(group, num_elements)}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for index in range(-1, num_rounds):
            for name in sorted(sides, reverse=bool(index % 2)):
                elapsed_s = _time(sides[name], num_pushes)
                if index >= 0:
                    times[name].append(elapsed_s)
        synchroniser.close()
    return {**times, "num_bytes": 4 * num_elements}


def _time(swap: Swap, count: int) -> float:
    """Return the seconds from when all workers begin to when all are done; who waits uses no core."""
    dist.barrier()
    began_s = time.perf_counter()
    swap(count)
    dist.barrier()
    return time.perf_counter() - began_s


def _make_bare(group: Group, num_elements: int) -> Swap:
    received = [torch.zeros(num_elements) for _ in range(group.size if group.rank == 0 else 1)]
    sent = torch.randn(num_elements)

    def serve(worker: int, count: int) -> None:
        for _ in range(count):
            dist.recv(received[worker], worker, tag=worker)
            dist.send(sent, worker, tag=worker)

    def swap(count: int) -> None:
        if group.rank:
            for _ in range(count):
                dist.send(sent, 0, tag=group.rank)
                dist.recv(received[0], 0, tag=group.rank)
            return
        threads = [threading.Thread(target=serve, args=(worker, count)) for worker in range(1, group.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return swap
