"""The place of a run's launcher: one process holds it, and another takes it where that one is gone, or stands still."""

import contextlib
import fcntl
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from paceline.checkpoint.durable import WriterLock
from paceline.comm.stacks import is_stopped
from paceline.errors import PacelineError, storing
from paceline.launch.exit_codes import ExitCode
from paceline.launch.process_record import ProcessRecord

LAUNCHER_FILE = "launcher.json"
_HOLDER = re.compile(r"process (\d+) on (.+)\n")


class ReplacedError(PacelineError):
    """Another launcher holds the run."""


class LauncherPlace:
    """The place of this process as the launcher of a run, written down in the folder of its workers.

    Args:
        folder: Folder of the workers.

    Raises:
        StorageError: The file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LAUNCHER_FILE
        before = ProcessRecord.load(self._path)
        self.number = before.number + 1 if before is not None else 1
        """Number of this launcher: workers that one of a lower number asked for, and that come later, end."""
        self._record = ProcessRecord.of_this_process(self.number)
        with storing(self._path):
            self._record.save(self._path)

    def check(self) -> None:
        """Raise `ReplacedError` if another launcher has taken the place."""
        if self.is_held:
            return
        if not self._holds_lock:
            holder = ProcessRecord.load(self._path)
            name = f"process {holder.pid}" if holder is not None else "another process"
            raise ReplacedError(
                f"a launcher must hold its run, but {name} has taken the place of this one, process {os.getpid()}, "
                "which stood still; this one ends, and the workers train on with the other"
            )
        with contextlib.suppress(OSError):  # a full disk, or somebody removed the folder: the lock is what counts
            self._record.save(self._path)  # it was damaged

    def release(self) -> None:
        """Hold the place no longer."""
        if self.is_held:
            self._path.unlink(missing_ok=True)

    @property
    def is_held(self) -> bool:
        """Whether the file says so; another launcher that has taken the place, and has ended since, has removed it."""
        return ProcessRecord.load(self._path) == self._record

    @property
    def _holds_lock(self) -> bool:
        """Whether this process holds the run's lock, which another launcher takes before it writes the file."""
        try:
            holder = _HOLDER.fullmatch((self._path.parents[1] / ".lock").read_text(errors="replace"))
        except OSError:
            return False
        return holder is not None and int(holder[1]) == os.getpid() and holder[2] == socket.gethostname()


def end_replaced(error: ReplacedError) -> NoReturn:
    """End this process, and nothing else: its workers are the other launcher's, and what lies in the run's folder."""
    print(f"paceline: {type(error).__name__}: {error}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(ExitCode.REFUSED)  # Python would wait for the workers


def acquire_run(directory: Path) -> WriterLock:
    """Return the lock of a run's directory, which this process holds from now on.

    It is taken from a process of this machine that is stopped, as by SIGSTOP, which then finds a new file in its place.

    Raises:
        CheckpointError: Another process holds it.
        StorageError: The disk is full or read-only, or the directory does not exist.
    """
    lock = WriterLock(directory)
    with _alone(directory):
        if _is_held_by_stopped(directory / ".lock"):
            new = directory / f".lock.{os.getpid()}"
            new.touch()
            new.replace(directory / ".lock")
        lock.acquire()
    return lock


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Let no two processes judge the holder at once, so that the second one finds the first."""
    with storing(directory / ".lock"):
        descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: `WriterLock` warns
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_held_by_stopped(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:  # `WriterLock` says why
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _HOLDER.fullmatch(os.pread(descriptor, 200, 0).decode(errors="replace"))
        return holder is not None and holder[2] == socket.gethostname() and is_stopped(int(holder[1]))
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
