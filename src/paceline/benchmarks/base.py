"""What a benchmark is: settings that measure both sides of a comparison in one run."""

import json
import random
import statistics
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.errors import SettingsError
from paceline.registry import Family


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
    """Ours to the reference; for times the median of paired ratios."""
    ratio_upper: float | None = None
    """Upper bound of its bootstrap 95% interval (one-sided), where there are pairs."""


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
    table = Table("case", "metric", "Paceline", "reference", "ratio", "95% below", box=None)
    for row in rows:
        upper = "" if row.ratio_upper is None else f"{row.ratio_upper:.3f}"
        reference = f"{row.reference:.4g} {row.unit} ({row.reference_name})"
        table.add_row(row.case, row.metric, f"{row.ours:.4g} {row.unit}", reference, f"{row.ratio:.3f}", upper)
    Console().print(table, markup=False)


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write rows as JSON.

    Raises:
        SettingsError: `path` exists.
    """
    if path.exists():
        raise SettingsError(f"--json must be a new file, but {path} exists; choose another")
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
