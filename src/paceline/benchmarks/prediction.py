"""`bench prediction`: predicted beside published steps, for families of rows that were not fitted."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from pydantic import Field

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.registry import register
from paceline.simulator.training.answers import QUANTILE
from paceline.simulator.training.batch import make_batch
from paceline.simulator.training.calibration import MeasuredRows, fit_published, load_published, read_published
from paceline.simulator.training.case import make_case
from paceline.simulator.training.description import Description, describe
from paceline.simulator.training.fit import Posterior
from paceline.simulator.training.likeness import Features
from paceline.simulator.training.memory import estimate_memory

_REFERENCE = "constant MFU"
_GIVEN = 2
"""Rows of a family that are given for a warm prediction."""


@dataclass(frozen=True)
class Score:
    """Predictions of some rows beside what was measured, as logarithms of the ratio."""

    log_ratios: tuple[float, ...]
    log_spreads: tuple[float, ...]
    reference_log_ratios: tuple[float, ...]

    @property
    def error(self) -> float:
        """Mean error: exp(mean |ln(predicted / measured)|) - 1."""
        return mean_error(self.log_ratios)

    @property
    def coverage(self) -> float:
        """Share of rows inside their 90 % interval."""
        pairs = zip(self.log_ratios, self.log_spreads, strict=True)
        return statistics.fmean(abs(ratio) <= QUANTILE * spread for ratio, spread in pairs)

    @property
    def half_width(self) -> float:
        """Median half-width of the intervals, relative to the estimate."""
        return statistics.median(math.expm1(QUANTILE * spread) for spread in self.log_spreads)


@register("prediction")
class PredictionBenchmark(Benchmark):
    """Error of predicted steps on published rows, cold (their family not fitted) and warm (two rows of it given).

    The error is exp(mean |ln(predicted / measured)|) - 1; the reference is a constant share of the device's peak, from
    the same rows.
    """

    num_draws: int = Field(default=20, ge=1)
    """Draws of two given rows of each family."""

    def measure(self) -> list[BenchmarkRow]:
        """Predict every family from the others, then with two of its rows."""
        measured = load_published()
        families = dict.fromkeys(measured.families)
        posteriors = {family: fit_published(_others(measured, family)) for family in families}
        cold = {family: predict_cold(measured, family, posteriors[family]) for family in families}
        warm = {
            family: predict_warm(measured, family, posteriors[family], self.num_draws)
            for family in families
            if measured.families.count(family) > _GIVEN
        }
        rows = [row for family, score in cold.items() for row in self._rows(f"cold, {family}", [score])]
        rows += [row for family, score in warm.items() for row in self._rows(f"warm, {family}", [score])]
        language = [score for family, score in cold.items() if "resnet" not in family]
        rows += self._rows("cold, mean of families of language models", language)
        rows += self._rows("cold, mean of families", list(cold.values()))
        rows += self._rows("warm, mean of families", list(warm.values()))
        worst, mfu = max((score.error, mean_error(score.reference_log_ratios)) for score in cold.values())
        return [*rows, self._row("cold, worst family", "error", worst, mfu, _REFERENCE), *self._more(measured, cold)]

    def _more(self, measured: MeasuredRows, cold: dict[str, Score]) -> list[BenchmarkRow]:
        tau, num_pairs = rank_layouts(measured, cold)
        memory = mean_error(compare_memory())
        return [
            self._row(f"layouts of one model on one cluster, {num_pairs} pairs", "Kendall tau", tau, 0.6, "wanted"),
            self._row("shipped rows of memory", "error", memory, 0.1, "wanted"),
        ]

    def _rows(self, case: str, scores: Sequence[Score]) -> list[BenchmarkRow]:
        error = statistics.fmean(score.error for score in scores)
        reference = statistics.fmean(mean_error(score.reference_log_ratios) for score in scores)
        coverage = statistics.fmean(score.coverage for score in scores)
        half_width = statistics.median(score.half_width for score in scores)
        return [
            self._row(case, "error", error, reference, _REFERENCE),
            self._row(case, "rows in their 90 % interval", coverage, 0.9, "nominal"),
            self._row(case, "half-width of the interval", half_width, 0.25 if "cold" in case else 0.1, "wanted"),
        ]

    def _row(self, case: str, metric: str, ours: float, reference: float, name: str) -> BenchmarkRow:
        return BenchmarkRow(self.name, case, metric, "", ours, reference, name, ours / reference)


def mean_error(log_ratios: Sequence[float]) -> float:
    """Return exp(mean |ln(predicted / measured)|) - 1."""
    return math.expm1(statistics.fmean(abs(ratio) for ratio in log_ratios))


def predict_cold(measured: MeasuredRows, family: str, posterior: Posterior) -> Score:
    """Return the score of a family from rows of the others."""
    own = _own(measured, family)
    return _score(measured, own, posterior, _others(measured, family))


def predict_warm(measured: MeasuredRows, family: str, posterior: Posterior, num_draws: int) -> Score:
    """Return the score of a family from rows of the others and two of its own, over some draws of these."""
    generator = random.Random(0)
    scores = []
    for _ in range(num_draws):
        given = generator.sample(_own(measured, family), _GIVEN)
        rest = [index for index in _own(measured, family) if index not in given]
        scores.append(_score(measured, rest, posterior.correct(measured.observe(given)), given))
    return Score(
        tuple(ratio for score in scores for ratio in score.log_ratios),
        tuple(spread for score in scores for spread in score.log_spreads),
        tuple(ratio for score in scores for ratio in score.reference_log_ratios),
    )


def ideal_s(description: Description) -> float:
    """Return the seconds of a step whose model flops, without any computed twice, run at the devices' peak."""
    case = replace(description.case, recompute="none")
    workload = describe(case).workload
    flops = sum(
        flops * count
        for part in (workload.blocks, workload.head)
        for flops, count in zip(part.flops, part.counts, strict=True)
    )
    peak = case.device.peak_flops[case.device.find_precision(case.precision)] * case.device.clock_share
    return flops * case.num_micro_batches / (peak * case.pipeline)


def rank_layouts(measured: MeasuredRows, cold: dict[str, Score]) -> tuple[float, int]:
    """Return Kendall's tau of predicted and measured order of layouts, over pairs of one model on one cluster."""
    places = {family: iter(score.log_ratios) for family, score in cold.items()}
    groups: dict[str, list[tuple[float, float]]] = {}
    for row, step_s, family in zip(measured.rows, measured.step_s, measured.families, strict=True):
        predicted_s = step_s * math.exp(next(places[family]))
        key = f"{family} {row.model} {row.sample} {row.device} {row.num_ranks} {row.precision}"
        batch = row.global_batch or 1.0
        groups.setdefault(key, []).append((predicted_s / batch, step_s / batch))
    signs = [
        np.sign((first[0] - second[0]) * (first[1] - second[1]))
        for group in groups.values()
        for first, second in combinations(group, 2)
        if first[1] != second[1] and abs(math.log(first[0] / second[0])) > 1e-9
    ]
    return float(np.mean(signs)), len(signs)


def compare_memory() -> list[float]:
    """Return the logarithms of estimated over published memory."""
    return [
        math.log(estimate_memory(describe(make_case(row))).total_bytes / row.measured.memory_bytes)
        for row in read_published()
        if row.measured is not None and row.measured.memory_bytes is not None
    ]


def _own(measured: MeasuredRows, family: str) -> list[int]:
    return [index for index, name in enumerate(measured.families) if name == family]


def _others(measured: MeasuredRows, family: str) -> list[int]:
    return [index for index, name in enumerate(measured.families) if name != family]


def _score(measured: MeasuredRows, wanted: Sequence[int], posterior: Posterior, known: Sequence[int]) -> Score:
    descriptions = [measured.descriptions[index] for index in wanted]
    prediction = posterior.predict(make_batch(descriptions), Features(descriptions))
    ratios = np.log(prediction.terms.sum(axis=1)) - np.log([measured.step_s[index] for index in wanted])
    slowness = statistics.fmean(
        math.log(measured.step_s[index] / ideal_s(measured.descriptions[index])) for index in known
    )
    reference = [
        math.log(ideal_s(measured.descriptions[index]) / measured.step_s[index]) + slowness for index in wanted
    ]
    return Score(tuple(ratios.tolist()), tuple(prediction.log_spreads.tolist()), tuple(reference))
