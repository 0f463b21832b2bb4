"""Batches read in the background, ahead of their use."""

import contextlib
import queue
import threading
import time
from collections.abc import Generator, Iterator
from typing import Self

from paceline.comm.progress import BETWEEN, PROGRESS
from paceline.comm.threads import start_thread
from paceline.data.batch import Batch
from paceline.data.pipeline import ReadingClock


class ReadAhead:
    """Runs a generator in a background thread, at most `depth` items ahead; its errors are raised in order.

    Args:
        items: Steps that are read.
        depth: Number of steps that may be ready.
        clock: Clock of reading.
    """

    def __init__(self, items: Generator[list[Batch]], depth: int, clock: ReadingClock) -> None:
        self._items, self._clock = items, clock
        self._ready: queue.Queue[list[Batch] | BaseException | None] = queue.Queue(max(1, depth))
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._clock.reopen()
        self._thread = start_thread(self._run, name="paceline-loader", stop=self._ask_to_stop)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the thread, and drop the items that it has read ahead."""
        self._stopped.set()
        self._clock.close()
        while not self._ready.empty():
            self._ready.get_nowait()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def __iter__(self) -> Iterator[list[Batch]]:
        while True:
            began_s = time.monotonic()
            PROGRESS.enter(began_s, b"data")
            item = self._ready.get()
            ended_s = time.monotonic()
            PROGRESS.enter(ended_s, BETWEEN)
            self._clock.wait(ended_s - began_s)
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            self._clock.take(item)
            yield item
            self._clock.use(time.monotonic() - ended_s)

    def _ask_to_stop(self) -> None:
        self._stopped.set()
        self._clock.close()

    def _run(self) -> None:
        try:
            with contextlib.closing(self._items):  # here, not whenever memory is freed: it may own processes
                for item in self._items:
                    self._clock.put(item)
                    if not self._put(item):
                        return
            self._put(None)
        except BaseException as error:  # raised again in the reading thread
            self._put(error)

    def _put(self, item: list[Batch] | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
