"""A thread that runs communication jobs in order, while the caller computes."""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

from paceline.comm.group import Work
from paceline.comm.threads import start_thread
from paceline.errors import CommunicationError

OnWait = Callable[[int], None]
"""Callback that gets the number of an operation when a wait for it begins, and 0 when the wait ends."""


class Channel:
    """Runs jobs one after another in its own thread, in the order of submission.

    Exchanges of several operations (collective programs, codecs) need a thread that drives them while the caller
    computes. Only the channel may use the group that its jobs use: give it a `Group.duplicate`. After a job has failed
    all later jobs fail with the same error, since the ranks are no longer in step. The thread ends with the channel, or
    else with the process.

    Args:
        name: Name of the thread.
        on_wait: Callback that gets the number of the job that a caller waits for.
        waiters_run: Whether a thread that waits for a job runs it and the jobs before it itself, if the channel is
            idle. This saves two thread switches. Only for jobs that do the same in any thread, also under autocast.
    """

    def __init__(self, name: str, *, on_wait: OnWait = lambda sequence: None, waiters_run: bool = False) -> None:
        self._name = name
        self._on_wait = on_wait
        self._waiters_run = waiters_run
        self._queue = _Queue()
        # The thread refers to the queue only: a reference to the channel would keep a dropped channel alive.
        self._end = weakref.finalize(self, self._queue.wake_ups.put, False)
        start_thread(self._queue.run, name=name, stop=partial(self._queue.wake_ups.put, False))

    def submit(self, job: Callable[[], object], sequence: int = 0) -> "Job":
        """Run `job` after the jobs submitted before; waiting raises its error, or that of an earlier job.

        Args:
            job: Function to run.
            sequence: Number of the job for `on_wait`.

        Raises:
            CommunicationError: The channel was closed.
        """
        if not self._end.alive:
            raise CommunicationError(f"channel {self._name!r} must be open, but was closed; submit before close()")
        submitted = Job(job, sequence, self._on_wait, self._queue if self._waiters_run else None)
        self._queue.jobs.append(submitted)
        self._queue.wake_ups.put(True)
        return submitted

    def close(self, last: Callable[[], object] | None = None) -> None:
        """Let the thread end after all submitted jobs and `last`, without waiting for it."""
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
        """Block until the job has ended, or run it here; raise its error, or that of an earlier job."""
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
        """Block until the job has ended or `timeout_s` has passed (-1: no limit); return whether the job has ended."""
        if self._under_way.acquire(timeout=timeout_s):
            self._under_way.release()
        return self.is_done

    def run(self, failure: BaseException | None) -> BaseException | None:
        """Run the job unless an earlier one has failed; return the first failure, if any."""
        self.began_s = time.perf_counter()
        if failure is None:
            try:
                self._function()
            except BaseException as error:  # wait() raises it
                failure = error
        self.error = failure
        self._function = _nothing  # frees what the closure holds
        self.ended_s = time.perf_counter()
        self.is_done = True
        self._under_way.release()
        return failure


class _Queue:
    """Jobs not yet begun, and a lock for the thread that runs them: the channel's, or one that waits."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.wake_ups: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """One item per job, and False at the end."""
        self._turn = threading.Lock()
        """Held by the thread that runs jobs."""
        self._failure: BaseException | None = None

    def run(self) -> None:
        while self.wake_ups.get():
            with self._turn:
                if self.jobs:  # else a waiting thread has run it
                    self._run_next()

    def run_until(self, job: Job) -> None:
        """Run the submitted jobs up to `job` in this thread, unless another thread is running jobs."""
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
