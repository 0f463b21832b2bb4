"""What a launcher that was killed has left: workers that train on, its journal, and the keys of its store."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from paceline.comm.control import ControlAccess, KeyValues, read_requests
from paceline.elastic.journal import JOURNAL, read_journal
from paceline.elastic.protocol import Coordinator
from paceline.launch.launcher_watch import RECORD
from paceline.launch.process_record import ProcessRecord
from paceline.launch.processes import ACCESS_FILE, GRACE_S

REQUESTS_FILE = "requests.log"


@dataclass(frozen=True)
class LeftRun:
    """Run whose launcher was killed, and whose workers train on."""

    coordinator: Coordinator
    """Coordinator, made again from the journal."""
    access: ControlAccess
    """Access that the workers know."""
    key_values: KeyValues
    """Content of the store."""


def find_left_run(directory: Path) -> LeftRun | None:
    """Return what is left of the run in a directory, for who holds its lock; None if nobody can go on with it.

    That is so if no worker of it lives, if they save and end by now, or if journal or store are damaged.
    """
    folder = directory / "workers"
    living = [*_list_living(folder)]
    if not living or any(record.is_abandoned for record in living):
        return None
    try:
        coordinator, access = read_journal(directory / JOURNAL), ControlAccess.load(folder / ACCESS_FILE)
    except Exception:  # facts that do not fit each other may fail anywhere in the coordinator
        return None
    key_values = read_requests(folder / REQUESTS_FILE)
    if coordinator is None or coordinator.is_over or key_values is None:
        return None
    return LeftRun(coordinator, access, key_values)


def end_left_workers(directory: Path) -> None:
    """Ask workers that a launcher has left to save a checkpoint and end, and return once they have."""
    deadline_s, is_asked = time.monotonic() + GRACE_S, False
    while records := [*_list_living(directory / "workers")]:
        is_late = time.monotonic() > deadline_s
        for record in records if is_late or not is_asked else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL if is_late else signal.SIGINT)  # SIGTERM may let one leave
        is_asked = True
        time.sleep(0.05)


def _list_living(folder: Path) -> Iterator[ProcessRecord]:
    for path in folder.glob(f"*{RECORD}"):
        record = ProcessRecord.load(path)
        if record is not None and record.is_alive:
            yield record


class LeftProcess:
    """Process of a worker whose parent is gone: no child of this one, so that it says itself how it ended.

    Args:
        path: File in which it says so.
        errors: File with its error output, where native code that aborts says so.
        process: Handle of the process, if this one had it started; the worker takes its end for that of this process.
    """

    def __init__(self, path: Path, errors: Path, process: BaseProcess | None = None) -> None:
        self._path, self._errors, self._process = path, errors, process
        record = ProcessRecord.load(path)
        if process is not None and record is not None and record.pid != process.pid:  # one of an earlier run
            record = None
        self.pid: int | None = process.pid if process is not None else record.pid if record is not None else None
        self.sentinel = -1
        """Descriptor that can be read once the process has ended."""
        is_alive = record.is_alive if record is not None else process is not None
        if self.pid is not None and is_alive:
            with contextlib.suppress(ProcessLookupError):
                self.sentinel = os.pidfd_open(self.pid)
        if self.sentinel < 0 or not (is_alive and (record is None or record.is_alive)):  # it has ended
            self.close()
            self.sentinel = os.open(os.devnull, os.O_RDONLY)
            self.pid = None

    @property
    def exitcode(self) -> int | None:
        """Exit code, minus the signal where one ended it; None while it runs."""
        if self.pid is not None and not select.select([self.sentinel], [], [], 0)[0]:
            return None
        record = ProcessRecord.load(self._path)
        if record is not None and record.code is not None:
            return record.code
        with contextlib.suppress(OSError):
            said = self._errors.read_text(errors="replace").rpartition("---- started again")[2]
            if "Fatal Python error: Aborted" in said:
                return -signal.SIGABRT
        return -signal.SIGKILL  # which alone lets nothing be said

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)

    def close(self) -> None:
        """Close the descriptor."""
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1
