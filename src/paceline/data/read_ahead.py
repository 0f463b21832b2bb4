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


class ReadAhead:
    """Runs a generator in a background thread, at most `depth` items ahead; its errors are raised in order."""

    def __init__(self, items: Generator[list[Batch]], depth: int) -> None:
        self._items = items
        self._ready: queue.Queue[list[Batch] | BaseException | None] = queue.Queue(max(1, depth))
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = start_thread(self._run, name="paceline-loader", stop=self._stopped.set)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the thread, and drop the items that it has read ahead."""
        self._stopped.set()
        while not self._ready.empty():
            self._ready.get_nowait()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def __iter__(self) -> Iterator[list[Batch]]:
        while True:
            PROGRESS.enter(time.monotonic(), b"data")
            item = self._ready.get()
            PROGRESS.enter(time.monotonic(), BETWEEN)
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _run(self) -> None:
        try:
            with contextlib.closing(self._items):  # here, not whenever memory is freed: it may own processes
                for item in self._items:
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
