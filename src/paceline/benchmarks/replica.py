"""`bench replica`: a training step beside PyTorch's DistributedDataParallel, and alone beside a plain loop."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.problems import Problem, Step, ddp_step, joined, make_problem, plain_step, replica_step
from paceline.benchmarks.workers import Workers
from paceline.registry import register

Case = Literal["lm", "resnet", "lm-wire-bound", "solo-lm", "solo-resnet"]
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
    workers: Workers = Workers()
    """Workers of all cases but the solo ones."""
    memory: bool = True
    """Also compare peak memory (PSS), each side in processes of its own."""

    def measure(self) -> list[BenchmarkRow]:
        """Run all cases."""
        rows = []
        for case in self.cases:
            solo = case.startswith("solo")
            reference_name = "plain loop" if solo else "DDP"
            workers = Workers(num_workers=1) if solo else self.workers
            # Few pairs of a long step say as much as many of a short one.
            num_pairs = self.num_pairs * (3 if case == "lm-wire-bound" else 1)
            ours, reference = workers.start(_time_pairs, case, num_pairs)[0]
            rows.append(BenchmarkRow.of_pairs(self.name, case, "step time", "s", ours, reference, reference_name))
            if self.memory:
                ours_mib, reference_mib = (
                    sum(workers.start(_measure_memory, case, side).values()) / 2**20 for side in ("ours", "reference")
                )
                rows.append(
                    BenchmarkRow(
                        bench=self.name,
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


def _problem(case: Case, rank: int) -> Problem:
    return make_problem("resnet" if "resnet" in case else "lm", _BATCH[case], rank)


def _reference_step(problem: Problem, size: int) -> Step:
    return ddp_step(problem) if size > 1 else plain_step(problem)


def _time_pairs(case: Case, num_pairs: int) -> tuple[list[float], list[float]]:
    with joined() as group:
        problem = _problem(case, group.rank)
        other = problem.copy()
        steps = {"ours": replica_step(problem, group), "reference": _reference_step(other, group.size)}
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
    with joined() as group, _peak_pss() as peak:
        problem = _problem(case, group.rank)
        step = replica_step(problem, group) if side == "ours" else _reference_step(problem, group.size)
        for _ in range(6):
            step()
    return peak[0]


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
