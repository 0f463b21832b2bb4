"""Layer 2: collective operations as data: tables that `verify` proves, a simulator costs and a group runs."""

from paceline.programs.base import Algorithm, Collective, Program, Round, chunk_bounds
from paceline.programs.direct import Direct
from paceline.programs.double_tree import DoubleTree
from paceline.programs.halving_doubling import HalvingDoubling
from paceline.programs.hierarchical import Hierarchical
from paceline.programs.naive import Naive
from paceline.programs.recursive_doubling import RecursiveDoubling
from paceline.programs.ring import Ring
from paceline.programs.torus import Torus
from paceline.registry import find_variant, list_variants

__all__ = [
    "Algorithm",
    "Collective",
    "Direct",
    "DoubleTree",
    "HalvingDoubling",
    "Hierarchical",
    "Naive",
    "Program",
    "RecursiveDoubling",
    "Ring",
    "Round",
    "Torus",
    "chunk_bounds",
    "find_algorithm",
    "list_algorithms",
]


def find_algorithm(name: str) -> type[Algorithm]:
    """Return the algorithm registered under `name`.

    Raises:
        UnknownNameError: No algorithm has the name; the message lists the known ones.
    """
    return find_variant(Algorithm, name)  # type: ignore[type-abstract]


def list_algorithms() -> dict[str, type[Algorithm]]:
    """Return all algorithms, by name."""
    return list_variants(Algorithm)  # type: ignore[type-abstract]
