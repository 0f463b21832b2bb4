"""`bench time_to_loss`: how long training takes on a slow network, beside what its arithmetic alone would take."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.language import (
    LanguageTask,
    Side,
    make_ddp_power_sgd_side,
    make_ddp_side,
    make_plain_side,
    make_post_local_side,
    make_rule_side,
)
from paceline.benchmarks.problems import joined
from paceline.benchmarks.workers import Workers
from paceline.comm import Group
from paceline.data import Splits
from paceline.errors import SettingsError
from paceline.registry import Settings, register
from paceline.sync import Rule

Curve = list[list[float]]
"""Pairs of step and held-out loss."""

_TORCHS = ("ddp", "ddp power_sgd", "post_local_sgd")
_MEETING = ("post_local_sgd", "local_sgd", "diloco")
"""Sides whose workers have the same parameters at the end of each period only, so that they are judged there."""


class _Plan(Settings):
    """How one side trains; without a rule it is torch's."""

    name: str
    rule: dict[str, Any] | None
    period: int
    num_steps: int
    judge_interval: int
    start: str | None = None
    """File to go on from."""
    start_steps: int = 0
    """Steps done in it."""


@dataclass(frozen=True)
class _Timing:
    """What a side took, step by step."""

    ended_s: list[float]
    """Time at which the last worker had ended each step, since the start."""
    compute_s: float
    """Duration of a step without exchange, on the same workers."""
    loss: float
    """Held out, after the last of these steps."""

    @property
    def step_s(self) -> float:
        """Mean duration of a step."""
        return self.ended_s[-1] / len(self.ended_s)

    @classmethod
    def median(cls, rounds: Sequence[Self]) -> Self:
        """Return the medians of several timings of a side."""
        ended_s = [statistics.median(times) for times in zip(*(timing.ended_s for timing in rounds), strict=True)]
        compute_s = statistics.median(timing.compute_s for timing in rounds)
        return cls(ended_s, compute_s, rounds[0].loss)

    @classmethod
    def of(cls, results: list[dict[str, Any]]) -> Self:
        """Return it from what all workers say."""
        return cls(
            [max(times) for times in zip(*(result["ended_s"] for result in results), strict=True)],
            max(result["compute_s"] for result in results),
            results[0]["curve"][-1][1],
        )


@register("time_to_loss")
class TimeToLossBenchmark(Benchmark):
    """Time to a held-out loss: torch's DDP and its like, and rules and codecs by name, from the same start.

    The start is random, or with `start_steps` what DDP makes of it in so many steps, as one goes on from a checkpoint.
    In which step each side reaches a loss is found first, with workers on this machine: it does not depend on the
    network. Then each side trains again from the start where it was asked to (`--hosts 4 --bandwidth 10mbit`), to the
    step in which it reaches the lowest loss, and nothing is judged before its clock has stopped. The ceiling of any
    speed-up over DDP is DDP's time for a step over that of the same loop exchanging nothing, T_ddp / T_compute.
    Workers have one thread each. A side that does not reach a loss has no time to it.
    """

    task: LanguageTask = LanguageTask()
    """Task to train."""
    sides: tuple[str, ...] = ("every_step one_bit", "every_step auto", "streaming_diloco int8", "ddp power_sgd")
    """That are measured beside DDP: a rule, or a rule and its codec, with their defaults; or torch's own: `ddp
    power_sgd`, which is DDP with the PowerSGD hook, and `post_local_sgd`."""
    start_steps: int = Field(default=0, ge=0)
    """Steps of `task.num_steps` that DDP takes before; every side goes on from there, with its weights, optimizer state
    and data."""
    period: int = Field(default=16, ge=2)
    """Period of torch's PostLocalSGD."""
    rules: dict[str, Rule] = Field(default_factory=dict)
    """Rules of sides with settings that are not their defaults, by the side's name:
    `{"diloco int8": {"name": "diloco", "codec": "int8", "period": 8}}`."""
    target_losses: tuple[Annotated[float, Field(gt=0)], ...] = (2.8, 2.6, 2.4)
    """Held out; nats a byte. At random it is 5.5."""
    judge_interval: int = Field(default=2, ge=1)
    """Steps from one judgement to the next; sides whose workers differ between sync steps are judged at sync steps."""
    num_judged_steps: int | None = Field(default=None, ge=1)
    """Steps of `task.num_steps` that sides are judged in; by default all. Learning rates are those of the whole
    training."""
    num_rounds: int = Field(default=1, ge=1)
    """Timings of each side, which take turns; of each time the median is told."""
    num_compute_steps: int = Field(default=20, ge=1)
    """Timed steps of the loop that exchanges nothing, before each side."""
    workers: Workers = Workers(num_workers=4)
    """Workers of the benchmark."""

    @field_validator("sides")
    @classmethod
    def _check_sides(cls, sides: tuple[str, ...]) -> tuple[str, ...]:
        for side in sides:
            if side not in _TORCHS:
                _rule_of(side)
        return sides

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if unused := [name for name in self.rules if name not in self.sides or name in _TORCHS]:
            raise ValueError(
                f"rules must be of sides, and not of torch's, but got {', '.join(unused)} beside sides "
                f"{', '.join(self.sides)}; give each under the name of its side"
            )
        return self

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.num_judged_steps is not None and self.num_judged_steps > self.task.num_steps:
            raise ValueError(
                f"num_judged_steps must be at most task.num_steps={self.task.num_steps}, but got "
                f"{self.num_judged_steps}; lower it"
            )
        period = max(self._period(side) for side in ("ddp", *self.sides))
        if self._last_step - self.start_steps < period:
            raise ValueError(
                "the steps that are judged must be at least the longest period, without start_steps, but got "
                f"{self._last_step}, {period} and {self.start_steps}; raise task.num_steps or num_judged_steps"
            )
        return self

    @property
    def _last_step(self) -> int:
        return self.num_judged_steps or self.task.num_steps

    def measure(self) -> list[BenchmarkRow]:
        """Find each side's step, then time each side to it."""
        with tempfile.TemporaryDirectory(prefix="paceline-time-to-loss-") as directory:
            return self._measure(str(Path(directory, "start.pt")) if self.start_steps else None)

    def _measure(self, start: str | None) -> list[BenchmarkRow]:
        names = ["ddp", *(side for side in self.sides if side != "ddp")]
        local = Workers(num_workers=self.workers.num_workers)
        if start is not None:
            local.start(train_start, self.task.model_dump(mode="json"), self.start_steps, start)
        num_steps = self._last_step - self.start_steps
        judged = self._train(local, [self._plan(name, num_steps, start, judged=True) for name in names])[0]
        curves = {name: result["curve"] for name, result in zip(names, judged, strict=True)}
        needed = {name: self._find_steps(curve) for name, curve in curves.items()}
        if missed := [target for target in self.target_losses if target not in needed["ddp"]]:
            raise SettingsError(
                f"target_losses must be some that DDP reaches in {self._last_step} steps, but it did not reach "
                f"{missed}, and came to {curves['ddp'][-1][1]:.3f}; raise them, or task.num_steps"
            )
        plans = [self._plan(name, max(steps.values()), start, judged=False) for name, steps in needed.items() if steps]
        by_rank = self._train(self.workers, plans * self.num_rounds)
        rounds = [_Timing.of(list(results)) for results in zip(*by_rank.values(), strict=True)]
        timings = {plan.name: _Timing.median(rounds[i :: len(plans)]) for i, plan in enumerate(plans)}
        rows = self._describe_losses(curves, timings) + self._describe_ceiling(timings)
        for target in sorted(self.target_losses, reverse=True):
            steps = {name: steps[target] for name, steps in needed.items() if target in steps}
            rows += self._describe_times(target, steps, timings)
        return rows

    def _plan(self, name: str, num_steps: int, start: str | None, *, judged: bool) -> _Plan:
        return _Plan(
            name=name,
            rule=rule.model_dump(mode="json") if (rule := self._rule(name)) else None,
            period=self._period(name),
            num_steps=num_steps,
            judge_interval=self._judge_interval(name) if judged else 0,
            start=start,
            start_steps=self.start_steps,
        )

    def _train(self, workers: Workers, plans: list[_Plan]) -> dict[int, list[dict[str, Any]]]:
        documents = [plan.model_dump(mode="json") for plan in plans]
        return workers.start(train_sides, self.task.model_dump(mode="json"), documents, self.num_compute_steps)

    def _rule(self, name: str) -> Rule | None:
        if name in _TORCHS:
            return None
        return self.rules[name] if name in self.rules else _rule_of(name)

    def _period(self, name: str) -> int:
        period: int = getattr(self._rule(name), "period", self.period if name == "post_local_sgd" else 1)
        return period

    def _judge_interval(self, name: str) -> int:
        return self._period(name) if name.split()[0] in _MEETING else self.judge_interval

    def _find_steps(self, curve: Curve) -> dict[float, int]:
        """Return the step in which each target was reached, of those that were."""
        reached = {t: next((int(step) for step, loss in curve if loss <= t), None) for t in self.target_losses}
        return {target: step for target, step in reached.items() if step is not None}

    def _describe_losses(self, curves: dict[str, Curve], timings: dict[str, _Timing]) -> list[BenchmarkRow]:
        """Compare losses at the last step at which all were judged, and those of a side's two trainings."""
        last = max(set.intersection(*({int(step) for step, _ in curve} for curve in curves.values())))
        losses = {name: {int(step): loss for step, loss in curve} for name, curve in curves.items()}
        metric = f"held-out loss after {last} steps"
        rows = [
            self._row(self._case(name), metric, "nats", losses[name][last], losses["ddp"][last], "DDP")
            for name in curves
            if name != "ddp"
        ]
        for name, timing in timings.items():
            steps = len(timing.ended_s)
            metric = f"held-out loss of the timed training, {steps} steps"
            rows.append(self._row(self._case(name), metric, "nats", timing.loss, losses[name][steps], "the judged one"))
        return rows

    def _describe_ceiling(self, timings: dict[str, _Timing]) -> list[BenchmarkRow]:
        step_s, compute_s = _step_s(timings)
        rows = [self._row(self._case("ddp"), "step", "s", step_s, compute_s, "no exchange")]
        for name, timing in timings.items():
            if name != "ddp":
                speed_up, said = step_s / timing.step_s, "ceiling T_ddp / T_compute"
                rows.append(self._row(self._case(name), "speed-up of a step", "x", speed_up, step_s / compute_s, said))
        return rows

    def _describe_times(self, target: float, steps: dict[str, int], timings: dict[str, _Timing]) -> list[BenchmarkRow]:
        taken_s = {name: timings[name].ended_s[number - 1] for name, number in steps.items()}
        step_s, compute_s = _step_s(timings)
        rows = []
        for name, ours_s in taken_s.items():
            if name == "ddp":
                continue
            case, metric = self._case(name), f"time to loss {target:g}, {steps[name]} steps"
            rows.append(self._row(case, metric, "s", ours_s, taken_s["ddp"], f"DDP, {steps['ddp']} steps"))
            metric, said = f"speed-up over DDP to loss {target:g}", "ceiling T_ddp / T_compute"
            rows.append(self._row(case, metric, "x", taken_s["ddp"] / ours_s, step_s / compute_s, said))
            if name != "post_local_sgd" and "post_local_sgd" in taken_s:
                metric, said = f"time to loss {target:g}", f"PostLocalSGD, {steps['post_local_sgd']} steps"
                rows.append(self._row(case, metric, "s", ours_s, taken_s["post_local_sgd"], said))
        return rows

    def _row(
        self, case: str, metric: str, unit: str, ours: float, reference: float, reference_name: str
    ) -> BenchmarkRow:
        return BenchmarkRow(self.name, case, metric, unit, ours, reference, reference_name, ours / reference)

    def _case(self, name: str) -> str:
        period = f", period {self._period(name)}" if self._period(name) > 1 else ""
        return f"{name}{period}, {self._place()}"

    def _place(self) -> str:
        if self.workers.bandwidth is None:
            return f"{self.workers.num_workers} workers on one host"
        return f"{self.workers.num_hosts} hosts at {8 * self.workers.bandwidth / 1e6:g} Mbit/s"


def _rule_of(side: str) -> Rule:
    """Return the rule of a name, or of a name and a codec's, with their defaults."""
    name, _, codec = side.partition(" ")
    return Rule.model_validate({"name": name, **({"codec": codec} if codec else {})})


def _step_s(timings: dict[str, _Timing]) -> tuple[float, float]:
    """Return the seconds of DDP's step, and of one that exchanges nothing."""
    return timings["ddp"].step_s, statistics.median(timing.compute_s for timing in timings.values())


def train_start(task: dict[str, Any], num_steps: int, path: str) -> None:
    """Write what DDP makes of the random start to a file. Every worker runs it."""
    settings = LanguageTask.model_validate(task)
    splits = settings.open()
    with joined() as group:
        side = make_ddp_side(settings, splits)
        for number, batch in zip(range(num_steps), settings.load(splits, group), strict=False):
            side.step(number, batch)
        if group.rank == 0:
            side.save(path)


def train_sides(task: dict[str, Any], plans: list[dict[str, Any]], num_compute_steps: int) -> list[dict[str, Any]]:
    """Train sides one after another, each from the start. Every worker runs it.

    Returns:
        Of each side: ended_s, seconds since the start, by step; compute_s, of a step that exchanges nothing; curve,
        pairs of step and held-out loss, each `judge_interval` steps, or without it after the last one, when the clock
        has stopped.
    """
    settings = LanguageTask.model_validate(task)
    splits = settings.open()
    # Its text is as long, so that it warms up what depends on shapes least of all: imports, kernels, threads.
    tiny = settings.model_copy(update={"width": 8 * settings.num_heads, "num_layers": 1})
    results = []
    with joined() as group:
        for plan in map(_Plan.model_validate, plans):
            warm_up = plan.model_copy(update={"num_steps": 2 * plan.period, "judge_interval": 0, "start": None})
            _train_side(tiny, splits, group, warm_up)
            compute_s = _time_compute(settings, splits, group, num_compute_steps)
            results.append({"compute_s": compute_s, **_train_side(settings, splits, group, plan)})
    return results


def _train_side(task: LanguageTask, splits: Splits, group: Group, plan: _Plan) -> dict[str, Any]:
    side = _make_side(task, splits, group, plan)
    if plan.start is not None:
        side.load(plan.start)
    curve: Curve = []
    ended_s: list[float] = []
    batches = itertools.islice(task.load(splits, group), plan.start_steps, None)
    batch = next(batches)
    group.barrier()
    began_s = time.perf_counter()
    for step in range(1, plan.num_steps + 1):
        side.step(plan.start_steps + step - 1, batch)
        ended_s.append(time.perf_counter() - began_s)
        if step < plan.num_steps:
            batch = next(batches)
        if plan.judge_interval and step % plan.judge_interval == 0:
            curve.append([step, _judge(task, side, splits, group)])
    if not plan.judge_interval:
        curve.append([plan.num_steps, _judge(task, side, splits, group)])
    side.close()
    return {"ended_s": ended_s, "curve": curve}


def _make_side(task: LanguageTask, splits: Splits, group: Group, plan: _Plan) -> Side:
    if plan.rule is not None:
        return make_rule_side(task, splits, group, Rule.model_validate(plan.rule))
    if plan.name == "ddp":
        return make_ddp_side(task, splits)
    if plan.name == "ddp power_sgd":
        return make_ddp_power_sgd_side(task, splits)
    return make_post_local_side(task, splits, plan.period)


def _judge(task: LanguageTask, side: Side, splits: Splits, group: Group) -> float:
    with side.consensus():
        return task.judge(side.module, splits, group)


def _time_compute(task: LanguageTask, splits: Splits, group: Group, num_steps: int) -> float:
    """Return the seconds of a step of a loop that exchanges nothing, while all workers run it."""
    side = make_plain_side(task, splits)
    batches = iter(task.load(splits, group))
    side.step(0, next(batches))
    group.barrier()
    began_s = time.perf_counter()
    for number in range(num_steps):
        side.step(number, next(batches))
    return (time.perf_counter() - began_s) / num_steps
