"""Ways that change what is learnt: what our own benches measured of each, and what it exchanges in a step."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from math import exp, hypot, log, sqrt
from statistics import mean
from typing import Any

from torch import Size

from paceline.compression import AutoCodec, Codec, NoCodec
from paceline.compression.codec import CodecSetting
from paceline.registry import list_variants
from paceline.simulator.training.answers import QUANTILE
from paceline.simulator.training.exchanges import GradientExchange
from paceline.sync import EveryStep, Rule
from paceline.sync.codec_choice import LOSS_BY_STEPS, price_codec
from paceline.sync.diloco import DiLoCo
from paceline.sync.periodic import PeriodicRule

LEAST_ROUNDS = 25
"""Rounds of a run below which rules that exchange once in a period are not proposed."""
MOST_TIMES_WORKERS = 2
"""Number of workers, to the most that a way was measured with, up to which it is proposed."""
_BOOTSTRAP = 2 * 1.96
"""Width of a bootstrap interval of 95 %, in standard deviations."""


@dataclass(frozen=True)
class LossRatio:
    """Held-out loss with a way, to that of every_step without a codec after the same steps, by a bench of ours.

    Args:
        file: File in docs/benchmarks.
        case: Row of it.
        metric: Metric of the row.
        ratio: The ratio, a mean over seeds.
        ratio_lower: Lower end of its 95 % interval over seeds; None: not known.
        ratio_upper: Upper end.
        num_seeds: Number of seeds.
        num_workers: Number of workers.
        num_steps: Steps of each training.
    """

    file: str
    case: str
    metric: str
    ratio: float
    ratio_lower: float | None
    ratio_upper: float | None
    num_seeds: int
    num_workers: int
    num_steps: int

    @property
    def variance(self) -> float:
        """Variance of the logarithm of the ratio over seeds; 0 where it is not known."""
        if self.ratio_lower is None or self.ratio_upper is None:
            return 0.0
        return (log(self.ratio_upper / self.ratio_lower) / _BOOTSTRAP) ** 2


@dataclass(frozen=True, eq=False)
class Way:
    """A rule with a codec whose loss was measured, with exactly these settings.

    Args:
        name: Name of it.
        optimizers: Optimizers with which it was measured, or whose kin was.
        settings: Settings of a run, by dotted path.
        measured: Measurements of it.
    """

    name: str
    optimizers: tuple[str, ...]
    settings: tuple[tuple[str, Any], ...]
    measured: tuple[LossRatio, ...]

    @cached_property
    def rule(self) -> Rule:
        """The rule."""
        fields = {path.removeprefix("sync."): value for path, value in self.settings if path != "sync"}
        rule: Rule = Rule.model_validate({"name": dict(self.settings)["sync"], **fields})
        return rule

    @property
    def codec(self) -> Codec:
        """The codec of the rule."""
        found = self.rule.codec if isinstance(self.rule, EveryStep | PeriodicRule) else NoCodec()
        return found if isinstance(found, Codec) else NoCodec()

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        return self.rule.period if isinstance(self.rule, PeriodicRule) else 1

    @property
    def steps_factor(self) -> float:
        """Steps to the same loss, to those of every_step: never fewer, since gains were of the reference's settings."""
        return max(1.0, exp(mean(log(one.ratio) for one in self.measured) / LOSS_BY_STEPS))

    @property
    def log_spread(self) -> float:
        """Standard deviation of the logarithm of `steps_factor` on a model that was not measured."""
        number = len(self.measured)
        of_seeds = sum(one.variance for one in self.measured) / number**2
        # Few measurements say little of how they spread: those of all ways count as one more of its own.
        logs = [log(one.ratio) for one in self.measured]
        squares = sum((value - mean(logs)) ** 2 for value in logs) + _spread_between_trainings() ** 2
        return hypot(sqrt(squares / number * (1 + 1 / number)), sqrt(of_seeds)) / LOSS_BY_STEPS

    @property
    def most_workers(self) -> int:
        """Most workers with which it is proposed."""
        return MOST_TIMES_WORKERS * max(one.num_workers for one in self.measured)

    def describe_factor(self) -> str:
        """Return the steps that it takes to the same loss, with their interval and origin."""
        ratios = ", ".join(f"{one.ratio:.3f}" for one in self.measured)
        places = ", ".join(dict.fromkeys(one.file for one in self.measured))
        return (
            f"{self.steps_factor:.3g} times the steps to the same loss (90 %: up to "
            f"{self.steps_factor * exp(QUANTILE * self.log_spread):.3g}), as its loss was {ratios} of every_step's "
            f"after as many steps (docs/benchmarks: {places})"
        )

    def exchange(self, shapes: Sequence[Size], num_workers: int, num_steps: int) -> GradientExchange:
        """Return what it exchanges in a step of a run, beside an all-reduce of gradients in each step."""
        rule, codec, usual = self.rule.fit_length(num_steps), self.codec, EveryStep()
        traffic = rule.traffic(shapes, num_workers)
        shares = [one.count(num_steps) / num_steps for one in traffic]
        dense = usual.traffic(shapes, num_workers)[0]
        sent = sum(share * one.wire_bytes for share, one in zip(shares, traffic, strict=True)) / dense.wire_bytes
        num_bytes = float(dense.num_bytes)
        own, plain = (
            price_codec(one, shapes, num_workers, is_adaptive=self._is_adaptive, copy_bytes_per_s=num_bytes)
            for one in (codec, NoCodec())
        )
        share = sum(shares) / len(shares)  # fragments share the messages of a whole exchange
        is_gradient = isinstance(rule, EveryStep) and own.codec_of == "gradient"
        hidden = 0.0
        if isinstance(rule, PeriodicRule):
            hidden = sum(share * one.overlap for share, one in zip(shares, traffic, strict=True))
        return GradientExchange(
            sent=sent,
            messages=share * own.num_messages / plain.num_messages,
            parts=own.num_buckets / plain.num_buckets,
            hidden_steps=None if is_gradient else hidden,
            coding=own.encode_s * share,
            state_bytes=self._count_state_bytes(),
        )

    @property
    def _is_adaptive(self) -> bool:
        return "sgd" not in self.optimizers

    def _count_state_bytes(self) -> float:
        """Return the bytes that a worker keeps for each parameter: residuals, outer parameters and their momentum."""
        residuals = 0.0 if isinstance(self.codec, NoCodec) else 4.0
        outer = 4.0 if isinstance(self.rule, PeriodicRule) else 0.0
        return residuals + outer + (4.0 if isinstance(self.rule, DiLoCo) else 0.0)


@cache
def load_ways() -> tuple[Way, ...]:
    """Return all ways that were measured."""
    document = json.loads(files("paceline.planner").joinpath("convergence.json").read_text())
    return tuple(
        Way(
            one["name"],
            tuple(one["optimizers"]),
            tuple(one["overrides"].items()),
            tuple(LossRatio(**measured) for measured in one["measured"]),
        )
        for one in document["ways"]
    )


@cache
def _spread_between_trainings() -> float:
    """Return the standard deviation of a way's loss, as a logarithm, between trainings: of all measured twice."""
    logs = [[log(one.ratio) for one in way.measured] for way in load_ways() if len(way.measured) > 1]
    squares = sum((value - mean(own)) ** 2 for own in logs for value in own)
    return sqrt(squares / sum(len(own) - 1 for own in logs))


@dataclass(frozen=True)
class Inexact:
    """Ways that a plan may take although they change what is learnt.

    Args:
        shapes: Shapes of the model's parameters.
        optimizer: Name of the run's optimizer.
        num_steps: Steps of the run.
        steps_refused: Reason why steps of the run's optimizer cannot be coded; empty if they can.
    """

    shapes: tuple[Size, ...]
    optimizer: str
    num_steps: int
    steps_refused: str = ""

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """Ways whose loss was measured with such an optimizer, in runs of enough rounds, that the run can have."""
        return tuple(way for way in self._measured if way not in self._short and way not in self._refused)

    @cached_property
    def _short(self) -> tuple[Way, ...]:
        return tuple(way for way in self._measured if way.period > 1 and self.num_steps < LEAST_ROUNDS * way.period)

    @cached_property
    def _refused(self) -> tuple[Way, ...]:
        coded = [way for way in self._measured if isinstance(way.rule, EveryStep) and way.rule.codec_of == "step"]
        return tuple(coded) if self.steps_refused else ()

    @cached_property
    def _measured(self) -> tuple[Way, ...]:
        return tuple(way for way in load_ways() if self.optimizer in way.optimizers)

    def list_ways(self, num_workers: int) -> list[Way]:
        """Return the ways of so many workers."""
        return [way for way in self.ways if 1 < num_workers <= way.most_workers]

    def exchange(self, way: Way, num_workers: int) -> GradientExchange:
        """Return what a way exchanges among so many workers."""
        key = (way.name, num_workers)
        if key not in self._exchanges:
            self._exchanges[key] = way.exchange(self.shapes, num_workers, self.num_steps)
        return self._exchanges[key]

    @cached_property
    def _exchanges(self) -> dict[tuple[str, int], GradientExchange]:
        return {}

    def describe_left_out(self) -> list[str]:
        """Return which ways are not proposed, and why, one line each."""
        rules = {way.rule.name for way in self._measured} | {EveryStep.name}
        codecs = {way.codec.name for way in self._measured} | {NoCodec.name, AutoCodec.name}
        unknown = [
            f"codecs {', '.join(name for name in list_variants(CodecSetting) if name not in codecs)}",
            f"rules {', '.join(name for name in list_variants(Rule) if name not in rules)}",  # type: ignore[type-abstract]
            "other precisions",
        ]
        lines = [f"not proposed, as no bench measured their loss with {self.optimizer}: {'; '.join(unknown)}"]
        if self._refused:
            names = "; ".join(way.name for way in self._refused)
            lines.append(f"not proposed, as steps cannot be coded {self.steps_refused}: {names}")
        if short := self._short:
            lines.append(
                f"not proposed in {self.num_steps:,} steps, fewer than {LEAST_ROUNDS} periods: "
                f"{'; '.join(way.name for way in short)}"
            )
        if self.ways:
            most = "; ".join(f"{way.name}: {way.most_workers}" for way in self.ways)
            lines.append(f"most workers, {MOST_TIMES_WORKERS} times those that each was measured with: {most}")
        return lines
