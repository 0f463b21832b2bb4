"""A thread that runs communication in order, beside the caller's computing."""

import queue
import threading
import time
import weakref
from collections.abc import Callable

from paceline.comm.group import Work
from paceline.errors import CommunicationError


class Channel:
    """Runs jobs one after another in a thread of its own, in the order in which they were submitted.

    It is for exchanges of several operations (collective programs, codecs), which somebody must drive
    while the caller computes. A group that jobs use must be used by nobody else meanwhile: give the channel a
    `Group.duplicate`. After a job has failed the others fail with the same error, since ranks are no longer in step.
    The thread ends with the channel.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # The thread knows the queue only, or it would keep a channel alive that was forgotten.
        self._end = weakref.finalize(self, self._jobs.put, None)
        threading.Thread(target=_run_jobs, args=(self._jobs,), name=name, daemon=True).start()

    def submit(self, job: Callable[[], object]) -> "Job":
        """Run `job` after those submitted before; waiting raises what it raised, or what one before it raised.

        Raises:
            CommunicationError: The channel was closed.
        """
        if not self._end.alive:
            raise CommunicationError(f"channel {self._name!r} must be open, but was closed; close its owner later")
        submitted = Job(job)
        self._jobs.put(submitted)
        return submitted

    def close(self) -> None:
        """Let the thread end once it has run what was submitted; it is not waited for."""
        self._end()


class Job(Work):
    """A job of a channel."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.done = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Block until it has ended; raise what it raised, or what one before it raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error


def _run_jobs(jobs: "queue.SimpleQueue[Job | None]") -> None:
    failure: BaseException | None = None
    while (job := jobs.get()) is not None:
        job.began_s = time.perf_counter()
        if failure is None:
            try:
                job.function()
            except BaseException as error:  # raised again where it is waited for
                failure = error
        job.ended_s = time.perf_counter()
        job.error = failure
        job.function = _nothing  # what it held may go now
        job.done.set()
        del job


def _nothing() -> None:
    pass
