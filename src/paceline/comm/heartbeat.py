"""Heartbeats: where each rank is, posted out of band, so that a time-out can name who is missing.

Each rank posts its heartbeat (which operation it has begun, which it waits in) to a store every quarter of a second
from a thread of its own; nothing is posted on the path of an operation. When one fails, everybody's posts are read
twice: a rank whose posts have stopped is dead or frozen, the others say where they are.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Store

from paceline.comm.threads import start_thread
from paceline.errors import CommunicationError, PeerTimeoutError

POST_INTERVAL_S = 0.25
_STORE_TIMEOUT_S = 2.0


T = TypeVar("T")


@dataclass
class Heartbeat:
    """A rank's state, posted four times a second."""

    host: str
    pid: int
    beat: int = 0
    """Number of posts so far; if it stands still, so does the process."""
    begun: int = 0
    begun_name: str = ""
    waiting: int = 0
    """Sequence number of the operation that the rank waits in; 0 while it computes."""
    waiting_since_s: float = 0.0
    last_words: str = ""
    """Reason why the rank stopped, if it could post one."""


class HeartbeatBoard:
    """Posts this rank's heartbeat and reads those of all ranks.

    Args:
        store: Store for the heartbeats.
        rank: Rank of this process.
        names: Number of each rank in errors.
    """

    def __init__(self, store: Store, rank: int, names: Sequence[int]) -> None:
        self._store = store
        self._rank = rank
        self._names = names
        self._mine = Heartbeat(socket.gethostname(), os.getpid())
        self._waiting_since_s = 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._post()
        self._thread = start_thread(self._keep_posting, name="paceline-heartbeat", stop=self._closed.set)

    def begin(self, sequence: int, name: str) -> None:
        """Record that an operation has begun."""
        self._mine.begun = sequence
        self._mine.begun_name = name

    def wait_in(self, sequence: int) -> None:
        """Record the operation that this rank waits in; 0 when it no longer waits."""
        self._waiting_since_s = time.monotonic()
        self._mine.waiting = sequence

    def close(self, last_words: str = "") -> None:
        """Post for the last time; the `last_words` of the first call count."""
        self._closed.set()
        self._thread.join(timeout=_STORE_TIMEOUT_S)
        if not self._mine.last_words and not self._thread.is_alive():
            self._mine.last_words = last_words or "it has finished"
            _run_within(_STORE_TIMEOUT_S, self._post)

    def read(self, rank: int) -> Heartbeat | None:
        """Return a rank's latest heartbeat; None if it has posted none or the store does not answer."""
        return _run_within(_STORE_TIMEOUT_S, lambda: self._read_one(f"heartbeat/{rank}"))

    def describe_others(self, sequence: int) -> str:
        """Return a description of where each other rank is, those that hold up operation `sequence` first."""
        before = _run_within(_STORE_TIMEOUT_S, self._read)
        time.sleep(3 * POST_INTERVAL_S)
        after = _run_within(_STORE_TIMEOUT_S, self._read) if before is not None else None
        if before is None or after is None:
            return "the store does not answer: the process that holds it (that of rank 0) is gone or frozen"
        others = [rank for rank in range(len(self._names)) if rank != self._rank]
        return describe_ranks({self._names[rank]: (before[rank], after[rank]) for rank in others}, sequence)

    def _keep_posting(self) -> None:
        while not self._closed.wait(POST_INTERVAL_S):
            self._post()

    def _post(self) -> None:
        with self._lock:
            self._mine.beat += 1
            waited_s = time.monotonic() - self._waiting_since_s if self._mine.waiting else 0.0
            self._mine.waiting_since_s = round(waited_s, 1)
            try:
                self._store.set(f"heartbeat/{self._rank}", json.dumps(asdict(self._mine)))
            except RuntimeError:
                self._closed.set()  # the store is gone; the waiting thread reports it

    def _read(self) -> list[Heartbeat | None]:
        return [self._read_one(f"heartbeat/{rank}") for rank in range(len(self._names))]

    def _read_one(self, key: str) -> Heartbeat | None:
        if not self._store.check([key]):
            return None
        self._store.wait([key], timedelta(seconds=5))
        return Heartbeat(**json.loads(self._store.get(key)))


def _run_within(timeout_s: float, function: Callable[[], T]) -> T | None:
    """Return the result of `function`, or None if it fails or takes longer: a frozen store never answers a call."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(function())

    start_thread(run, name="paceline-store").join(timeout_s)
    return results[0] if results else None


def describe_ranks(heartbeats: Mapping[int, tuple[Heartbeat | None, Heartbeat | None]], sequence: int) -> str:
    """Return a description of where ranks are, those that hold up operation `sequence` first.

    Where all only lost their peers, the first is one that ran out of time, with what it said: it names the rank that it
    waited for, which may be the one that asks now.

    Args:
        heartbeats: An earlier and a later heartbeat of each rank, by its number in errors; None where there is none.
        sequence: Number of the operation.
    """
    lines = [(rank, *_describe(before, after, sequence)) for rank, (before, after) in heartbeats.items()]
    lines.sort(key=lambda line: line[1])
    gave_up = {
        rank: after for rank, (_, after) in heartbeats.items() if after and after.last_words.startswith(_TIMED_OUT)
    }
    if gave_up and lines[0][1] == _UNSUSPECTED:
        first, after = next(iter(gave_up.items()))
        said = after.last_words.removeprefix(f"{_TIMED_OUT}: ")
        lines = [line for line in lines if line[0] != first]
        lines.insert(0, (first, _UNSUSPECTED, f"(host {after.host}, pid {after.pid}) gave up: {said}"))
    return "; ".join(f"rank {rank} {text}" for rank, _, text in lines)


_TIMED_OUT = PeerTimeoutError.__name__
_LOST_PEERS = (CommunicationError.__name__, _TIMED_OUT)
_UNSUSPECTED = 3
"""Urgency of a rank that is not the cause."""


def _describe(before: Heartbeat | None, after: Heartbeat | None, sequence: int) -> tuple[int, str]:
    """Return (urgency, description); the lowest urgency is the likeliest cause."""
    if after is None:
        return 0, "has posted no heartbeat yet"
    place = f"(host {after.host}, pid {after.pid})"
    where = f"operation {after.begun} {after.begun_name!r}" if after.begun else "no operation"
    if after.last_words.startswith(_LOST_PEERS):
        return _UNSUSPECTED, f"{place} lost its peers too, in {where}"
    if after.last_words:
        return 1, f"{place} stopped after it had begun {where}: {after.last_words}"
    if before is not None and before.beat == after.beat:
        return 0, f"{place} is dead or frozen: its last heartbeat came after it had begun {where}"
    if after.begun < sequence:
        doing = f"waits in operation {after.waiting} since {after.waiting_since_s:g} s" if after.waiting else "computes"
        return 2, f"{place} is alive but behind: it has begun {where} and {doing}"
    return _UNSUSPECTED, f"{place} is alive and has begun {where}"
