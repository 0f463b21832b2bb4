"""A collective operation as data: rounds of transfers of chunks between ranks, as integer arrays.

What a chunk is depends on the collective; the buffer of a rank is cut into `num_chunks` chunks that are as equal as
can be. All-reduce, broadcast: the whole buffer on every rank. Reduce-scatter: the whole buffer on every rank before,
and after it rank r holds the sum of the chunks that it owns (`owners`). All-gather: before it rank r holds the
chunks it owns, after it everybody holds all. All-to-all: chunk ``source * num_ranks + destination`` is what source has
for destination.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SettingsError
from paceline.registry import Family

Integers = NDArray[np.int64]


class Collective(StrEnum):
    """What a program computes."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True)
class Round:
    """Transfers that run together: each sends what its source held before the round. Arrays of one length.

    A transfer carries the chunks ``first, first + 1, ..., first + count - 1``; it never wraps around.
    """

    sources: Integers
    destinations: Integers
    firsts: Integers
    counts: Integers
    adds: NDArray[np.bool_]
    """Whether the destination adds what it receives to what it holds; else it replaces it."""

    def __len__(self) -> int:
        return len(self.sources)


class Program:
    """A collective for a number of ranks.

    Rounds are made when they are asked for, so that a ring of 4,096 ranks (33 million transfers) needs no table.

    Attributes:
        collective: What it computes.
        name: The algorithm, as registered.
        num_ranks: Ranks that take part.
        num_chunks: Chunks that the buffer is cut into.
        root: Where a broadcast starts.
        owners: Rank that owns each chunk, shape ``(num_chunks,)``; for reduce-scatter and all-gather.
    """

    def __init__(
        self,
        collective: Collective,
        name: str,
        num_ranks: int,
        num_chunks: int,
        num_rounds: int,
        make_round: Callable[[int], Round],
        *,
        root: int = 0,
        owners: Integers | None = None,
    ) -> None:
        self.collective = collective
        self.name = name
        self.num_ranks = num_ranks
        self.num_chunks = num_chunks
        self.num_rounds = num_rounds
        self.root = root
        self.owners = owners
        self._make_round = make_round

    def round(self, index: int) -> Round:
        """Return one round."""
        return self._make_round(index)

    def rounds(self) -> Iterator[Round]:
        """Return the rounds, one after another."""
        return (self._make_round(index) for index in range(self.num_rounds))


class Algorithm(Family):
    """Settings of a family of programs: ring, double tree, ..."""

    family = "program"
    collectives: ClassVar[frozenset[Collective]]
    """What it can do."""

    def build(self, collective: Collective, num_ranks: int, *, root: int = 0) -> Program:
        """Return the program of `collective` for `num_ranks`.

        Raises:
            SettingsError: The algorithm does not do that collective, or not for that many ranks.
        """
        if collective not in self.collectives:
            known = ", ".join(sorted(self.collectives))
            raise SettingsError(f"a {self.name} program must be one of {known}, but got {collective}; choose another")
        return self._build(Collective(collective), num_ranks, root)

    @abstractmethod
    def _build(self, collective: Collective, num_ranks: int, root: int) -> Program: ...


def chunk_bounds(num_elements: int, num_chunks: int) -> Integers:
    """Return where chunks begin in a buffer, shape ``(num_chunks + 1,)``: sizes differ by one at most."""
    return np.arange(num_chunks + 1, dtype=np.int64) * num_elements // num_chunks
