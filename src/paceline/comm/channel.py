"""A thread that runs communication in order, beside the caller's computing."""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from paceline.comm.group import Work
from paceline.errors import CommunicationError

OnWait = Callable[[int], None]
"""Told the number of an operation when a wait for it begins, and 0 when the wait ends."""


class Channel:
    """Runs jobs one after another in a thread of its own, in the order in which they were submitted.

    It is for exchanges of several operations (collective programs, codecs), which somebody must drive
    while the caller computes. A group that jobs use must be used by nobody else meanwhile: give the channel a
    `Group.duplicate`. After a job has failed the others fail with the same error, since ranks are no longer in step.
    The thread ends with the channel.

    Args:
        name: Of the thread.
        on_wait: Told which job is waited for.
        waiters_run: Whether a thread that waits for a job runs it, and those before it, unless jobs are being run: it
            saves two changes of threads. For jobs that do the same in any thread, under autocast too.
    """

    def __init__(self, name: str, *, on_wait: OnWait = lambda sequence: None, waiters_run: bool = False) -> None:
        self._name = name
        self._on_wait = on_wait
        self._waiters_run = waiters_run
        self._queue = _Queue()
        # The thread knows the queue only, or it would keep a channel alive that was forgotten.
        self._end = weakref.finalize(self, self._queue.wake_ups.put, False)
        threading.Thread(target=self._queue.run, name=name, daemon=True).start()

    def submit(self, job: Callable[[], object], sequence: int = 0) -> "Job":
        """Run `job` after those submitted before; waiting raises what it raised, or what one before it raised.

        Args:
            job: What is to be done.
            sequence: Its number for `on_wait`.

        Raises:
            CommunicationError: The channel was closed.
        """
        if not self._end.alive:
            raise CommunicationError(f"channel {self._name!r} must be open, but was closed; close its owner later")
        submitted = Job(job, sequence, self._on_wait, self._queue if self._waiters_run else None)
        self._queue.jobs.append(submitted)
        self._queue.wake_ups.put(True)
        return submitted

    def close(self, last: Callable[[], object] | None = None) -> None:
        """Let the thread end once it has run what was submitted, and `last`; it is not waited for."""
        if last is not None and self._end.alive:
            self.submit(last)
        self._end()


class Job(Work):
    """A job of a channel."""

    def __init__(self, function: Callable[[], object], sequence: int, on_wait: OnWait, queue: "_Queue | None") -> None:
        self.is_done = False
        self.error: BaseException | None = None
        self._function = function
        self._sequence = sequence
        self._on_wait = on_wait
        self._queue = queue
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def wait(self) -> None:
        """Block until it has ended, or run it; raise what it raised, or what one before it raised."""
        if not self.is_done:
            self._on_wait(self._sequence)
            try:
                if self._queue is not None:
                    self._queue.run_until(self)
                self.ends_within(-1)
            finally:
                self._on_wait(0)
        if self.error is not None:
            raise self.error

    def ends_within(self, timeout_s: float) -> bool:
        """Block until it has ended, or `timeout_s` is over (-1: never); return whether it has ended."""
        if self._under_way.acquire(timeout=timeout_s):
            self._under_way.release()
        return self.is_done

    def run(self, failure: BaseException | None) -> BaseException | None:
        """Do it, unless there was a `failure` before; return that, or its own."""
        self.began_s = time.perf_counter()
        if failure is None:
            try:
                self._function()
            except BaseException as error:  # raised again where it is waited for
                failure = error
        self.error = failure
        self._function = _nothing  # what it held may go now
        self.ended_s = time.perf_counter()
        self.is_done = True
        self._under_way.release()
        return failure


class _Queue:
    """Jobs that are not begun, and who runs them: the channel's thread, or one that waits."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.wake_ups: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """One for each job, and False at the end."""
        self._turn = threading.Lock()
        """Held by the thread that runs jobs."""
        self._failure: BaseException | None = None

    def run(self) -> None:
        while self.wake_ups.get():
            with self._turn:
                if self.jobs:  # else somebody who waited has run it
                    self._run_next()

    def run_until(self, job: Job) -> None:
        """Run what was submitted up to `job` here, unless another thread runs jobs now."""
        if self._turn.acquire(blocking=False):
            try:
                while not job.is_done:
                    self._run_next()
            finally:
                self._turn.release()

    def _run_next(self) -> None:
        self._failure = self.jobs.popleft().run(self._failure)


def _nothing() -> None:
    pass
