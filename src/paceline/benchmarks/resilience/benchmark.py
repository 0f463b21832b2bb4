"""`bench resilience`: time without an update after a fault, and goodput under faults, beside other ways to go on."""

import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.resilience.sides import SIDES, TrainingSide, Update, describe_environment
from paceline.benchmarks.resilience.task import BATCH, INTERVAL, PARAMETERS, SECONDS, STEPS
from paceline.errors import SettingsError
from paceline.registry import register

_POLL_S = 0.1
_PATIENCE_S = 120.0
"""Time in which a side must be at full strength again."""
_ENDLESS = 10_000_000
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

SideName = Literal["paceline", "restart", "torchrun", "torchft"]


_TIMES = {"next update": "next_s", "pause": "pause_s", "time to full strength": "full_s"}


@dataclass(frozen=True)
class Recovery:
    """What one fault cost.

    Args:
        next_s: Time from the fault to the first update of those that are left, or after a restart.
        pause_s: Longest time between two updates around the fault, such as the one in which a worker joins again.
        full_s: Time from the fault to the first update of all workers again.
        num_again: Updates that had been done and were done again.
    """

    next_s: float
    pause_s: float
    full_s: float
    num_again: int


@register("resilience")
class ResilienceBenchmark(Benchmark):
    """Time without an update when a worker is killed, and time to full strength, beside other ways to go on.

    Sides train in turn, each with processes of its own; the same worker is killed at the same update. Computing is a
    sleep of a given time for each sample, so that a dead worker frees no core for the living. The first of `sides` is
    compared with the others.
    """

    sides: tuple[SideName, ...] = ("paceline", "restart", "torchrun")
    """Ways to go on. restart: all workers start again from the newest checkpoint. torchrun: torchrun does that.
    torchft: needs `torchft_path`."""
    torchft_path: Path | None = None
    """Folder into which torchft is installed, such as the one that `make torchft` makes."""
    num_workers: int = Field(default=3, ge=2)
    num_parameters: int = Field(default=1_000_000, ge=1)
    seconds_per_sample: float = Field(default=0.005, ge=0)
    """Time of computing a sample."""
    global_batch: int = Field(default=24, ge=1)
    checkpoint_interval: int = Field(default=50, ge=1)
    """Updates from one checkpoint to the next."""
    fault: Literal["kill", "stop"] = "kill"
    """Fault of a worker. kill: SIGKILL. stop: SIGSTOP, for ever."""
    num_rounds: int = Field(default=2, ge=1)
    """Trainings of each side, in turn."""
    num_faults: int = Field(default=4, ge=1)
    """Faults of each training, one after the other."""
    steps_between: int = Field(default=20, ge=1)
    """Updates at full strength before each fault."""
    goodput_s: float = Field(default=0.0, ge=0)
    """Seconds of a training under a fault every `goodput_interval_s`, whose goodput is measured; 0 for none."""
    goodput_interval_s: float = Field(default=60.0, gt=0)
    seed: int = 0
    """Random seed of who is hit."""

    @model_validator(mode="after")
    def _check_sides(self) -> Self:
        if len(set(self.sides)) < len(self.sides) or not self.sides:
            raise SettingsError(f"sides must be different, but got {self.sides}; name each once")
        if ("torchft" in self.sides) != (self.torchft_path is not None):
            raise SettingsError(
                f"torchft must come with its folder, but got {self.sides} and {self.torchft_path}; give --torchft_path"
            )
        if self.global_batch % self.num_workers:
            raise SettingsError(
                f"global_batch must be a multiple of num_workers, but got {self.global_batch} and {self.num_workers}"
            )
        return self

    def measure(self) -> list[BenchmarkRow]:
        """Train all sides, and hit them."""
        found: dict[str, list[Recovery]] = {name: [] for name in self.sides}
        good: dict[str, list[float]] = {name: [] for name in self.sides}
        for number in range(self.num_rounds):
            victims = random.Random(f"{self.seed} {number}").choices(range(self.num_workers), k=self.num_faults)
            for name in self.sides:
                found[name] += self._train(name, victims)
        if self.goodput_s:
            for name in self.sides:
                good[name].append(self._measure_goodput(name))
        return self._describe(found, good)

    def _describe(self, found: dict[str, list[Recovery]], good: dict[str, list[float]]) -> list[BenchmarkRow]:
        first, *others = self.sides
        size = f"{self.num_parameters / 1e6:g}M parameters"
        case = f"{self.fault} one of {self.num_workers}, {size}, {len(found[first])} faults"
        rows = []
        for name in others or [first]:
            for metric, field in _TIMES.items():
                ours, theirs = ([getattr(one, field) for one in found[side]] for side in (first, name))
                rows.append(BenchmarkRow.of_pairs(self.name, case, metric, "s", ours, theirs, name))
                for kind, find in (("p99", _find_p99), ("longest", max)):
                    pair = find(ours), find(theirs)
                    rows.append(BenchmarkRow(self.name, case, f"{kind} {metric}", "s", *pair, name, pair[0] / pair[1]))
            again = (sum(one.num_again for one in found[side]) / len(found[side]) for side in (first, name))
            mine, their = again
            rows.append(
                BenchmarkRow(self.name, case, "updates done again", "", mine, their, name, mine / (their or 1.0))
            )
        for name in self.sides:
            for share in good[name]:
                every = f"{self.fault} every {self.goodput_interval_s:g} s, {self.num_workers} workers, {size}"
                rows.append(BenchmarkRow(self.name, f"{name}: {every}", "goodput", "", share, 1.0, "no fault", share))
        return rows

    def _open(self, name: str, directory: Path) -> TrainingSide:
        task = {
            SECONDS: self.seconds_per_sample,
            PARAMETERS: self.num_parameters,
            BATCH: self.global_batch,
            STEPS: _ENDLESS,
            INTERVAL: self.checkpoint_interval,
        }
        environment = describe_environment(task, self.torchft_path if name == "torchft" else None)
        return SIDES[name](self.num_workers, directory, environment)

    def _train(self, name: str, victims: Sequence[int]) -> list[Recovery]:
        """Return what each of several faults cost."""
        with tempfile.TemporaryDirectory() as folder:
            side = self._open(name, Path(folder))
            try:
                side.start()
                recoveries = []
                after_s = 0.0
                for victim in victims:
                    self._wait_until_whole(side, after_s)
                    hit_s = self._hit(side, victim)
                    after_s = self._wait_until_whole(side, hit_s)
                    recoveries.append(judge(side.read_updates(), hit_s, self.num_workers))
                return recoveries
            finally:
                side.stop()

    def _measure_goodput(self, name: str) -> float:
        """Return the updates under faults to those without, per second, from full strength on."""
        draw = random.Random(self.seed)
        with tempfile.TemporaryDirectory() as folder:
            side = self._open(name, Path(folder))
            try:
                side.start()
                began_s = self._wait_until_whole(side, 0.0)
                calm = side.read_updates()[-self.steps_between :]
                rate = (calm[-1].step - calm[0].step) / (calm[-1].time_s - calm[0].time_s)
                first_step = calm[-1].step
                next_s = time.time() + self.goodput_interval_s
                while time.time() < began_s + self.goodput_s:
                    time.sleep(_POLL_S)
                    side.tend()
                    if time.time() >= next_s:
                        next_s += self.goodput_interval_s
                        self._hit(side, draw.randrange(self.num_workers))
                last = side.read_updates()[-1]
                return (last.step - first_step) / (time.time() - calm[-1].time_s) / rate
            finally:
                side.stop()

    def _hit(self, side: TrainingSide, victim: int) -> float:
        """Hit a worker, the next living one if that is gone, and return when."""
        workers = sorted(side.find_workers().items())
        if not workers:
            raise RuntimeError(f"a worker must be there to be hit, but all are gone; {side.last_words()}")
        _, pid = workers[victim % len(workers)]
        hit_s = time.time()
        os.kill(pid, _SIGNALS[self.fault])
        return hit_s

    def _wait_until_whole(self, side: TrainingSide, after_s: float) -> float:
        """Wait for some updates of all workers after a time; return the present one."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s:
            side.tend()
            whole = [each for each in side.read_updates() if each.time_s > after_s]
            calm = [each for each in whole if each.num_workers == self.num_workers]
            if len(calm) >= self.steps_between and whole[-1].num_workers == self.num_workers:
                return time.time()
            time.sleep(_POLL_S)
        raise RuntimeError(
            f"a side must be at full strength within {_PATIENCE_S:g} s, but was not; {side.last_words()}"
        )


def _find_p99(times_s: Sequence[float]) -> float:
    """Return the 99th percentile, between the two nearest of the times."""
    return quantiles(times_s, n=100, method="inclusive")[-1] if len(times_s) > 1 else times_s[0]


def judge(updates: Sequence[Update], hit_s: float, num_workers: int) -> Recovery:
    """Return what a fault at a time cost, given all updates until full strength was back.

    An update that was under way may still end just after the fault, so the longest pause counts.
    """
    before = [each for each in updates if each.time_s <= hit_s]
    after = [each for each in updates if each.time_s > hit_s]
    shrunk = next((place for place, each in enumerate(after) if each.num_workers < num_workers), 0)
    step_s = median(later.time_s - sooner.time_s for sooner, later in pairwise(before))
    times = [hit_s, *(each.time_s for each in after)]
    pauses = [later - sooner for sooner, later in pairwise(times)]
    longest = pauses.index(max(pauses))
    # Full strength is back with the first update of all workers that comes after a smaller group's, or after the pause.
    whole = [each for each in after[max(shrunk, longest) :] if each.num_workers == num_workers]
    done = max((each.step for each in updates if each.time_s <= times[longest]), default=0)
    again = {each.step for each in after[longest:] if each.step <= done}
    first = after[shrunk if after[shrunk].num_workers < num_workers else longest]
    return Recovery(first.time_s - hit_s, max(pauses[longest], step_s), whole[0].time_s - hit_s, len(again))
