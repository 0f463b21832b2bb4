"""Layer 10: published tables, measured again in shape: our numbers beside theirs."""

from paceline.benchmarks.reproductions.base import Reproduction
from paceline.benchmarks.reproductions.language_model_sync import LanguageModelSync
from paceline.benchmarks.reproductions.large_batch import LargeBatch
from paceline.registry import find_variant, list_variants

__all__ = ["LanguageModelSync", "LargeBatch", "Reproduction", "find_reproduction", "list_reproductions"]


def find_reproduction(name: str) -> type[Reproduction]:
    """Return a reproduction by its name.

    Raises:
        UnknownNameError: There is none of that name.
    """
    return find_variant(Reproduction, name)  # type: ignore[type-abstract]


def list_reproductions() -> dict[str, type[Reproduction]]:
    """Return all reproductions by name."""
    return list_variants(Reproduction)  # type: ignore[type-abstract]
