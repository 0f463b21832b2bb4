"""Runs operations in order, in a thread of its own or in that of who waits for them, whichever comes first."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from paceline.comm.group import Work


class Runner:
    """Like a `Channel`, but whoever waits for a job that is not begun runs it: two changes of threads are saved.

    After a job has failed the others fail with the same error.
    """

    def __init__(self, name: str) -> None:
        self._jobs: deque[Job] = deque()
        self._turn = threading.Lock()
        """Held by the thread that runs jobs."""
        self._wake_ups: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """One for each job, and False at the end."""
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: "Job") -> None:
        """Run `job` after those submitted before."""
        self._jobs.append(job)
        self._wake_ups.put(True)

    def close(self) -> None:
        """Let the thread end once it has run what was submitted; it is not waited for."""
        self._wake_ups.put(False)

    def run_until(self, job: "Job") -> None:
        """Run what was submitted up to `job` here, unless another thread runs jobs now."""
        if self._turn.acquire(blocking=False):
            try:
                while not job.is_done:
                    self._run_next()
            finally:
                self._turn.release()

    def _run(self) -> None:
        while self._wake_ups.get():
            with self._turn:
                if self._jobs:  # else somebody who waited has run it
                    self._run_next()

    def _run_next(self) -> None:
        job = self._jobs.popleft()
        job.began_s = time.perf_counter()
        if self._error is None:
            try:
                job.function()
            except BaseException as error:  # raised again where it is waited for
                self._error = error
        job.error = self._error
        job.function = _nothing  # what it held may go now
        job.ended_s = time.perf_counter()
        job.is_done = True
        job.under_way.release()


class Job(Work):
    """What a runner runs."""

    def __init__(self, runner: Runner, function: Callable[[], None]) -> None:
        self.function = function
        self.is_done = False
        self.under_way = threading.Lock()
        self.under_way.acquire()
        self.error: BaseException | None = None
        self._runner = runner

    def wait(self) -> None:
        """Wait for it, or run it; raise what it raised."""
        if not self.is_done:
            self._runner.run_until(self)
        with self.under_way:
            pass
        if self.error is not None:
            raise self.error


class NotedJob(Job):
    """A job for which a rank is told to wait while it does.

    Args:
        runner: Whose it is.
        function: What it does.
        note_wait: Told `sequence` when the wait begins, and 0 when it ends.
        sequence: Number of the operation.
    """

    def __init__(
        self, runner: Runner, function: Callable[[], None], note_wait: Callable[[int], None], sequence: int
    ) -> None:
        super().__init__(runner, function)
        self._note_wait = note_wait
        self._sequence = sequence

    def wait(self) -> None:
        """Wait for it, and note that."""
        self._note_wait(self._sequence)
        try:
            super().wait()
        finally:
            self._note_wait(0)


def _nothing() -> None:
    pass
