"""Notice of a store that no longer answers: a call of it blocks for ever, and with it the thread that judges others.

That is so on a host that is cut off, and everywhere if the process that holds the store is frozen.
"""

import os
import threading
import weakref
from typing import Protocol

from paceline.comm.hang_watch import Verdict
from paceline.comm.heartbeat_record import Heartbeat
from paceline.comm.progress import PROGRESS
from paceline.comm.threads import start_thread

_TICK_S = 1.0
NUM_TICKS = 15
"""Number of looks, one a second, all through which the store is silent and this process waits, until it gives up."""


class Board(Protocol):
    """What is watched of a `HeartbeatBoard`."""

    num_looks: int

    @property
    def is_open(self) -> bool:
        """Whether it still posts."""

    @property
    def latest(self) -> Heartbeat:
        """This rank's own heartbeat."""

    def end_by(self, verdict: Verdict) -> None:
        """Hand over a verdict."""


class StoreWatch:
    """Ends the operations of this process once it waits in one while its store is silent.

    It counts looks and not time, so that a process which was stopped does not take that for silence.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin anew, without boards."""
        self._boards: weakref.WeakSet[Board] = weakref.WeakSet()
        self._seen: dict[int, tuple[object, int]] = {}
        """Post of each board at the last look, and the number of looks before at which it was the same."""
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, board: Board) -> None:
        """Watch the store of a board, in a thread that all share."""
        with self._lock:
            self._boards.add(board)
            if self._thread is None:
                self._thread = start_thread(self._keep_looking, name="paceline-store-watch", stop=self._closed.set)

    def look(self) -> None:
        """Look at all boards; on the last of `NUM_TICKS` that saw no answer, and no progress, end them."""
        with self._lock:
            boards = [board for board in self._boards if board.is_open]
        waits, position = dict(PROGRESS.waits), PROGRESS.read()
        seen: dict[int, tuple[object, int]] = {}
        for board in boards:
            now = board.num_looks, waits, position
            before, count = self._seen.get(id(board), (None, 0))
            seen[id(board)] = now, count + 1 if before == now and waits else 0
        self._seen = seen
        if silent := [board for board in boards if seen[id(board)][1] >= NUM_TICKS]:
            verdict = _judge(silent[0].latest)
            for board in boards:
                board.end_by(verdict)

    def _keep_looking(self) -> None:
        while not self._closed.wait(_TICK_S):
            self.look()


def _judge(mine: Heartbeat) -> Verdict:
    return Verdict(
        f"the store has not answered host {mine.host} (pid {mine.pid}) for {NUM_TICKS * _TICK_S:g} s: this host is cut "
        "off, or the process that holds the store is frozen",
        is_gone=True,
    )


STORE_WATCH = StoreWatch()
"""Watch of this process."""

os.register_at_fork(after_in_child=STORE_WATCH.renew)
