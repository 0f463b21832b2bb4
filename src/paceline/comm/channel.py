"""A thread that runs communication in order, beside the caller's computing."""

import queue
import threading
from collections.abc import Callable

from paceline.comm.group import Work


class Channel:
    """Runs jobs one after another in a thread of its own, in the order in which they were submitted.

    It is for exchanges of several operations (collective programs, codecs), which somebody must drive
    while the caller computes. A group that jobs use must be used by nobody else meanwhile: give the channel a
    `Group.duplicate`. After a job has failed the others fail with the same error, since ranks are no longer in step.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> Work:
        """Run `job` after those submitted before; waiting raises what it raised."""
        submitted = _Job(job)
        self._jobs.put(submitted)
        return submitted

    def close(self) -> None:
        """Let the thread end once it has run what was submitted; it is not waited for."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                try:
                    job.function()
                except BaseException as error:  # raised again where it is waited for
                    self._error = error
            job.error = self._error
            job.function = _nothing  # what it held may go now
            job.done.set()


def _nothing() -> None:
    pass


class _Job(Work):
    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.done = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error
