"""A worker's process that is being forked: where the process that forks does not answer, nobody else waits for it."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from paceline.comm.threads import start_thread


class StartingProcess:
    """Process that is being started, in a thread, with what a started one is asked for.

    Args:
        make: Function that makes the process, not started yet.
        server: Number of the process that forks it.
    """

    def __init__(self, make: Callable[[], Any], server: int) -> None:
        self.make, self.server = make, server
        self._process = make()
        self._popen: Any = None
        self._error: OSError | EOFError | None = None
        self.began_s = time.monotonic()
        self.is_told = False
        """Whether people were told that it takes long."""
        self.signals: list[int] = []
        """Signals that it is to be sent once it is there."""
        self._is_killed = False
        self._lock = threading.Lock()
        self._thread = start_thread(self._open, name="paceline-fork")

    def _open(self) -> None:
        try:
            popen = self._process._Popen(self._process)
        except (OSError, EOFError) as error:
            self._error = error
            return
        with self._lock:
            self._popen = popen
        if self._is_killed:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._popen.pid, signal.SIGKILL)

    def join(self, within_s: float) -> None:
        """Wait until the process is there, or could not be started; `within_s` at most."""
        self._thread.join(within_s)

    def find(self) -> BaseProcess | None:
        """Return the process once it is there.

        Raises:
            OSError: The process could not be started.
            EOFError: The process that forks has ended.
        """
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        # Only here, in the thread that asks how processes end: `start` looks after all others.
        self._process._Popen = lambda _: self._popen
        self._process.start()
        process: BaseProcess = self._process
        return process

    @property
    def pid(self) -> int | None:
        """No number yet."""
        return None

    @property
    def exitcode(self) -> int | None:
        """That of SIGKILL if it was killed; None else."""
        return -signal.SIGKILL if self._is_killed else None

    def kill(self) -> None:
        """Count as killed now; the process is killed once it is there."""
        with self._lock:
            self._is_killed = True
            is_here = self._popen is not None
        if is_here:
            self._kill()

    def close(self) -> None:
        """Leave the thread to itself."""
