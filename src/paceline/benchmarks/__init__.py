"""Layer 10: measurements, as ratios within one run."""

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.buckets import BucketsBenchmark
from paceline.benchmarks.checkpoints import CheckpointsBenchmark
from paceline.benchmarks.codec_choice import CodecChoiceBenchmark
from paceline.benchmarks.codecs import CodecsBenchmark
from paceline.benchmarks.collectives import CollectivesBenchmark
from paceline.benchmarks.comparison import COMPARISONS
from paceline.benchmarks.convergence import ConvergenceBenchmark
from paceline.benchmarks.data import DataBenchmark
from paceline.benchmarks.data_store import DataStoreBenchmark
from paceline.benchmarks.exposed import ExposedBenchmark
from paceline.benchmarks.io import InputOutputBenchmark
from paceline.benchmarks.layouts import LayoutsBenchmark
from paceline.benchmarks.memory import MemoryBenchmark
from paceline.benchmarks.prediction import PredictionBenchmark
from paceline.benchmarks.replica import ReplicaBenchmark
from paceline.benchmarks.resilience import ResilienceBenchmark
from paceline.benchmarks.server import ServerBenchmark
from paceline.benchmarks.stragglers import StragglersBenchmark
from paceline.benchmarks.tables import TableRow, check_new_files, print_table, write_files
from paceline.benchmarks.throughput import ThroughputBenchmark
from paceline.benchmarks.time_to_loss import TimeToLossBenchmark
from paceline.benchmarks.virtual_workers import VirtualWorkersBenchmark
from paceline.benchmarks.workers import Workers
from paceline.registry import find_variant, list_variants

__all__ = [
    "COMPARISONS",
    "Benchmark",
    "BenchmarkRow",
    "BucketsBenchmark",
    "CheckpointsBenchmark",
    "CodecChoiceBenchmark",
    "CodecsBenchmark",
    "CollectivesBenchmark",
    "ConvergenceBenchmark",
    "DataBenchmark",
    "DataStoreBenchmark",
    "ExposedBenchmark",
    "InputOutputBenchmark",
    "LayoutsBenchmark",
    "MemoryBenchmark",
    "PredictionBenchmark",
    "ReplicaBenchmark",
    "ResilienceBenchmark",
    "ServerBenchmark",
    "StragglersBenchmark",
    "TableRow",
    "ThroughputBenchmark",
    "TimeToLossBenchmark",
    "VirtualWorkersBenchmark",
    "Workers",
    "check_new_files",
    "find_benchmark",
    "list_benchmarks",
    "print_table",
    "write_files",
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
