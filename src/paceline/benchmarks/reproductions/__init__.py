"""Layer 10: published tables, measured again in shape, or predicted: our numbers beside theirs."""

from paceline.benchmarks.reproductions.all_reduce import AllReduceTable
from paceline.benchmarks.reproductions.all_tables import AllTables
from paceline.benchmarks.reproductions.base import Reproduction
from paceline.benchmarks.reproductions.compression_ratios import CompressionRatios
from paceline.benchmarks.reproductions.configurations import Configurations
from paceline.benchmarks.reproductions.gpt3_tpu import GPT3OnTPU
from paceline.benchmarks.reproductions.imagenet_runs import ResNet65s, ResNetEpochs
from paceline.benchmarks.reproductions.language_model_sync import LanguageModelSync
from paceline.benchmarks.reproductions.large_batch import LargeBatch
from paceline.benchmarks.reproductions.predicted import PredictedTable
from paceline.benchmarks.reproductions.scaling_efficiency import Bandwidth, ScalingEfficiency
from paceline.registry import find_variant, list_variants

__all__ = [
    "AllReduceTable",
    "AllTables",
    "Bandwidth",
    "CompressionRatios",
    "Configurations",
    "GPT3OnTPU",
    "LanguageModelSync",
    "LargeBatch",
    "PredictedTable",
    "Reproduction",
    "ResNet65s",
    "ResNetEpochs",
    "ScalingEfficiency",
    "find_reproduction",
    "list_reproductions",
]


def find_reproduction(name: str) -> type[Reproduction]:
    """Return a reproduction by its name.

    Raises:
        UnknownNameError: There is none of that name.
    """
    return find_variant(Reproduction, name)  # type: ignore[type-abstract]


def list_reproductions() -> dict[str, type[Reproduction]]:
    """Return all reproductions by name."""
    return list_variants(Reproduction)  # type: ignore[type-abstract]
