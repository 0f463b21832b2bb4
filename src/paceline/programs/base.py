"""A collective operation as data: rounds of transfers of chunks between ranks, as integer arrays.

The meaning of a chunk depends on the collective; the buffer of a rank is split into `num_chunks` chunks that are as
equal as possible. All-reduce, broadcast: the whole buffer on every rank. Reduce-scatter: the whole buffer on every rank
before, and after it rank r holds the sum of the chunks that it owns (`owners`). All-gather: before it rank r holds the
chunks it owns, after it every rank holds all. All-to-all: chunk ``source * num_ranks + destination`` is the data of
source for destination.

Ranks run their rounds in order, each at its own pace: only the messages keep them together. In a round a rank
posts all its receives, then its sends, and goes on when all have ended; a send ends when it has been received. What it
receives is written once the sends of that round that read the same chunk have ended, so a round sends what was there
before it. The k-th receive from a rank gets the k-th send of that rank. `verify` proves a program under these rules.
"""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from numbers import Integral
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from paceline.errors import ProgramError, SettingsError
from paceline.registry import Family

Integers = NDArray[np.int64]

_MANY_RANKS = 64


class Collective(StrEnum):
    """Result that a program computes."""

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
    """Whether the destination adds the received chunk to its own; else it replaces its own."""

    def __len__(self) -> int:
        return len(self.sources)

    def select(self, which: NDArray[np.intp] | NDArray[np.bool_]) -> "Round":
        """Return the transfers `which`, an index or a mask."""
        return Round(
            self.sources[which], self.destinations[which], self.firsts[which], self.counts[which], self.adds[which]
        )


def make_round(
    sources: ArrayLike, destinations: ArrayLike, firsts: ArrayLike, counts: ArrayLike, *, adds: ArrayLike
) -> Round:
    """Return a round of the given arrays, broadcast to one shape and flattened, without transfers of no chunk."""
    columns = np.broadcast_arrays(sources, destinations, firsts, counts, adds)
    sent = columns[3].ravel() > 0
    from_, to, first, count = (column.ravel()[sent].astype(np.int64, copy=False) for column in columns[:4])
    return Round(from_, to, first, count, columns[4].ravel()[sent].astype(np.bool_, copy=False))


def merge_rounds(rounds: Sequence[Round]) -> Round:
    """Return one round with the transfers of all `rounds`."""
    return Round(
        np.concatenate([part.sources for part in rounds]),
        np.concatenate([part.destinations for part in rounds]),
        np.concatenate([part.firsts for part in rounds]),
        np.concatenate([part.counts for part in rounds]),
        np.concatenate([part.adds for part in rounds]),
    )


@dataclass(frozen=True)
class Phase:
    """Rounds that belong together, such as the reduce-scatter inside an all-reduce."""

    num_rounds: int
    make_round: Callable[[int], Round]
    is_uniform: bool = False
    """Whether all rounds have the same sources, destinations, counts and adds, and only the chunks differ."""


def in_order(phases: Sequence[Phase]) -> Phase:
    """Return the phases one after another, as one phase."""
    ends = list(accumulate(phase.num_rounds for phase in phases))

    def make(index: int) -> Round:
        number = bisect_right(ends, index)
        return phases[number].make_round(index - (ends[number] - phases[number].num_rounds))

    return Phase(ends[-1] if ends else 0, make)


def side_by_side(phases: Sequence[Phase]) -> Phase:
    """Return the phases, all of one length, run at the same time; they must not touch each other's chunks."""
    return Phase(phases[0].num_rounds, lambda index: merge_rounds([phase.make_round(index) for phase in phases]))


@dataclass(frozen=True)
class RankRound:
    """Transfers of one rank in one round."""

    sends: Round
    receives: Round


class Program:
    """A collective for a number of ranks.

    Rounds are made on demand, so that a ring of 4,096 ranks (33 million transfers) needs no table.

    Attributes:
        collective: Collective that the program computes.
        name: Registered name of the algorithm.
        num_ranks: Number of ranks that take part.
        num_chunks: Number of chunks of the buffer.
        root: Rank where a broadcast starts.
        owners: Rank that owns each chunk, shape ``(num_chunks,)``; for reduce-scatter and all-gather.

    Raises:
        ProgramError: There is no rank or no chunk, or the number of rounds is none; or, when it is read, a round is no
            `Round` of arrays.
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
        classes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        if num_ranks < 1 or num_chunks < 1:
            raise ProgramError(
                f"a program must have at least one rank and one chunk, but {name} has {num_ranks} ranks and "
                f"{num_chunks} chunks; correct it"
            )
        given: object = num_rounds  # of the user's own code
        if not isinstance(given, Integral) or given < 0:
            raise ProgramError(
                f"num_rounds must be a whole number of at least 0, but {name} has {num_rounds!r}; correct it"
            )
        self.collective = collective
        self.name = name
        self.num_ranks = num_ranks
        self.num_chunks = num_chunks
        self.num_rounds = num_rounds
        self.root = root
        self.owners = owners
        # Each rank of a small program reads each round; rounds of large ones would fill the memory.
        self._make_round = lru_cache(maxsize=128 if num_ranks <= _MANY_RANKS else 0)(
            lambda index: _check_round(make_round(index), index)
        )
        self._make_rank = lru_cache(maxsize=_MANY_RANKS)(lambda rank: _restrict(self.rounds(), rank))
        self._classes = classes

    @classmethod
    def of_phases(
        cls,
        collective: Collective,
        name: str,
        num_ranks: int,
        num_chunks: int,
        phases: Sequence[Phase],
        *,
        root: int = 0,
        owners: Integers | None = None,
    ) -> Self:
        """Return the program that runs `phases` one after another."""
        classes: list[tuple[int, int]] = []
        begin = 0
        for phase in phases:
            if phase.is_uniform and phase.num_rounds:
                classes.append((begin, phase.num_rounds))
            else:
                classes += [(begin + index, 1) for index in range(phase.num_rounds)]
            begin += phase.num_rounds
        whole = in_order(phases)
        return cls(
            collective,
            name,
            num_ranks,
            num_chunks,
            whole.num_rounds,
            whole.make_round,
            root=root,
            owners=owners,
            classes=classes,
        )

    def round(self, index: int) -> Round:
        """Return one round."""
        return self._make_round(index)

    def rounds(self) -> Iterator[Round]:
        """Return the rounds, one after another."""
        return (self._make_round(index) for index in range(self.num_rounds))

    def read(self) -> Self:
        """Return the same program with all its rounds made, so that they can be no others later."""
        made = list(self.rounds())
        return type(self)(
            self.collective,
            self.name,
            self.num_ranks,
            self.num_chunks,
            len(made),
            made.__getitem__,
            root=self.root,
            owners=self.owners,
            classes=self._classes,
        )

    def round_classes(self) -> list[tuple[int, int]]:
        """Return (index of a round, number of rounds like it), in order: together they are all rounds.

        Rounds that are alike have the same sources, destinations, counts and adds; only the chunks differ. So they cost
        the same, up to the one element by which chunks differ.
        """
        return [(index, 1) for index in range(self.num_rounds)] if self._classes is None else list(self._classes)

    def of_rank(self, rank: int) -> list[RankRound]:
        """Return the sends and receives of `rank`, round by round; `verify` proves the result of all ranks together."""
        return self._make_rank(rank)


def _check_round(made: object, index: int) -> Round:
    """Return the round, which an algorithm of the user's may have made of something else than arrays."""
    if isinstance(made, Round) and all(
        isinstance(column, np.ndarray) and column.shape == (len(made),) for column in vars(made).values()
    ):
        return made
    raise ProgramError(
        f"round {index} must be a Round of arrays of one length, but got {made!r}; make it with "
        "paceline.programs.base.make_round"
    )


def _restrict(rounds: Iterable[Round], rank: int) -> list[RankRound]:
    return [
        RankRound(
            sends=whole.select(np.flatnonzero(whole.sources == rank)),
            receives=whole.select(np.flatnonzero(whole.destinations == rank)),
        )
        for whole in rounds
    ]


class Algorithm(Family):
    """Settings of a family of programs: ring, double tree, ..."""

    family = "program"
    collectives: ClassVar[frozenset[Collective]]
    """Collectives that the algorithm has programs for."""

    num_chunks: int | None = Field(default=None, ge=1)
    """Number of chunks of the buffer; None for the algorithm's own choice. All-to-all has num_ranks squared."""

    @classmethod
    def __pydantic_init_subclass__(cls, **settings: Any) -> None:
        """Refuse an algorithm for no collectives.

        Raises:
            SettingsError: `collectives` of the class is no set of collectives, or empty.
        """
        super().__pydantic_init_subclass__(**settings)
        found: object = getattr(cls, "collectives", None)
        if found is None and cls.__abstractmethods__:
            return
        if not isinstance(found, set | frozenset) or not found or not found <= set(Collective):
            raise SettingsError(
                f"collectives of {cls.__name__} must be a set such as frozenset({{Collective.ALL_REDUCE}}), of some of "
                f"{', '.join(sorted(Collective))}, but got {found!r}; correct it"
            )

    def build(self, collective: Collective, num_ranks: int, *, root: int = 0) -> Program:
        """Return the program of `collective` for `num_ranks`.

        Raises:
            SettingsError: The algorithm has no program of that collective, or none for that number of ranks.
            ProgramError: The algorithm has built no program, or one of another collective, number of ranks or root.
        """
        if collective not in self.collectives:
            known = ", ".join(sorted(self.collectives))
            raise SettingsError(f"a {self.name} program must be one of {known}, but got {collective}; choose another")
        if num_ranks < 1:
            raise SettingsError(f"num_ranks must be at least 1, but got {num_ranks}; give the number of ranks")
        if not 0 <= root < num_ranks:
            raise SettingsError(f"root must be a rank below {num_ranks}, but got {root}; choose one")
        if collective == Collective.ALL_TO_ALL and self.num_chunks not in (None, num_ranks**2):
            raise SettingsError(
                f"num_chunks of an all-to-all must be {num_ranks}**2 = {num_ranks**2}, but got {self.num_chunks}; "
                "leave it out"
            )
        program: object = self._build(Collective(collective), num_ranks, root)
        asked = _describe(collective, num_ranks, root)
        if not isinstance(program, Program):
            raise ProgramError(f"{self.name} must build a Program of {asked}, but got {program!r}; correct its _build")
        built = _describe(program.collective, program.num_ranks, program.root)
        if built != asked:
            raise ProgramError(f"{self.name} must build a program of {asked}, but it is of {built}; correct its _build")
        return program

    @abstractmethod
    def _build(self, collective: Collective, num_ranks: int, root: int) -> Program: ...


def _describe(collective: str, num_ranks: int, root: int) -> str:
    """Return what a program must agree in with what was asked, in words; only a broadcast depends on its root."""
    ranks = f"{collective} for {num_ranks} ranks"
    return f"{ranks} from rank {root}" if collective == Collective.BROADCAST else ranks


def chunk_bounds(num_elements: int, num_chunks: int) -> Integers:
    """Return the offsets of chunks in a buffer, shape ``(num_chunks + 1,)``: sizes differ by at most one."""
    return np.arange(num_chunks + 1, dtype=np.int64) * num_elements // num_chunks
