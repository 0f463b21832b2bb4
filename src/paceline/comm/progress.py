"""Progress of this process: the step and the phase that it is in, where neighbours can read it whatever it does.

It lies in anonymous memory behind a file descriptor, which processes of the same host open through ``/proc``: also
while this process is stopped, or holds Python's lock in native code, so that no thread of it can say where it is.
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

_STAMP = struct.Struct("<qd16s")
_PHASE = struct.Struct("<d16s")

_CONNECTING = -1
BETWEEN = b"loop"
"""Phase of the user's own code, between two phases that are known."""


@dataclass(frozen=True)
class Position:
    """Step and phase of a process, and the time since it entered them."""

    step: int
    """Number of updates done; -1 before the first stamp."""
    phase: str
    """Data, forward, backward, reduce, update, save, evaluate or loop."""
    since_s: float
    """Time of the stamp, by the host's monotonic clock."""


class Progress:
    """Progress of this process; see `PROGRESS`.

    Attributes:
        stamp: Function to call after an update, with the number of updates done, the monotonic time and the phase that
            begins.
        enter: Function to call when a phase begins, with the monotonic time and its name. Neither takes a Python
            frame, nor more than a microsecond.
        first_step: Number of updates that were done when this process began to train; -1 before.
        idle_since_s: Time since which this process has nothing to do until others have used their samples; None while
            it has.
        waits: Operations that this process waits in: the number of each, by the identity of what waits.
    """

    stamp: Callable[[int, float, bytes], None]
    enter: Callable[[float, bytes], None]

    def __init__(self) -> None:
        self.waits: dict[int, int] = {}
        self.idle_since_s: float | None = None
        self._thread = threading.local()
        self._connecting: dict[int, tuple[int, ...]] = {}
        """Ranks to which this process opens connections, by what waits for them."""
        self.hang_timeout_s: float | None = None
        """Time without progress after which another rank counts as hanging; None for what its past suggests."""
        self._descriptor = -1
        self.renew()

    def renew(self) -> None:
        """Begin anew, in memory of this process alone: after a fork it would be its parent's."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self.waits, self._connecting, self.idle_since_s = {}, {}, None
        self.first_step = -1
        memory = self._map()
        self.stamp = partial(_STAMP.pack_into, memory, 0)
        self.enter = partial(_PHASE.pack_into, memory, _STAMP.size - _PHASE.size)
        self.stamp(-1, time.monotonic(), b"")
        self._memory = memory

    def _map(self) -> mmap.mmap:
        if not hasattr(os, "memfd_create"):  # only Linux has them
            return mmap.mmap(-1, _STAMP.size)
        self._descriptor = os.memfd_create("paceline-progress", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, _STAMP.size)
        return mmap.mmap(self._descriptor, _STAMP.size)

    @property
    def path(self) -> str:
        """Path by which other processes of this host read it; empty if they cannot."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}" if self._descriptor >= 0 else ""

    def read(self) -> Position:
        """Return the present position."""
        return _read(self._memory[:])

    def serve(self) -> None:
        """Record that this thread serves others: where it waits for requests, the process does not wait."""
        self._thread.serves = True

    def wait_in(self, owner: int, sequence: int) -> None:
        """Record that this process waits in an operation, or with 0 that it does not; `owner` tells groups apart."""
        if getattr(self._thread, "serves", False):
            return
        if sequence:
            self.waits[owner] = sequence
        else:
            self.waits.pop(owner, None)

    @contextmanager
    def connecting(self, ranks: Sequence[int]) -> Iterator[None]:
        """Record that this process waits for ranks to connect with it, or to say what that needs."""
        owner = object()
        self._connecting[id(owner)] = tuple(ranks)
        self.wait_in(id(owner), _CONNECTING)
        try:
            yield
        finally:
            self.wait_in(id(owner), 0)
            del self._connecting[id(owner)]

    @property
    def connects_to(self) -> tuple[int, ...]:
        """Ranks, by their numbers in errors, to which this process opens connections, and waits for them."""
        return next(reversed([*self._connecting.copy().values()]), ())


def read_position(path: str) -> Position | None:
    """Return the position of another process by its path; None if it is gone or unreadable."""
    try:
        with open(path, "rb") as file:
            return _read(file.read(_STAMP.size))
    except (OSError, struct.error):
        return None


def _read(stored: bytes) -> Position:
    step, since_s, phase = _STAMP.unpack(stored)
    return Position(step, phase.rstrip(b"\0").decode(errors="replace"), since_s)


PROGRESS = Progress()
"""Progress of this process. A replica, a loader and a saver stamp it; heartbeats read it."""

os.register_at_fork(after_in_child=PROGRESS.renew)
