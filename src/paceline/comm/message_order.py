"""The messages of one rank in a program, in an order that depends on the data alone.

A program's rounds say what depends on what; they are not barriers. A send waits for those receives of earlier rounds
that write its data. Received data are written once the sends of the same and earlier rounds that read the same
elements have ended. All this is known beforehand, so running the messages needs no bookkeeping.

Sends are paced. Otherwise a rank whose data are there early would begin the next round while its last sends of this
one, to another rank, are under way, and so delay that rank and all that wait for it: links would stand idle
(halving-doubling took 1.3 times as long). So a send waits until all but the last few before it have likely left.

There is no deadlock. A rank takes its receives round by round and posts them in that order. It begins the sends of
a round no later than when it has taken all receives of the rounds before, and waits for none of them earlier. So
a rank that waits for a message of some round waits for a rank in an earlier round, and the earliest can go on.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.programs.base import Integers, Program, Round


@dataclass(frozen=True)
class Places:
    """Position of each chunk in a buffer: arrays of shape ``(num_chunks,)``."""

    begins: Integers
    sizes: Integers
    is_sequence: bool
    """Whether chunks follow each other in contiguous memory, so that several can be one message."""


@dataclass(frozen=True)
class Messages:
    """Messages in one direction, by round: arrays of one length."""

    rounds: Integers
    sources: Integers
    destinations: Integers
    begins: Integers
    ends: Integers
    tags: Integers
    adds: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.rounds)

    def select(self, which: NDArray[np.intp] | NDArray[np.bool_]) -> "Messages":
        """Return some of them."""
        return Messages(*(getattr(self, column)[which] for column in self.__dataclass_fields__))

    def num_before(self, round_index: int) -> int:
        """Return the number of messages of earlier rounds."""
        return int(np.searchsorted(self.rounds, round_index))

    def overlapping(self, begin: int, end: int, first: int, after: int) -> list[int]:
        """Return the messages from `first` to `after` (exclusive) that overlap elements `begin` to `end`."""
        touch = (self.begins[first:after] < end) & (self.ends[first:after] > begin)
        return (np.flatnonzero(touch) + first).tolist()


@dataclass(frozen=True, slots=True)
class Send:
    """An outgoing message."""

    peer: int
    begin: int
    end: int
    tag: int


@dataclass(frozen=True, slots=True)
class Receive:
    """An incoming message."""

    peer: int
    begin: int
    end: int
    tag: int
    adds: bool
    is_direct: bool
    """Whether the message is received in place; else in scratch memory, because it is added or early."""
    overwrites: tuple[int, ...]
    """Sends that must have ended before the message is written."""


@dataclass(frozen=True)
class MessageStep:
    """Actions after a receive has been taken."""

    posts: list[int]
    """Receives to post at once."""
    sends: list[int]
    """Sends to begin."""
    late_posts: list[int]
    """Receives to post once the sends that they overwrite have ended."""


@dataclass(frozen=True)
class MessageOrder:
    """All messages of one rank; step 0 comes before all receives, step i + 1 follows receive i."""

    sends: list[Send]
    receives: list[Receive]
    steps: list[MessageStep]
    num_tags: int
    """Number of tags of the messages of all ranks, from 0 on."""
    num_scratch: int
    """Elements of the largest receive that needs scratch memory."""


def order_messages(
    program: Program, rank: int, places: Places, *, segment: int, window: int, ahead: int
) -> MessageOrder:
    """Return the messages of `rank`, in order.

    Args:
        program: The program.
        rank: Rank whose messages are ordered.
        places: Positions of the chunks.
        segment: Most elements of a message.
        window: Most receives that are posted ahead.
        ahead: Elements that may be under way when a send of a later round begins.
    """
    messages = list(_cut(program, places, segment))
    num_tags = sum(map(len, messages))
    sends = _join([part.select(np.flatnonzero(part.sources == rank)) for part in messages])
    receives = _join([part.select(np.flatnonzero(part.destinations == rank)) for part in messages])
    ready = _ready_after(sends, receives, ahead)
    taken = [_describe(index, sends, receives) for index in range(len(receives))]
    posted = _posted_after(sends, receives, taken, window)
    steps = [MessageStep([], [], []) for _ in range(len(receives) + 1)]
    for index, step in enumerate(posted):
        is_late = taken[index].is_direct and bool(taken[index].overwrites)
        (steps[step].late_posts if is_late else steps[step].posts).append(index)
    for index, step in enumerate(ready):
        steps[step].sends.append(index)
    columns = zip(
        *(column.tolist() for column in (sends.destinations, sends.begins, sends.ends, sends.tags)), strict=True
    )
    num_scratch = max((receive.end - receive.begin for receive in taken if not receive.is_direct), default=0)
    return MessageOrder([Send(*row) for row in columns], taken, steps, num_tags, num_scratch)


def _cut(program: Program, places: Places, segment: int) -> Iterator[Messages]:
    """Yield the messages of each round, the first segments of all transfers before the second ones."""
    sums = np.concatenate([[0], np.cumsum(places.sizes)])
    num_tags = 0
    for index, transfers in enumerate(program.rounds()):
        if not places.is_sequence:
            transfers = _one_chunk_each(transfers)
        begins = places.begins[transfers.firsts]
        ends = begins + sums[transfers.firsts + transfers.counts] - sums[transfers.firsts]
        num_segments = -(-(ends - begins) // segment)
        row = np.repeat(np.arange(len(transfers)), num_segments)
        number = _count_up(num_segments)
        if not _overlap_partially(transfers.destinations, begins, ends):
            order = np.lexsort((row, number))
            row, number = row[order], number[order]
        yield Messages(
            np.full(len(row), index),
            transfers.sources[row],
            transfers.destinations[row],
            begins[row] + number * segment,
            np.minimum(begins[row] + (number + 1) * segment, ends[row]),
            num_tags + np.arange(len(row)),
            transfers.adds[row],
        )
        num_tags += len(row)


def _one_chunk_each(transfers: Round) -> Round:
    row = np.repeat(np.arange(len(transfers)), transfers.counts)
    firsts = transfers.firsts[row] + _count_up(transfers.counts)
    return Round(transfers.sources[row], transfers.destinations[row], firsts, np.ones_like(firsts), transfers.adds[row])


def _count_up(lengths: Integers) -> Integers:
    """Return 0, 1, ..., lengths[0] - 1, 0, 1, ..., lengths[1] - 1, ..."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _overlap_partially(destinations: Integers, begins: Integers, ends: Integers) -> bool:
    """Return whether a rank receives two transfers that overlap without covering the same elements.

    Transfers that are added to the same elements are added in order, so their segments must not be mixed then.
    """
    order = np.lexsort((ends, begins, destinations))
    destinations, begins, ends = destinations[order], begins[order], ends[order]
    overlap = (destinations[1:] == destinations[:-1]) & (begins[1:] < ends[:-1])
    same = (begins[1:] == begins[:-1]) & (ends[1:] == ends[:-1])
    return bool((overlap & ~same).any())


def _join(parts: list[Messages]) -> Messages:
    columns = Messages.__dataclass_fields__
    nothing = np.zeros(0, np.int64)
    return Messages(*(np.concatenate([nothing, *(getattr(part, column) for part in parts)]) for column in columns))


def _ready_after(sends: Messages, receives: Messages, ahead: int) -> list[int]:
    """Return the step at which each send begins: its data are there, and earlier sends have likely left.

    No earlier round writes to its data later.
    """
    sent = np.cumsum(sends.ends - sends.begins)
    last_gone = np.searchsorted(sent, sent - (sends.ends - sends.begins) - ahead, side="right") - 1
    ready = []
    for index, (begin, end, round_index) in enumerate(zip(sends.begins, sends.ends, sends.rounds, strict=True)):
        begun = receives.num_before(round_index)
        writers = receives.overlapping(begin, end, 0, begun)
        step = writers[-1] + 1 if writers else 0
        if last_gone[index] >= 0:
            step = max(step, min(begun, _likely_ended(last_gone[index], sends, receives)))
        ready.append(step)
    return ready


def _describe(index: int, sends: Messages, receives: Messages) -> Receive:
    begin, end, round_index = int(receives.begins[index]), int(receives.ends[index]), int(receives.rounds[index])
    readers = sends.overlapping(begin, end, 0, sends.num_before(round_index + 1))
    is_read_now = bool(readers) and int(sends.rounds[readers[-1]]) == round_index
    is_written_now = bool(receives.overlapping(begin, end, receives.num_before(round_index), index))
    adds = bool(receives.adds[index])
    return Receive(
        int(receives.sources[index]),
        begin,
        end,
        int(receives.tags[index]),
        adds,
        is_direct=not (adds or is_read_now or is_written_now),
        overwrites=tuple(readers),
    )


def _posted_after(sends: Messages, receives: Messages, taken: list[Receive], window: int) -> list[int]:
    """Return the step at which each receive is posted: `window` receives ahead, if its elements are free by then."""
    rounds = receives.rounds.tolist()
    # Where a send and a receive of one round overlap, ranks wait for each other's posts: post these from the start.
    overlapping_rounds = {
        rounds[i] for i, receive in enumerate(taken) for send in receive.overwrites if sends.rounds[send] == rounds[i]
    }
    posted: list[int] = []
    for index, receive in enumerate(taken):
        begun = receives.num_before(rounds[index])
        step = max(index - window + 1, 0)
        if rounds[index] in overlapping_rounds:
            step = min(step, begun)
        if receive.is_direct:
            writers = receives.overlapping(receive.begin, receive.end, 0, begun)
            free = [writers[-1] + 1] if writers else []
            free += [_likely_ended(send, sends, receives) for send in receive.overwrites]
            step = max([step, *free])
        posted.append(max([step, *posted[-1:]]))
    return posted


def _likely_ended(send: int, sends: Messages, receives: Messages) -> int:
    """Return the step at which a send has likely ended: as large a part of its round is received as is sent with it.

    The send has begun by then in any case.
    """
    round_index = sends.rounds[send]
    first_send, after_send = sends.num_before(round_index), sends.num_before(round_index + 1)
    first, after = receives.num_before(round_index), receives.num_before(round_index + 1)
    return first + (send - first_send + 1) * (after - first) // (after_send - first_send)
