"""The log of a run: one JSON line an event, appended by every process of the run."""

import contextlib
import errno
import fcntl
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.monitor.encoding import to_json
from paceline.monitor.events import Event, EventError, Record, Warned
from paceline.monitor.growth import lies_there


class EventLog:
    """An open log that one rank writes its events to. Threads may share it, and other processes the file.

    Each line is appended by a single write, under a lock on the file. A line that a killed writer left unfinished is
    ended first, so that the new one starts a line; without the lock, a line that is still being written looks the same.
    A forked process has the log too, with its own lock. Where somebody removes or moves the file, a new one is begun.

    A full disk does not end the training: events that cannot be written are lost and counted in `num_lost`, one
    warning says so, and once writing works again the log itself says how many events are missing.
    Give `os.devnull` as path for no log.

    Raises:
        OSError: The file cannot be opened.
    """

    num_lost: int = 0
    """Number of events that could not be written."""
    epoch: int
    """Membership epoch of the events; it may be set when the membership changes."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        run: str,
        rank: int,
        epoch: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path).absolute()  # whatever folder this process goes to
        self.run = run
        self.rank = rank
        self.epoch = epoch
        self._clock = clock
        self._lock = threading.RLock()  # a signal handler may write while its thread is inside `write`
        self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._num_unreported = 0
        self.last_error: OSError | None = None
        """Reason for which the latest lost event could not be written."""
        _LOGS.add(self)

    def write(self, event: Event, *, step: int) -> None:
        """Append `event`, which happened at `step`.

        Raises:
            EventError: The log is closed, or the event holds a value that JSON cannot represent.
        """
        with self._lock:
            if self._fd is None:
                raise EventError(f"a log must be open to be written to, but {self.path} is closed; close it later")
            self._report_lost(self._fd, step)
            error = self._append(self._fd, event, step)
            if error is not None:
                self._count_lost(error)

    def copy(self, lines: bytes) -> None:
        """Append whole lines of another log.

        Raises:
            EventError: The log is closed.
        """
        with self._lock:
            if self._fd is None:
                raise EventError(f"a log must be open to be written to, but {self.path} is closed; close it later")
            self._report_lost(self._fd, step=-1)
            error = self._append_lines(self._fd, lines)
            if error is not None:
                self._count_lost(error, lines.count(b"\n"))

    def close(self) -> None:
        """Close the file, in which it says what it has lost, if it can; closing twice is fine."""
        with self._lock:
            if self._fd is not None:
                self._report_lost(self._fd, step=-1)
                os.close(self._fd)
                self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _report_lost(self, fd: int, step: int) -> None:
        if self._num_unreported:
            message = f"{self._num_unreported} events are missing here: the log could not be written"
            if self._append(fd, Warned(message=message), step) is None:
                self._num_unreported = 0

    def _append(self, fd: int, event: Event, step: int) -> OSError | None:
        record = Record(
            run=self.run,
            rank=self.rank,
            epoch=self.epoch,
            step=step,
            time_s=self._clock(),
            unix_s=time.time(),
            event=event,
        )
        return self._append_lines(fd, to_json(record).encode("ascii") + b"\n")

    def _append_lines(self, fd: int, lines: bytes) -> OSError | None:
        if not lies_there(self.path, fd):
            self._reopen(fd, os.O_CREAT)
        try:
            with _locked(fd):
                if _ends_inside_a_line(fd):
                    lines = b"\n" + lines
                num_written = os.write(fd, lines)
        except OSError as error:
            return error
        return None if num_written == len(lines) else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _renew(self) -> None:
        """Reopen the file in a forked process, where the parent's lock is useless, and may be held for ever."""
        self._lock = threading.RLock()
        if self._fd is not None:
            self._reopen(self._fd)

    def _reopen(self, fd: int, flags: int = 0) -> None:
        with contextlib.suppress(OSError):  # its folder was moved: the descriptor is used on
            opened = os.open(self.path, os.O_RDWR | os.O_APPEND | flags, 0o666)
            os.dup2(opened, fd, inheritable=False)
            os.close(opened)

    def _count_lost(self, error: OSError, num_events: int = 1) -> None:
        is_first = not self.num_lost
        self.num_lost += num_events
        self.last_error = error
        self._num_unreported += num_events
        if is_first:
            warnings.warn(
                f"{self.path} must be writable, but got: {error.strerror}; training goes on, and events are"
                " lost until it is (free space there, or choose another directory)",
                RuntimeWarning,
                stacklevel=3,
            )


_LOCK_TIMEOUT_S = 1.0
"""Time that a writer waits for another, which may be frozen: an empty line is better than freezing too."""


@contextlib.contextmanager
def _locked(fd: int) -> Iterator[None]:
    """Keep other writers out, if the file system has locks and their holder releases them in time."""
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.0005)
        except OSError:
            break
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


_LOGS: "weakref.WeakSet[EventLog]" = weakref.WeakSet()


def _renew_in_child() -> None:
    for log in list(_LOGS):
        log._renew()


os.register_at_fork(after_in_child=_renew_in_child)


def _ends_inside_a_line(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
