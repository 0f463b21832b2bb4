"""Check that the ranks' own lists of a program fit together, and that all ranks finish."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ProgramError
from paceline.programs.base import Integers, Program, Round, make_round, merge_rounds

_NOTHING = make_round([], [], [], [], adds=False)


@dataclass(frozen=True)
class _Messages:
    """All sends (or all receives) of a program, ordered by pair of ranks and then as the rank posts them."""

    transfers: Round
    rounds: Integers

    def describe(self, index: int) -> str:
        return f"round {self.rounds[index]}: {describe(self.transfers, index)}"


def describe(transfers: Round, index: int, chunk: int | None = None) -> str:
    """Return the chunks (or the given one) and the two ranks of a transfer, in words."""
    first, last = transfers.firsts[index], transfers.firsts[index] + transfers.counts[index] - 1
    if chunk is not None:
        first = last = np.int64(chunk)
    chunks = f"chunk {first}" if first == last else f"chunks {first} to {last}"
    return f"{chunks} from rank {transfers.sources[index]} to rank {transfers.destinations[index]}"


def join_ranks(program: Program) -> list[Round]:
    """Return the rounds that the ranks run together: those of `Program.of_rank`, not of `Program.rounds`.

    Raises:
        ProgramError: A transfer is impossible, a send and a receive do not fit, or ranks wait for each other for ever.
            The message says where.
    """
    sides = []
    num_rounds = 0
    for rank in range(program.num_ranks):
        own = program.of_rank(rank)
        num_rounds = max(num_rounds, len(own))
        sides.append((_collect([round_.sends for round_ in own]), _collect([round_.receives for round_ in own])))
    sends = _by_pair([own_sends for own_sends, _ in sides])
    receives = _by_pair([own_receives for _, own_receives in sides])
    _check_alone(program, sends)
    _check_alone(program, receives)
    _check_pairs(sends, receives)
    if not np.array_equal(sends.rounds, receives.rounds):
        _check_end(sends, receives, program.num_ranks)
        late = int(np.argmax(sends.rounds != receives.rounds))
        raise ProgramError(
            f"{sends.describe(late)} must be received in the same round, but is in round {receives.rounds[late]}; "
            "move either"
        )
    order = np.argsort(receives.rounds, kind="stable")
    ends = np.searchsorted(receives.rounds[order], np.arange(num_rounds + 1))
    return [receives.transfers.select(order[begin:end]) for begin, end in pairwise(ends)]


def _collect(rounds: Sequence[Round]) -> _Messages:
    indices = np.repeat(np.arange(len(rounds)), [len(round_) for round_ in rounds])
    return _Messages(merge_rounds([_NOTHING, *rounds]), indices)


def _by_pair(of_ranks: Sequence[_Messages]) -> _Messages:
    transfers = merge_rounds([messages.transfers for messages in of_ranks])
    rounds = np.concatenate([messages.rounds for messages in of_ranks])
    order = np.lexsort((transfers.destinations, transfers.sources))
    return _Messages(transfers.select(order), rounds[order])


def _check_alone(program: Program, messages: _Messages) -> None:
    one = messages.transfers
    lowest, highest = np.minimum(one.sources, one.destinations), np.maximum(one.sources, one.destinations)
    for wrong, rule in (
        ((lowest < 0) | (highest >= program.num_ranks), f"be between ranks from 0 to {program.num_ranks - 1}"),
        (lowest == highest, "go to another rank"),
        (one.counts < 1, "carry a chunk"),
        (
            (one.firsts < 0) | (one.firsts + one.counts > program.num_chunks),
            f"carry chunks from 0 to {program.num_chunks - 1}",
        ),
    ):
        if wrong.any():
            raise ProgramError(f"{messages.describe(int(np.argmax(wrong)))} must {rule}; correct it")


def _check_pairs(sends: _Messages, receives: _Messages) -> None:
    """Check that the k-th send of each pair of ranks fits its k-th receive."""
    sent_rows, received_rows = (
        np.stack([one.sources, one.destinations, one.firsts, one.counts], axis=1)
        for one in (sends.transfers, receives.transfers)
    )
    if np.array_equal(sent_rows, received_rows):
        return
    sent, received = sent_rows.tolist(), received_rows.tolist()
    index = next((k for k, pair in enumerate(zip(sent, received, strict=False)) if pair[0] != pair[1]), None)
    if index is None:
        index = min(len(sent), len(received))
    pair_sent, pair_received = sent[index : index + 1], received[index : index + 1]
    if pair_sent and pair_received and pair_sent[0][:2] == pair_received[0][:2]:
        raise ProgramError(
            f"a send must have the chunks of its receive, but {sends.describe(index)} arrives at "
            f"{receives.describe(index)}; make them equal"
        )
    if not pair_received or (pair_sent and pair_sent[0][:2] < pair_received[0][:2]):
        raise ProgramError(f"a send must have a receive, but {sends.describe(index)} has none; add it")
    raise ProgramError(f"a receive must have a send, but {receives.describe(index)} has none; add it")


def _check_end(sends: _Messages, receives: _Messages, num_ranks: int) -> None:
    """Advance every rank to its next round as long as it can, and check that all finish."""
    ranks = np.stack([sends.transfers.sources, sends.transfers.destinations])
    rounds = np.stack([sends.rounds, receives.rounds])
    position = np.zeros(num_ranks, np.int64)
    is_free = np.ones(num_ranks, np.bool_)
    while is_free.any():
        is_held = np.zeros(num_ranks, np.bool_)
        is_held[ranks[_waiting(ranks, rounds, position)]] = True
        is_free = ~is_held & (position <= rounds.max())
        position[is_free] += 1
    if is_held.any():
        raise ProgramError(_explain_deadlock(sends.transfers, ranks, rounds, position))


def _waiting(ranks: Integers, rounds: Integers, position: Integers) -> NDArray[np.bool_]:
    """Return which ends of which messages a rank waits at, shape ``(2, num_messages)``: its peer is not there yet."""
    is_here, is_missing = position[ranks] == rounds, position[ranks] < rounds
    return np.asarray(is_here & is_missing[::-1], np.bool_)


def _explain_deadlock(transfers: Round, ranks: Integers, rounds: Integers, position: Integers) -> str:
    """Follow the chain of waiting ranks until it closes."""
    waiting = _waiting(ranks, rounds, position)
    rank = int(ranks[waiting][0])
    words: dict[int, str] = {}
    while rank not in words:
        end, index = np.argwhere(waiting & (ranks == rank))[0]
        peer = int(ranks[1 - end, index])
        words[rank] = (
            f"rank {rank} is in round {position[rank]} until {describe(transfers, index)} is "
            f"{('received', 'sent')[end]} in round {rounds[1 - end, index]} of rank {peer}"
        )
        rank = peer
    cycle = list(words.values())[list(words).index(rank) :]
    return f"ranks must not wait for each other, but this is a deadlock: {'; '.join(cycle)}; reorder their rounds"
