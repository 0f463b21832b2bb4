"""Ending operations on a GPU that hang: NCCL's own watchdog ends the process, and says nothing of who is missing."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from paceline.comm.threads import start_thread
from paceline.errors import PeerTimeoutError

_POLL_S = 0.5


class QueuedOperation(Protocol):
    """A queued operation, such as `torch.distributed.Work`."""

    def is_completed(self) -> bool:
        """Return whether the device has run it."""


@dataclass(frozen=True)
class _Watched:
    operation: QueuedOperation
    where: str
    sequence: int


class Watchdog:
    """Watches the operations of a group, which run in order, and aborts all of them when one takes too long.

    An operation's time begins when the one before it has ended, since it waits in a queue until then.

    Args:
        timeout_s: Longest time of an operation.
        describe: Function that says where the other ranks are, given the operation's number.
        abort: Function that ends all operations of the group, so that whoever waits for the device goes on.
        clock: Clock in seconds.
    """

    def __init__(
        self,
        timeout_s: float,
        describe: Callable[[int], str],
        abort: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s, self._describe, self._abort, self._clock = timeout_s, describe, abort, clock
        self._queue: deque[_Watched] = deque()
        self._lock = threading.Lock()
        self._oldest_since_s = 0.0
        self._has_work = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self.failure: PeerTimeoutError | None = None
        """Error of the operation that was aborted."""

    def watch(self, operation: QueuedOperation, where: str, sequence: int) -> None:
        """Watch an operation that has just been queued."""
        with self._lock:
            if not self._queue:
                self._oldest_since_s = self._clock()
            self._queue.append(_Watched(operation, where, sequence))
        if self._thread is None:
            # The thread refers to the watchdog weakly: a dropped group is not kept alive.
            weak = weakref.ref(self)
            self._thread = start_thread(_run, weak, name="paceline-watchdog", stop=partial(_close, weak))
        self._has_work.set()

    def look(self) -> None:
        """Forget operations that have ended, and abort all if the oldest has taken too long."""
        with self._lock:
            while self._queue and self._queue[0].operation.is_completed():
                self._queue.popleft()
                self._oldest_since_s = self._clock()
            if not self._queue or self._clock() - self._oldest_since_s < self._timeout_s or self.failure is not None:
                return
            hung = self._queue[0]
            self._queue.clear()
        others = self._describe(hung.sequence)
        # Set first: who waited for the device goes on as soon as it is aborted, and asks.
        self.failure = PeerTimeoutError(f"{hung.where} must finish within {self._timeout_s:g} s, but did not: {others}")
        self._abort()

    def check(self) -> None:
        """Raise the error of an operation that was aborted, if there is one."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Watch no longer."""
        self._is_closed = True
        with self._lock:
            self._queue.clear()
        self._has_work.set()

    def wait_for_work(self) -> bool:
        """Block until there may be something to watch; return False once it is closed."""
        if not self._queue:
            self._has_work.clear()
            if not self._queue and not self._is_closed:
                self._has_work.wait(_POLL_S)
        return not self._is_closed


def _run(watchdog: "weakref.ref[Watchdog]") -> None:
    while (watched := watchdog()) is not None and watched.wait_for_work():
        watched.look()
        del watched
        time.sleep(_POLL_S)


def _close(watchdog: "weakref.ref[Watchdog]") -> None:
    if (watched := watchdog()) is not None:
        watched.close()
