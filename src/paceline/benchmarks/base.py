"""What a benchmark is: settings that measure both sides of a comparison in one run."""

import json
import random
import statistics
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.table import Table

from paceline.errors import SettingsError
from paceline.registry import Family

_HEADINGS = ("case", "metric", "Paceline", "reference", "ratio", "95% above", "95% below")


@dataclass(frozen=True)
class Row:
    """One comparison."""

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
        """Return it as texts, one for each column of a table."""
        bounds = ("" if bound is None else f"{bound:.3f}" for bound in (self.ratio_lower, self.ratio_upper))
        reference = f"{self.reference:.4g} {self.unit} ({self.reference_name})"
        return (self.case, self.metric, f"{self.ours:.4g} {self.unit}", reference, f"{self.ratio:.3f}", *bounds)


class Benchmark(Family):
    """Settings of a benchmark."""

    family = "benchmark"

    @abstractmethod
    def measure(self) -> list[Row]:
        """Run it."""


def compare_pairs(ours: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """Return the median of paired ratios and the upper bound of its one-sided 95% bootstrap interval."""
    ratios = [a / b for a, b in zip(ours, reference, strict=True)]
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[int(0.95 * len(medians))]


def print_table(rows: Sequence[Row]) -> None:
    """Print rows for people."""
    table = Table(*_HEADINGS, box=None)
    for row in rows:
        table.add_row(*row.cells())
    console = Console()
    if not console.is_terminal:
        console.width = 160  # nothing to fit in, so nothing is cut
    console.print(table, markup=False)


def check_new(path: Path, option: str) -> None:
    """Raise SettingsError where `path`, the value of `option`, exists."""
    if path.exists():
        raise SettingsError(f"{option} must be a new file, but {path} exists; choose another")


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write rows as JSON.

    Raises:
        SettingsError: `path` exists.
    """
    check_new(path, "--json")
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def write_markdown(rows: Sequence[Row], path: Path) -> None:
    """Write rows as a table of a page of documentation.

    Raises:
        SettingsError: `path` exists.
    """
    check_new(path, "--markdown")
    lines = [_HEADINGS, ("---",) * len(_HEADINGS), *(row.cells() for row in rows)]
    path.write_text("".join(f"| {' | '.join(cells)} |\n" for cells in lines))
