"""Threads that fetch blocks, the urgent ones first, and one that looks ahead."""

import itertools
import os
import queue
import threading
from collections.abc import Callable

from paceline.comm.threads import start_thread

Task = Callable[[], None]


class Fetchers:
    """Threads that begin with the first task, and end with `stop` or with the process.

    Args:
        num_threads: Number of tasks that run at once.
        look_ahead: Function that prepares tasks, called in a thread of its own until it returns False, and again after
            each `wake`.
    """

    def __init__(self, num_threads: int, look_ahead: Callable[[], bool]) -> None:
        self._num_threads = num_threads
        self._look_ahead = look_ahead
        self._tasks: queue.PriorityQueue[tuple[int, int, Task | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._woken = threading.Event()
        self._stopped = threading.Event()
        self._turn = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()

    def put(self, task: Task, *, is_urgent: bool) -> None:
        """Run a task soon, before all that are less urgent."""
        self._tasks.put((0 if is_urgent else 1, next(self._numbers), task))
        self._begin()

    def start(self) -> None:
        """Begin to look ahead."""
        self._begin()
        self._woken.set()

    def wake(self) -> None:
        """Look ahead again: something has changed."""
        self._woken.set()

    def close(self) -> None:
        """End the threads; tasks that nobody has begun are left."""
        self.stop()
        for thread in self._threads:
            thread.join(timeout=5)

    def _begin(self) -> None:
        with self._turn:
            if self._threads or self._stopped.is_set():
                return
            for number in range(self._num_threads):
                self._threads.append(start_thread(self._work, name=f"paceline-fetch-{number}", stop=self.stop))
            self._threads.append(start_thread(self._look, name="paceline-look-ahead", stop=self.stop))

    def stop(self) -> None:
        """Let the threads end when they have done what they have begun."""
        self._stopped.set()
        self._woken.set()
        for _ in range(self._num_threads):
            self._tasks.put((-1, next(self._numbers), None))

    def _work(self) -> None:
        while not self._stopped.is_set():
            task = self._tasks.get()[2]
            if task is None:
                return
            task()
            del task  # which may hold what would end this thread

    def _look(self) -> None:
        while not self._stopped.is_set():
            self._woken.wait()
            self._woken.clear()
            while not self._stopped.is_set() and self._look_ahead():
                pass
