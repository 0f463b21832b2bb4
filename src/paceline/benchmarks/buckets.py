"""`bench buckets`: the bucket size that a replica chooses beside fixed ones."""

import statistics
from typing import Literal

from pydantic import Field

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.problems import joined, make_problem, replica_step, take_turns
from paceline.benchmarks.workers import Workers
from paceline.registry import register
from paceline.replica.step_result import StepResult

_CHOSEN = "chosen"


@register("buckets")
class BucketsBenchmark(Benchmark):
    """Step time with the chosen size of gradient buckets, beside fixed sizes on the same link.

    Workers with one thread each hold all sides and take their steps in turn; a step's time is rank 0's from one
    barrier to the end of its update. The steps in which the size is chosen are not timed.
    """

    problem: Literal["lm", "resnet"] = "lm"
    """lm: about 12M parameters, sequences of 128 bytes; resnet: ResNet-18 at 32x32."""
    batch: int = Field(default=1, ge=1)
    """Samples of each worker."""
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 64)
    """Fixed sizes in MiB."""
    num_rounds: int = Field(default=20, ge=4)
    """Timed steps of each side."""
    workers: Workers = Workers()
    """Workers of the benchmark."""

    def measure(self) -> list[BenchmarkRow]:
        """Time all sides; the last row is the best fixed size, so it is there twice."""
        times: dict[str, list[float]]
        times, chosen = self.workers.start(time_sizes, self.problem, self.batch, list(self.sizes), self.num_rounds)[0]
        fixed = {side: seconds for side, seconds in times.items() if side != _CHOSEN}
        best = min(fixed, key=lambda side: statistics.median(fixed[side]))
        case = f"{self.problem}, batch {self.batch}, {self.workers.describe()}: {chosen}"
        return [
            BenchmarkRow.of_pairs(self.name, case, "step time", "s", times[_CHOSEN], seconds, name)
            for name, seconds in [*fixed.items(), (f"the best: {best}", fixed[best])]
        ]


def time_sizes(
    problem: Literal["lm", "resnet"], batch: int, sizes: list[int], num_rounds: int
) -> tuple[dict[str, list[float]], str]:
    """Return the seconds of a step with each size, by round, and what was chosen and why. Every worker runs it."""
    reasons = []

    def note(result: StepResult) -> None:
        if (choice := result.times.bucket_choice) is not None:
            reasons.append(choice.reason)

    with joined() as group:
        first = make_problem(problem, batch, group.rank)
        steps = {_CHOSEN: replica_step(first.copy(), group, on_result=note)}
        for size in sizes:
            steps[f"{size} MiB"] = replica_step(first.copy(), group, bucket_bytes=size * 2**20)
        times = take_turns(group, steps, num_rounds, num_untimed=6)
    return times, reasons[0] if reasons else "nothing was chosen"
