"""The proof of a program: at any pace of the ranks, it computes its collective, and nothing in it is superfluous.

The proof holds for every interleaving of the execution that `paceline.programs.base` describes: a rank posts
all receives of a round, then its sends, and leaves the round when all have ended; a send ends when it has been
received; ranks may be in different rounds. Since a send and its receive are in the same round, the ranks
that are furthest behind can always go on; and since inside a round no rank receives a chunk twice, and writes one that
it also sends only when it has been sent, the order of messages inside it makes no difference. One execution, round by
round, then stands for all. It stands for eager sends too, which end before they have been received, if they copy their
data.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError, ProgramError
from paceline.programs.base import Algorithm, Collective, Integers, Program, Round
from paceline.programs.rendezvous import describe, join_ranks

Words = NDArray[np.uint64]

_MOST_WORDS = 1 << 23
"""Limit of memory: contents are followed for as many chunks at a time as take about this many 8-byte words."""


@dataclass(frozen=True)
class ProgramSummary:
    """Amounts that a proven program moves, as fractions of the buffer (all-to-all: of one rank's data for all)."""

    num_rounds: int
    num_transfers: int
    sent: NDArray[np.float64]
    """Amount that each rank sends in total, shape ``(num_ranks,)``."""
    most_in_a_round: float
    """Largest amount that one rank sends in one round."""


def verify(program: Program) -> ProgramSummary:
    """Prove `program` and return the amounts that it moves.

    It is wrong unless all of these hold: sends match receives; ranks never wait for each other for ever; no rank
    receives a chunk twice in a round (a race: its value would depend on timing, and the order of two additions changes
    their rounding); every rank sends only chunks that it holds; no rank is counted twice or left out; every rank ends
    with bitwise the same value, because it was added up in the same order (sums are compared by a 64-bit hash of their
    expression, in which a + b is b + a); no chunk of a transfer could be left out.

    Raises:
        ProgramError: The program is wrong; the message says in which round, between which ranks, and at which chunk.
    """
    rounds = join_ranks(program)
    num_words = -(-program.num_ranks // 64)
    length = max(1, _MOST_WORDS // (program.num_ranks * (num_words + 3)))
    for begin in range(0, program.num_chunks, length):
        _Contents(program, begin, min(begin + length, program.num_chunks)).prove(rounds)
    return _summarise(program, rounds)


@contextmanager
def named_proof(algorithm: Algorithm, collective: Collective, num_ranks: int) -> Iterator[None]:
    """While active, errors name what is proved, and one in the algorithm's own code is an error of the program."""
    about = f"{algorithm.name} {collective} for {num_ranks} ranks"
    try:
        yield
    except PacelineError as error:
        raise type(error)(f"{about}: {error}") from error
    except Exception as error:
        raise ProgramError(f"{about}: its code must not fail, but raised {type(error).__name__}: {error}") from error


class _Contents:
    """Contents of every rank's chunks from `begin` to `end`, followed through the rounds.

    Slots are numbered ``rank * num_chunks_here + chunk - begin``. A slot holds the set of ranks whose parts are in
    it, as bits, and the hash of the expression that computed it.
    """

    def __init__(self, program: Program, begin: int, end: int) -> None:
        self.program = program
        self.begin = begin
        self.length = end - begin
        self.reduces = program.collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
        num_ranks = program.num_ranks
        own_bits = np.zeros((num_ranks, -(-num_ranks // 64)), np.uint64)
        ranks = np.arange(num_ranks)
        own_bits[ranks, ranks // 64] = np.uint64(1) << (ranks % 64).astype(np.uint64)
        origins, self.is_needed = _origins_and_needs(program, np.arange(begin, end))
        is_there = np.ones_like(self.is_needed) if self.reduces else ranks[:, None] == origins
        self.wanted: Words = np.bitwise_or.reduce(own_bits)[None] if self.reduces else own_bits[origins]
        self.bits: Words = np.where(is_there[:, :, None], own_bits[:, None], np.uint64(0)).reshape(is_there.size, -1)
        self.expressions: Words = np.repeat(_mix(ranks.astype(np.uint64)), self.length)
        self.last_writer: Integers = np.full(is_there.size, -1)

    def prove(self, rounds: Sequence[Round]) -> None:
        """Follow the contents forwards, compare them with the collective's result, and follow their use backwards."""
        steps = [self._step(index, round_) for index, round_ in enumerate(rounds)]
        for step in steps:
            self._check_race(step)
            self._check_held(step)
            self._apply(step)
        self._check_result()
        self._check_use(steps)

    def _step(self, index: int, round_: Round) -> "_Step":
        firsts = np.maximum(round_.firsts - self.begin, 0)
        counts = np.maximum(np.minimum(round_.firsts + round_.counts - self.begin, self.length) - firsts, 0)
        transfers = np.repeat(np.arange(len(round_)), counts)
        chunks = np.arange(len(transfers)) + (firsts - np.cumsum(counts) + counts)[transfers]
        return _Step(
            index,
            round_,
            transfers,
            chunks + round_.sources[transfers] * self.length,
            chunks + round_.destinations[transfers] * self.length,
            round_.adds[transfers],
        )

    def _refuse(self, step: "_Step", wrong: NDArray[np.bool_], problem: str) -> None:
        """Raise the error for the first wrong chunk, if any."""
        if wrong.any():
            raise ProgramError(f"{self._describe(step, int(np.argmax(wrong)))} {problem}")

    def _describe(self, step: "_Step", place: int) -> str:
        chunk = int(step.targets[place]) % self.length + self.begin
        return f"round {step.index}: {describe(step.round, int(step.transfers[place]), chunk)}"

    def _check_race(self, step: "_Step") -> None:
        arrivals = np.arange(len(step.targets))
        self.last_writer[step.targets] = arrivals
        self._refuse(
            step,
            self.last_writer[step.targets] != arrivals,
            "must be the only one to arrive there in its round, but another does too: a race; move either",
        )
        self.last_writer[step.targets] = -1

    def _check_held(self, step: "_Step") -> None:
        sent, present = self.bits[step.origins], self.bits[step.targets]
        self._refuse(
            step, (sent == 0).all(axis=1), "must be held by its source, but it is not there yet; send it later"
        )
        is_absent = (present == 0).all(axis=1)
        self._refuse(step, step.adds & is_absent, "must be added to something, but nothing is there; copy it instead")
        common = np.where(step.adds[:, None], sent & present, np.uint64(0))
        twice = (common != 0).any(axis=1)
        if twice.any():
            rank = _first_rank(common[np.argmax(twice)])
            self._refuse(step, twice, f"must count every rank once, but rank {rank} is in both terms; drop one")
        is_known = ~is_absent & (self.expressions[step.origins] == self.expressions[step.targets])
        self._refuse(step, ~step.adds & is_known, "must bring something new, but its destination has the same; drop it")

    def _apply(self, step: "_Step") -> None:
        adds = step.adds
        sent, present = self.bits[step.origins], self.bits[step.targets]
        self.bits[step.targets] = np.where(adds[:, None], sent | present, sent)
        left, right = self.expressions[step.origins], self.expressions[step.targets]
        self.expressions[step.targets] = np.where(adds, _mix(_mix(left) + _mix(right)), left)

    def _check_result(self) -> None:
        bits = self.bits.reshape(*self.is_needed.shape, -1)
        wrong = self.is_needed & (bits != self.wanted).any(axis=2)
        if wrong.any():
            rank, chunk = np.argwhere(wrong)[0]
            missing = self.wanted[0 if self.reduces else chunk] & ~bits[rank, chunk]
            problem = (
                f"the part of rank {_first_rank(missing)} does not reach it; add a transfer"
                if missing.any()
                else "others are in it; drop their transfers"
            )
            raise ProgramError(f"rank {rank} must end with the right chunk {chunk + self.begin}, but {problem}")
        expressions = self.expressions.reshape(self.is_needed.shape)
        first = expressions[np.argmax(self.is_needed, axis=0), np.arange(self.length)]
        differs = self.is_needed & (expressions != first)
        if differs.any():
            rank, chunk = np.argwhere(differs)[0]
            raise ProgramError(
                f"chunk {chunk + self.begin} must be added up in one order, but rank {rank} has another than rank "
                f"{np.argmax(self.is_needed[:, chunk])} and rounds differently; let one add and the others copy"
            )

    def _check_use(self, steps: "Sequence[_Step]") -> None:
        is_used = self.is_needed.ravel().copy()
        for step in reversed(steps):
            self._refuse(step, ~is_used[step.targets], "must be of use, but no result depends on it; drop it")
            is_used[step.targets[~step.adds]] = False
            is_used[step.origins] = True


@dataclass(frozen=True)
class _Step:
    """A round, chunk by chunk: arrays of one length."""

    index: int
    round: Round
    transfers: Integers
    origins: Integers
    targets: Integers
    adds: NDArray[np.bool_]


def _origins_and_needs(program: Program, chunks: Integers) -> tuple[Integers, NDArray[np.bool_]]:
    """Return the rank that each chunk comes from (meaningless where all have it), and who needs which at the end."""
    num_ranks, collective = program.num_ranks, program.collective
    ranks = np.arange(num_ranks)[:, None]
    everybody = np.ones((num_ranks, len(chunks)), np.bool_)
    if collective == Collective.ALL_TO_ALL:
        if program.num_chunks != num_ranks**2:
            raise ProgramError(
                f"num_chunks of an all-to-all must be {num_ranks}**2, but got {program.num_chunks}; correct it"
            )
        return chunks // num_ranks, ranks == chunks % num_ranks
    if collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        owners = program.owners
        if owners is None or owners.shape != (program.num_chunks,) or not np.isin(owners, ranks).all():
            raise ProgramError(
                f"owners must be a rank for each of {program.num_chunks} chunks, but got {owners}; correct them"
            )
        return owners[chunks], ranks == owners[chunks] if collective == Collective.REDUCE_SCATTER else everybody
    return np.full_like(chunks, program.root), everybody


def _first_rank(bits: Words) -> int:
    word = int(np.argmax(bits != 0))
    value = int(bits[word])
    return word * 64 + (value & -value).bit_length() - 1


def _mix(values: Words) -> Words:
    """Return a hash of each value (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _summarise(program: Program, rounds: Sequence[Round]) -> ProgramSummary:
    buffer = program.num_ranks if program.collective == Collective.ALL_TO_ALL else program.num_chunks
    chunks = [np.bincount(round_.sources, round_.counts, program.num_ranks) for round_ in rounds]
    return ProgramSummary(
        num_rounds=len(rounds),
        num_transfers=sum(len(round_) for round_ in rounds),
        sent=np.sum([np.zeros(program.num_ranks), *chunks], axis=0) / buffer,
        most_in_a_round=max((float(counts.max()) for counts in chunks), default=0.0) / buffer,
    )
