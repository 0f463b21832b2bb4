"""Time in which a thread could have run, but other processes had the cores."""

import os
import threading
import weakref


class RunQueue:
    """Clock of the time that the calling thread has waited for a core: Linux's scheduler counts it.

    It stands still elsewhere, and where the kernel does not count.
    """

    def __init__(self) -> None:
        self._thread: int | None = None
        self._descriptor: int | None = None
        self._close: weakref.finalize[[int], RunQueue] | None = None

    def __call__(self) -> float:
        """Return the seconds since the thread began."""
        if (thread := threading.get_native_id()) != self._thread:
            self._thread = thread
            self._open(thread)
        if self._descriptor is None:
            return 0.0
        try:
            return int(os.pread(self._descriptor, 100, 0).split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def _open(self, thread: int) -> None:
        if self._close is not None:
            self._close()
        self._descriptor = self._close = None
        try:
            self._descriptor = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
        except OSError:
            return
        self._close = weakref.finalize(self, os.close, self._descriptor)
