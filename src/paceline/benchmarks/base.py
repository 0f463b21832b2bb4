"""What a benchmark is: settings that measure both sides of a comparison in one run."""

import random
import statistics
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from paceline.benchmarks.tables import TableRow
from paceline.registry import Family


@dataclass(frozen=True)
class BenchmarkRow(TableRow):
    """One measurement beside its reference."""

    headings = ("case", "metric", "Paceline", "reference", "ratio", "95% above", "95% below")

    bench: str
    case: str
    metric: str
    unit: str
    ours: float
    reference: float
    reference_name: str
    ratio: float
    """Ours to the reference; where there are pairs, the median of their ratios."""
    ratio_upper: float | None = None
    """Upper bound of its bootstrap 95% interval (one-sided), where there are pairs."""
    ratio_lower: float | None = None
    """Lower bound likewise."""

    @classmethod
    def of_pairs(
        cls,
        bench: str,
        case: str,
        metric: str,
        unit: str,
        ours: Sequence[float],
        reference: Sequence[float],
        reference_name: str,
    ) -> Self:
        """Return the row of measurements that were taken in turn, in pairs."""
        ratio, upper = compare_pairs(ours, reference)
        return cls(
            bench,
            case,
            metric,
            unit,
            statistics.median(ours),
            statistics.median(reference),
            reference_name,
            ratio,
            ratio_upper=upper,
            ratio_lower=1 / compare_pairs(reference, ours)[1],
        )

    def cells(self) -> tuple[str, ...]:
        """Return it as texts."""
        bounds = ("" if bound is None else f"{bound:.3f}" for bound in (self.ratio_lower, self.ratio_upper))
        reference = f"{self.reference:.4g} {self.unit} ({self.reference_name})"
        return (self.case, self.metric, f"{self.ours:.4g} {self.unit}", reference, f"{self.ratio:.3f}", *bounds)


class Benchmark(Family):
    """Settings of a benchmark."""

    family = "benchmark"

    @abstractmethod
    def measure(self) -> list[BenchmarkRow]:
        """Run it."""


def compare_pairs(ours: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """Return the median of paired ratios and the upper bound of its one-sided 95% bootstrap interval."""
    ratios = [a / b for a, b in zip(ours, reference, strict=True)]
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[int(0.95 * len(medians))]
