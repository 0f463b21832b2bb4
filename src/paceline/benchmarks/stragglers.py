"""`bench stragglers`: what slow workers cost, and what rules that do not wait for them recover."""

import random
import statistics
import time
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.language import LanguageTask
from paceline.benchmarks.loss_picture import Curve, draw_losses
from paceline.benchmarks.problems import joined
from paceline.benchmarks.workers import Workers
from paceline.comm import Group
from paceline.comm.local_group import LocalGroup
from paceline.data import Splits
from paceline.errors import SettingsError
from paceline.registry import Settings, register
from paceline.replica.replica import Replica
from paceline.schedules import Constant
from paceline.sync import ASGD, SSP, EveryStep, ParameterServer, Rule
from paceline.training.load_balancing import LoadBalancer

Scene = Literal["healthy", "transient", "permanent"]
SideName = Literal["alone", "every_step", "shares", "backups", "ssp", "asgd"]
Step = tuple[float, float, int]
"""End of a step, in seconds since the start; its training loss; its samples."""

_TRIALS: tuple[tuple[Scene, SideName], ...] = (
    ("healthy", "every_step"),
    ("transient", "alone"),
    ("transient", "every_step"),
    ("transient", "ssp"),
    ("transient", "asgd"),
    ("permanent", "alone"),
    ("permanent", "every_step"),
    ("permanent", "backups"),
    ("permanent", "shares"),
    ("permanent", "ssp"),
    ("permanent", "asgd"),
)
_NUM_POINTS = 40


class Script(Settings):
    """Who is slow when. Computing is a sleep, so that cores that somebody leaves idle help nobody."""

    sample_s: float = Field(default=0.008, gt=0)
    """Sleep for a sample; the arithmetic comes on top and is small."""
    slow_chance: float = Field(default=0.1, ge=0, le=1)
    """Transient: how often each worker's step is slow."""
    slow_factor: float = Field(default=5.0, ge=1)
    """Transient: by how much."""
    permanent_factor: float = Field(default=3.0, ge=1)
    """Permanent: how much slower the last worker is, always."""

    def factor(self, scene: Scene, rank: int, size: int, step: int, seed: int) -> float:
        """Return how many times longer than a healthy one a worker takes for a step."""
        if scene == "permanent":
            return self.permanent_factor if rank == size - 1 else 1.0
        is_slow = random.Random(f"{seed} {rank} {step}").random() < self.slow_chance
        return self.slow_factor if scene == "transient" and is_slow else 1.0


@register("stragglers")
class StragglersBenchmark(Benchmark):
    """Speed of training with workers that are slow now and then, or one that always is.

    Sides train a small language model, one after another in each round, by a script of sleeps that is the same for all.
    Transient: waiting costs synchronous training the difference to workers that exchange nothing; the ratio is the part
    of it that a rule recovers. Permanent: samples a second beside the sum of what workers do that exchange
    nothing, the slow one too; and with backup workers steps a second beside synchronous training without a slow one.
    Sides called shares are synchronous with shares that follow measured speed.
    """

    task: LanguageTask = LanguageTask(
        width=32,
        num_layers=1,
        num_heads=2,
        sequence_length=32,
        samples_per_worker=12,
        schedule=Constant(warmup_steps=20),
        max_bytes=2_000_000,
    )
    """Task to train."""
    script: Script = Script()
    """Script of slow workers."""
    ssp: Rule = SSP(staleness=12)
    asgd: Rule = ASGD()
    backups: Rule = ParameterServer(num_backups=1)
    settle_s: float = Field(default=8.0, ge=0)
    """Time at the start of each side that is not counted: shares are measured in it."""
    duration_s: float = Field(default=12.0, gt=0)
    """Time that is counted."""
    num_rounds: int = Field(default=3, ge=1)
    """Times that each side is run, each with slow steps of its own."""
    picture: Path | None = None
    """Also draw loss against wall clock into this new file, .png or .svg."""
    workers: Workers = Workers(num_workers=4)
    """Workers of the benchmark."""

    @model_validator(mode="after")
    def _check_picture(self) -> Self:
        if self.picture is not None and (self.picture.exists() or self.picture.suffix not in (".png", ".svg")):
            raise ValueError(
                f"picture must be a new file that ends in .png or .svg, but got {self.picture}; choose another"
            )
        return self

    def measure(self) -> list[BenchmarkRow]:
        """Run all sides."""
        results = self.workers.start(run_trials, self.model_dump(mode="json"))
        num_trials = self.num_rounds * len(_TRIALS)
        found: dict[tuple[Scene, SideName], list[list[list[Step]]]] = {trial: [] for trial in _TRIALS}
        for index in range(num_trials):
            found[_TRIALS[index % len(_TRIALS)]].append([mine[index] for mine in results.values()])
        if self.picture is not None:
            self.picture.write_bytes(self._draw(found))
        return self._describe(found)

    def _describe(self, found: dict[tuple[Scene, SideName], list[list[list[Step]]]]) -> list[BenchmarkRow]:
        speeds = {
            trial: [sum(speed(steps, self.settle_s) for steps in workers) for workers in rounds]
            for trial, rounds in found.items()
        }
        free, synchronous = speeds["transient", "alone"], speeds["transient", "every_step"]
        lost = [a - b for a, b in zip(free, synchronous, strict=True)]
        rows = [
            self._compare("transient", name, "recovered of what waiting costs", "samples/s", gained, lost, "lost")
            for name in ("ssp", "asgd")
            for gained in [[a - b for a, b in zip(speeds["transient", name], synchronous, strict=True)]]
        ]
        for name in ("every_step", "shares", "ssp", "asgd"):
            ours, reference = speeds["permanent", name], speeds["permanent", "alone"]
            rows.append(self._compare("permanent", name, "speed", "samples/s", ours, reference, "sum of speeds"))
        ours, reference = (
            [speed(workers[0], self.settle_s, by="steps") for workers in rounds]
            for rounds in (found["permanent", "backups"], found["healthy", "every_step"])
        )
        rows.append(self._compare("permanent", "backups", "speed", "steps/s", ours, reference, "healthy synchronous"))
        return rows

    def _compare(
        self,
        scene: Scene,
        name: str,
        metric: str,
        unit: str,
        ours: list[float],
        reference: list[float],
        reference_name: str,
    ) -> BenchmarkRow:
        script = self.script
        what = {
            "transient": f"{script.slow_chance:.0%} of steps {script.slow_factor:g}x slower",
            "permanent": f"one of {self.workers.num_workers} {script.permanent_factor:g}x slower",
        }[scene]
        return BenchmarkRow.of_pairs(self.name, f"{name}: {what}", metric, unit, ours, reference, reference_name)

    def _draw(self, found: dict[tuple[Scene, SideName], list[list[list[Step]]]]) -> bytes:
        assert self.picture is not None
        end_s = self.settle_s + self.duration_s
        scenes: tuple[Scene, ...] = ("transient", "permanent")
        shown: tuple[tuple[SideName, str], ...] = (("every_step", "synchronous"), ("ssp", "SSP"), ("asgd", "ASGD"))
        panels = {
            f"{scene} stragglers": [
                Curve(
                    label, average([step for workers in found[scene, name] for mine in workers for step in mine], end_s)
                )
                for name, label in shown
            ]
            for scene in scenes
        }
        return draw_losses(panels, self.picture.suffix[1:])


def speed(steps: list[Step], settle_s: float, *, by: Literal["samples", "steps"] = "samples") -> float:
    """Return one worker's samples, or steps, a second, from the first step that ends after `settle_s` to the last."""
    counted = [(ended_s, num_samples) for ended_s, _, num_samples in steps if ended_s >= settle_s]
    if len(counted) < 2:
        raise SettingsError(
            f"duration_s must be long enough for two steps of the slowest worker, but it made {len(counted)}; raise it"
        )
    amount = sum(num_samples if by == "samples" else 1 for _, num_samples in counted[1:])
    return amount / (counted[-1][0] - counted[0][0])


def average(steps: list[Step], end_s: float) -> list[tuple[float, float]]:
    """Return the mean training loss of all samples in equal stretches of time, each with its middle."""
    width_s = end_s / _NUM_POINTS
    points = []
    for place in range(_NUM_POINTS):
        mine = [(loss, n) for ended_s, loss, n in steps if place * width_s <= ended_s < (place + 1) * width_s]
        if mine:
            points.append(((place + 0.5) * width_s, statistics.fmean(*zip(*mine, strict=True))))
    return points


def run_trials(settings: dict[str, Any]) -> list[list[Step]]:
    """Return this worker's steps of each trial, round after round. Every worker runs it."""
    benchmark = StragglersBenchmark.model_validate({**settings, "picture": None})
    splits = benchmark.task.open()
    results = []
    with joined() as group:
        for seed in range(benchmark.num_rounds):
            for scene, name in _TRIALS:
                results.append(_run_trial(benchmark, splits, group, scene, name, seed))
                group.barrier()
    return results


def _run_trial(
    benchmark: StragglersBenchmark, splits: Splits, group: Group, scene: Scene, name: SideName, seed: int
) -> list[Step]:
    task, script = benchmark.task, benchmark.script
    rule = EveryStep() if name in ("alone", "every_step", "shares") else getattr(benchmark, name)
    module = task.build(splits)
    optimizer = task.make_optimizer(module)
    mine = LocalGroup() if name == "alone" else group
    replica = Replica(module, optimizer, group=mine, sync=rule, clip_norm=task.clip_norm, hash_interval=0)
    # Without claims: a worker that is ahead takes its part of later global batches, and no two take the same samples.
    loader = task.load(splits, group)
    load_balancer = LoadBalancer(loader, group if name == "shares" else None, interval=5, is_following=True)
    end_s = benchmark.settle_s + benchmark.duration_s
    steps: list[Step] = []
    group.barrier()
    began_s = time.perf_counter()
    for batch in loader:
        task.set_rate(optimizer, len(steps))
        with load_balancer.computing(batch.num_samples):
            loss = task.loss(replica, batch)
            factor = script.factor(scene, group.rank, group.size, len(steps), seed)
            time.sleep(factor * script.sample_s * batch.num_samples)
            replica.backward(loss, weight=batch.num_samples)
        result = replica.update()
        loader.ack(batch)
        steps.append((time.perf_counter() - began_s, float(loss.detach()), batch.num_samples))
        load_balancer.end_step(len(steps), result.times)
        is_over = steps[-1][0] >= end_s
        if is_over:
            replica.membership.request_stop("time is up")
        # Workers at their own pace leave when time is up; the others agree on a last step.
        if result.stop or (is_over and rule.is_asynchronous):
            break
    replica.close()
    return steps
