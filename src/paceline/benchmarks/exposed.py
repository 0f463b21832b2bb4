"""`bench exposed`: what the wire really costs a training step, beside DDP and its communication hooks."""

import random
import statistics
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, JsonValue

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.problems import Step, ddp_step, floor_step, joined, make_problem, replica_step, take_turns
from paceline.benchmarks.workers import Workers
from paceline.registry import register
from paceline.replica.landing import Landing
from paceline.sync import EveryStep

_OF_GRADIENTS = " of gradients"
Side = Literal[
    "none",
    "fp16",
    "bf16",
    "int8",
    "one_bit",
    "one_bit of gradients",
    "top_k",
    "top_k of gradients",
    "random_k",
    "random_k of gradients",
    "power_sgd",
    "power_sgd of gradients",
    "ddp",
    "ddp_fp16",
    "ddp_power_sgd",
]

_HOOKS = {"ddp_fp16": "DDP's fp16 hook", "ddp_power_sgd": "DDP's PowerSGD hook"}


@register("exposed")
class ExposedBenchmark(Benchmark):
    """Exposed communication of a step: its time less that of the same loop exchanging one float.

    Workers with one thread each hold all sides and take their steps in turn; a step's time is rank 0's from one
    barrier to the end of its update. DDP has gradient_as_bucket_view; its PowerSGD hook begins at its third step,
    which is not timed.
    """

    problem: Literal["lm", "resnet"] = "lm"
    """lm: about 12M parameters, sequences of 128 bytes; resnet: ResNet-18 at 32x32."""
    batch: int = Field(default=1, ge=1)
    """Samples of each worker."""
    sides: tuple[Side, ...] = ("none",)
    """Codecs of Paceline's, and DDP's hooks, that are measured beside DDP. A codec of optimizer steps, such as one_bit,
    is also measured beside the same codec of gradients, if that is given too."""
    landing: Literal["update", "arrival"] = "update"
    """Moment at which Paceline's optimizer applies gradients: all at once, or each bucket as it arrives."""
    num_rounds: int = Field(default=200, ge=3)
    """Timed turns of each side."""
    steps_per_turn: int = Field(default=1, ge=1)
    """Steps that a side takes one after another; a turn's time is their mean."""
    workers: Workers = Workers()
    """Workers of the benchmark."""

    def measure(self) -> list[BenchmarkRow]:
        """Time all sides."""
        sides: list[JsonValue] = ["floor", "ddp", *(side for side in self.sides if side != "ddp")]
        times: dict[str, list[float]] = self.workers.start(
            time_sides, self.problem, self.batch, sides, self.landing, self.num_rounds, self.steps_per_turn
        )[0]
        case = f"{self.problem}, {self.workers.describe()}"
        hooks = [side for side in self.sides if side in _HOOKS]
        rows = [_compare(side, "ddp", case, times) for side in self.sides if side != "ddp"]
        ours = [side for side in self.sides if side not in ("ddp", *hooks)]
        rows += [_compare(side, hook, case, times) for hook in hooks for side in ours]
        pairs = [(side, side + _OF_GRADIENTS) for side in ours if side + _OF_GRADIENTS in ours]
        return rows + [_compare(side, other, case, times) for side, other in pairs]


def time_sides(
    problem: Literal["lm", "resnet"],
    batch: int,
    sides: list[str],
    landing: Landing,
    num_rounds: int,
    steps_per_turn: int,
) -> dict[str, list[float]]:
    """Return the seconds of a step of each side, by round. Every worker runs it."""
    with joined() as group:
        first = make_problem(problem, batch, group.rank)
        steps: dict[str, Step] = {}
        for side in sides:
            mine = first.copy()
            if side == "floor":
                steps[side] = floor_step(mine, group)
            elif side.startswith("ddp"):
                hook = side.removeprefix("ddp").removeprefix("_")
                steps[side] = ddp_step(mine, hook or None)  # type: ignore[arg-type]
            else:
                given = {"codec": side.removesuffix(_OF_GRADIENTS)}
                given |= {"codec_of": "gradient"} if side.endswith(_OF_GRADIENTS) else {}
                steps[side] = replica_step(mine, group, EveryStep.model_validate(given), landing)
        del first
        return take_turns(group, steps, num_rounds, steps_per_turn)


def _compare(side: str, other: str, case: str, times: dict[str, list[float]]) -> BenchmarkRow:
    ours, reference, floor = times[side], times[other], times["floor"]
    generator = random.Random(0)
    rounds = range(len(floor))
    ratios = sorted(_ratio(ours, reference, floor, generator.choices(rounds, k=len(rounds))) for _ in range(2000))
    return BenchmarkRow(
        bench="exposed",
        case=f"{side}: {case}",
        metric="exposed communication",
        unit="s",
        ours=statistics.median(ours) - statistics.median(floor),
        reference=statistics.median(reference) - statistics.median(floor),
        reference_name="DDP" if other == "ddp" else _HOOKS.get(other, other),
        ratio=_ratio(ours, reference, floor, rounds),
        ratio_upper=ratios[int(0.95 * len(ratios))],
        ratio_lower=ratios[int(0.05 * len(ratios))],
    )


def _ratio(ours: Sequence[float], reference: Sequence[float], floor: Sequence[float], rounds: Sequence[int]) -> float:
    """Return the ratio of the medians of paired differences over some rounds."""
    over = statistics.median(ours[index] - floor[index] for index in rounds)
    return over / statistics.median(reference[index] - floor[index] for index in rounds)
