"""One micro-batch of one rank, as it was recorded."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.planner.recorder import PlaceRecord

FIRST = "<first>"
LAST = "<last>"
TIED = "<tied>"
"""Names of places that own parameters: before the first block; after the last one; before, and used after it too."""


@dataclass(frozen=True)
class WorkloadTrace:
    """One micro-batch of one rank.

    Args:
        samples: Samples of it.
        tensor: Ranks that share each matrix.
        places: Record of each block, and of all else.
        parameters: Parameters of each place; see `FIRST`.
        working_bytes: Bytes that head and loss need at once.
        cuts_tokens: Whether ranks share tokens between matrices.
        uncounted: Names of operators that could not be counted.
    """

    samples: int
    tensor: int
    places: Mapping[str, PlaceRecord]
    parameters: Mapping[str, int]
    working_bytes: float
    cuts_tokens: bool
    uncounted: tuple[str, ...]
