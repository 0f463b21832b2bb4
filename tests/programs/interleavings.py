"""An oracle for small programs: it runs them in every possible order of events, with whole numbers for contents.

It shares nothing with `verify` but the description of the execution: ranks run their rounds in order and at their own
pace; a message is read at some time while its sender is in the round and the receiver has posted its receive, and
lands at some later time, when nothing of what it overwrites is still to be read in that round; a rank leaves a round
when all its messages have landed.
"""

import random
from collections import defaultdict
from dataclasses import dataclass

from paceline.programs import Collective

JUNK = 10**40
"""Far above every sum: what memory that nobody has written to holds."""


@dataclass(frozen=True)
class Message:
    source: int
    source_round: int
    destination: int
    destination_round: int | None
    chunks: range
    adds: bool


def part(rank):
    """What `rank` contributes to every chunk: sums of parts show how often each rank is in them."""
    return 100**rank


def is_right_in_every_order(program, *, eager=False):
    """Whether all orders end, with the right contents; eager senders go on when their message has been read."""
    return _Exploration(program, eager).search()


def is_right_in_one_order(program, seed, *, eager=False):
    """Whether one order, drawn by `seed`, ends with the right contents."""
    return _Exploration(program, eager).walk(random.Random(seed))


class _Exploration:
    def __init__(self, program, eager):
        self.program = program
        self.eager = eager
        self.messages = _match(program)
        self.ranks = range(program.num_ranks)
        self.of_rank = [
            [k for k, message in enumerate(self.messages) if rank in (message.source, message.destination)]
            for rank in self.ranks
        ]
        self.readers = [[k for k, other in enumerate(self.messages) if _reads(other, one)] for one in self.messages]
        self.wanted = _wanted(program)

    def start(self):
        return (None,) * len(self.messages), _initial(self.program)

    def search(self):
        seen = set()
        waiting = [self.start()]
        while waiting:
            state = waiting.pop()
            if state in seen:
                continue
            seen.add(state)
            following = self.follow(state)
            if not following and not self.is_right(state):
                return False
            waiting += following
        return True

    def walk(self, generator):
        state = self.start()
        while following := self.follow(state):
            state = generator.choice(following)
        return self.is_right(state)

    def is_right(self, state):
        status, contents = state
        is_over = all(value == "landed" for value in status)
        return is_over and all(contents[rank][chunk] == value for (rank, chunk), value in self.wanted.items())

    def follow(self, state):
        status, contents = state
        rounds = [self.round_of(rank, status) for rank in self.ranks]
        following = []
        for k, message in enumerate(self.messages):
            if status[k] is None:
                is_in = rounds[message.source] == message.source_round
                if is_in and (self.eager or rounds[message.destination] == message.destination_round):
                    read = tuple(contents[message.source][chunk] for chunk in message.chunks)
                    following.append(((*status[:k], read, *status[k + 1 :]), contents))
            elif (
                status[k] != "landed"
                and rounds[message.destination] == message.destination_round
                and not any(status[other] is None for other in self.readers[k])
            ):
                landed = self.land(contents, message, status[k])
                following.append(((*status[:k], "landed", *status[k + 1 :]), landed))
        return following

    def round_of(self, rank, status):
        """The first round in which a message has not landed."""
        open_rounds = []
        for k in self.of_rank[rank]:
            if status[k] != "landed":
                message = self.messages[k]
                if message.source == rank and not (self.eager and status[k]):
                    open_rounds.append(message.source_round)
                if message.destination == rank and message.destination_round is not None:
                    open_rounds.append(message.destination_round)
        return min(open_rounds, default=None)

    def land(self, contents, message, values):
        row = list(contents[message.destination])
        for chunk, value in zip(message.chunks, values, strict=True):
            row[chunk] = row[chunk] + value if message.adds else value
        return (*contents[: message.destination], tuple(row), *contents[message.destination + 1 :])


def _reads(sent, received):
    """Whether a rank sends, in the round in which it receives `received`, what that overwrites."""
    is_there = (sent.source, sent.source_round) == (received.destination, received.destination_round)
    return is_there and bool(set(sent.chunks) & set(received.chunks))


def _match(program):
    """Pair the k-th send between two ranks with the k-th receive; what has no partner never lands."""
    receives = defaultdict(list)
    for rank in range(program.num_ranks):
        for index, own in enumerate(program.of_rank(rank)):
            for source, adds in zip(own.receives.sources.tolist(), own.receives.adds.tolist(), strict=True):
                receives[source, rank].append((index, adds))
    messages = []
    for rank in range(program.num_ranks):
        for index, own in enumerate(program.of_rank(rank)):
            one = own.sends
            for peer, first, count in zip(
                one.destinations.tolist(), one.firsts.tolist(), one.counts.tolist(), strict=True
            ):
                where, adds = receives[rank, peer].pop(0) if receives[rank, peer] else (None, False)
                messages.append(Message(rank, index, peer, where, range(first, first + count), adds))
    assert not any(receives.values()), "a receive without a send is not for this oracle"
    return messages


def _origin(program, chunk):
    """Whose a chunk is before a collective that only copies."""
    if program.collective == Collective.ALL_GATHER:
        return int(program.owners[chunk])
    return chunk // program.num_ranks if program.collective == Collective.ALL_TO_ALL else program.root


def _initial(program):
    reduces = program.collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
    return tuple(
        tuple(
            part(rank) if reduces or rank == _origin(program, chunk) else JUNK + rank * 10**6 + chunk
            for chunk in range(program.num_chunks)
        )
        for rank in range(program.num_ranks)
    )


def _wanted(program):
    """The value of each (rank, chunk) that the collective says something about."""
    total = sum(part(rank) for rank in range(program.num_ranks))
    wanted = {}
    for rank in range(program.num_ranks):
        for chunk in range(program.num_chunks):
            match program.collective:
                case Collective.ALL_REDUCE:
                    wanted[rank, chunk] = total
                case Collective.REDUCE_SCATTER:
                    if program.owners[chunk] == rank:
                        wanted[rank, chunk] = total
                case Collective.ALL_TO_ALL:
                    if chunk % program.num_ranks == rank:
                        wanted[rank, chunk] = part(_origin(program, chunk))
                case _:
                    wanted[rank, chunk] = part(_origin(program, chunk))
    return wanted
