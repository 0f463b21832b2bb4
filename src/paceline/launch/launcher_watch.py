"""A worker's watch of its launcher: it trains on for a time without one, and with another that takes its place."""

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from paceline.launch.exit_codes import ExitCode
from paceline.launch.place import LAUNCHER_FILE
from paceline.launch.process_record import ProcessRecord

RECORD = ".process"
"""Ending of the names of files in which workers write down that they exist, and how they have ended."""
_LOOK_S = 0.25
_ASK_S = 1.0


class LauncherWatch:
    """Watch of the launcher, in a thread; once none has been there for long, this worker is asked to stop.

    If another launcher is there, which does not know this worker, since its record is gone, it ends at once.

    Args:
        folder: Folder of the workers, in which each launcher writes down that it is one.
        name: Name of the worker.
        number: Number of the launcher that asked for this worker.
        timeout_s: Time for which there may be no launcher.
        signal_number: Signal that asks this worker to stop.
    """

    def __init__(self, folder: Path, name: str, number: int, *, timeout_s: float, signal_number: int) -> None:
        self._launcher_path, self._path = folder / LAUNCHER_FILE, folder / f"{name}{RECORD}"
        self._record = ProcessRecord.of_this_process(number)
        self._timeout_s, self._signal_number = timeout_s, signal_number
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Write down that this worker exists; return False if another launcher, which does not know it, is there.

        A launcher writes down that it is there before it looks for workers, so that it finds this one, or is found.
        """
        self._write()
        found = ProcessRecord.load(self._launcher_path)
        if found is not None and found.number > self._record.number:
            return False
        threading.Thread(target=self._keep_looking, args=(found,), name="paceline-launcher", daemon=True).start()
        return True

    def end(self, code: int) -> None:
        """Write down how this worker ends."""
        self._write(code=code)

    def is_abandoned(self) -> bool:
        """Return whether no launcher has come back in time."""
        return self._record.is_abandoned

    def _keep_looking(self, launcher: ProcessRecord | None) -> None:
        if launcher is None or not launcher.started:  # processes cannot be found again here, so that nobody comes
            parent = multiprocessing.parent_process()
            assert parent is not None
            parent.join()
            self._keep_asking()
        first, seen_s = launcher, time.monotonic()
        while True:
            launcher = ProcessRecord.load(self._launcher_path) or launcher
            if launcher not in (None, first) and ProcessRecord.load(self._path) is None:
                self._end_unknown()
            if launcher is not None and launcher.is_alive:
                seen_s = time.monotonic()
            elif time.monotonic() - seen_s >= self._timeout_s:
                break
            time.sleep(_LOOK_S)
        self._keep_asking()

    def _end_unknown(self) -> None:
        """End this worker, which another launcher has not found, and so has started others for."""
        with contextlib.suppress(OSError):
            print(
                f"paceline: this worker, process {os.getpid()}, ends, as another launcher has taken the run, which "
                f"does not know it: {self._path} is gone",
                file=sys.stderr,
                flush=True,
            )
        os._exit(ExitCode.PEERS_LOST)

    def _keep_asking(self) -> None:
        self._write(is_abandoned=True)
        while True:  # also after the run, where it would wait for the launcher to notice that
            os.kill(os.getpid(), self._signal_number)
            time.sleep(_ASK_S)

    def _write(self, **changes: int) -> None:
        with self._lock, contextlib.suppress(OSError):  # a full disk: nobody takes this worker over
            self._record = replace(self._record, **changes)  # type: ignore[arg-type]
            self._record.save(self._path)
