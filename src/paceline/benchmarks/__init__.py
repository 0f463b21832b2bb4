"""Layer 8: measurements, as ratios within one run."""

from paceline.benchmarks.base import Benchmark, Row, check_new, print_table, write_markdown, write_rows
from paceline.benchmarks.codecs import CodecsBenchmark
from paceline.benchmarks.collectives import CollectivesBenchmark
from paceline.benchmarks.exposed import ExposedBenchmark
from paceline.benchmarks.replica import ReplicaBenchmark
from paceline.benchmarks.workers import Workers
from paceline.registry import find_variant, list_variants

__all__ = [
    "Benchmark",
    "CodecsBenchmark",
    "CollectivesBenchmark",
    "ExposedBenchmark",
    "ReplicaBenchmark",
    "Row",
    "Workers",
    "check_new",
    "find_benchmark",
    "list_benchmarks",
    "print_table",
    "write_markdown",
    "write_rows",
]


def find_benchmark(name: str) -> type[Benchmark]:
    """Return a benchmark by its name.

    Raises:
        UnknownNameError: There is none of that name.
    """
    return find_variant(Benchmark, name)  # type: ignore[type-abstract]


def list_benchmarks() -> dict[str, type[Benchmark]]:
    """Return all benchmarks by name."""
    return list_variants(Benchmark)  # type: ignore[type-abstract]
