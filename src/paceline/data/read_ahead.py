"""Batches read in the background, ahead of their use; the times of that, and its limit in bytes."""

import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from paceline.comm.progress import BETWEEN, PROGRESS
from paceline.comm.threads import start_thread
from paceline.data.batch import Batch, list_tensors

STAGES = ("fetch", "decode", "augment", "collate")
"""Stages, in their order."""
READ_AHEAD_BYTES = 2**28
_NUM_RECENT = 16
"""Steps of which the typical time is taken."""


@dataclass(frozen=True)
class ReadTimes:
    """Times of reading since they were taken last."""

    busy_s: dict[str, float]
    """Time that each stage took, summed over all threads or processes."""
    waited_s: float
    """Time that the training waited for a batch."""
    used_s: float
    """Time that the training had batches, from getting one to asking for the next."""
    num_samples: int
    num_bytes: int
    num_steps: int
    num_readers: int
    """Number of threads or processes that decode."""
    is_processes: bool
    choice: str = ""
    """Words on why these read, if that was chosen since."""

    @property
    def slowest(self) -> str:
        """Stage that limits reading: the one that takes the most time, divided by those that do it at a time."""
        spread = {stage: self._parallel(stage) for stage in self.busy_s}
        return max(self.busy_s, key=lambda stage: self.busy_s[stage] / spread[stage])

    def _parallel(self, stage: str) -> int:
        return self.num_readers if self.is_processes or stage != "fetch" else 1


class _Totals(NamedTuple):
    """Sums since the loader was made."""

    busy_s: tuple[float, ...] = (0.0,) * len(STAGES)
    waited_s: float = 0.0
    used_s: float = 0.0
    num_samples: int = 0
    num_bytes: int = 0
    num_steps: int = 0


class ReadingClock:
    """Times of reading, and the limit of what is read ahead, shared by the training and the threads that read for it.

    Args:
        limit_bytes: Largest size of batches that are read ahead; one step is read at least.
        steps_ahead: Steps that may be read before the training asks for them; None for no limit.
    """

    def __init__(self, limit_bytes: int = READ_AHEAD_BYTES, steps_ahead: int | None = None) -> None:
        self._limit_bytes, self._steps_ahead = limit_bytes, steps_ahead
        self._num_unasked = 0
        """Steps that are ready, less those that the training has asked for."""
        self._changed = threading.Condition()
        self._ready_bytes = self._largest_bytes = self._guessed_bytes = 0
        self._is_closed = False
        self._totals, self._reported = _Totals(), _Totals()
        self._recent_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self.num_readers, self.is_processes, self.choice = 1, False, ""
        self.most_bytes = 0
        """Largest size of the batches that were ready at a time."""

    @property
    def waited_s(self) -> float:
        """Time that the training has waited for batches, in all."""
        return self._totals.waited_s

    @property
    def busy_s(self) -> float:
        """Time that all stages have taken."""
        return sum(self._totals.busy_s)

    @property
    def typical_use_s(self) -> float | None:
        """Median time that the training had a step, of late; None if it has had none."""
        with self._changed:
            return statistics.median(self._recent_s) if self._recent_s else None

    def add(self, times: Sequence[float]) -> None:
        """Add the seconds of each stage."""
        with self._changed:
            busy_s = tuple(before + more for before, more in zip(self._totals.busy_s, times, strict=True))
            self._totals = self._totals._replace(busy_s=busy_s)

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        """Add the time inside to a stage."""
        began_s = time.perf_counter()
        yield
        duration_s = time.perf_counter() - began_s
        self.add([duration_s if each == stage else 0.0 for each in STAGES])

    def use(self, duration_s: float) -> None:
        """Add time that the training had a step, from getting it to asking for the next."""
        with self._changed:
            self._totals = self._totals._replace(used_s=self._totals.used_s + duration_s)
            self._recent_s.append(duration_s)

    def wait(self, duration_s: float) -> None:
        """Add time that the training waited for a step."""
        with self._changed:
            self._totals = self._totals._replace(waited_s=self._totals.waited_s + duration_s)

    def expect(self, step_bytes: int) -> None:
        """Take `step_bytes` for the size of a step until one is ready: else the first one is read alone."""
        with self._changed:
            self._guessed_bytes = step_bytes

    def has_room(self, num_reading: int) -> bool:
        """Return whether one more step may be read, beside `num_reading` that are being read."""
        with self._changed:
            return self._has_room(num_reading)

    def wait_for_room(self) -> None:
        """Wait until a step may be read while none is; return at once after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_room(0))

    def ask(self) -> None:
        """Record that the training asks for a step."""
        with self._changed:
            self._num_unasked -= 1
            self._changed.notify_all()

    def put(self, step: list[Batch]) -> None:
        """Record that a step is ready."""
        size = _count_step(step)
        with self._changed:
            self._num_unasked += 1
            self._largest_bytes = max(self._largest_bytes, size)
            self._ready_bytes += size
            self.most_bytes = max(self.most_bytes, self._ready_bytes)
            totals = self._totals
            self._totals = totals._replace(
                num_bytes=totals.num_bytes + size,
                num_samples=totals.num_samples + sum(batch.num_samples for batch in step),
                num_steps=totals.num_steps + 1,
            )

    def take(self, step: list[Batch]) -> None:
        """Record that the training takes a step."""
        with self._changed:
            self._ready_bytes -= _count_step(step)
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait for room any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """Whether nobody reads any more."""
        return self._is_closed

    def reopen(self) -> None:
        """Begin anew to read ahead, with nothing ready."""
        with self._changed:
            self._is_closed, self._ready_bytes, self._num_unasked = False, 0, 0

    def take_times(self) -> ReadTimes:
        """Return the times since this was called last."""
        with self._changed:
            now, before, choice = self._totals, self._reported, self.choice
            self._reported, self.choice = now, ""
        return ReadTimes(
            {stage: a - b for stage, a, b in zip(STAGES, now.busy_s, before.busy_s, strict=True)},
            waited_s=now.waited_s - before.waited_s,
            used_s=now.used_s - before.used_s,
            num_samples=now.num_samples - before.num_samples,
            num_bytes=now.num_bytes - before.num_bytes,
            num_steps=now.num_steps - before.num_steps,
            num_readers=self.num_readers,
            is_processes=self.is_processes,
            choice=choice,
        )

    def _has_room(self, num_reading: int) -> bool:
        if self._steps_ahead is not None and self._num_unasked + num_reading >= self._steps_ahead:
            return False
        largest_bytes = self._largest_bytes or self._guessed_bytes
        if not largest_bytes:
            return num_reading == 0
        needed = self._ready_bytes + (num_reading + 1) * largest_bytes
        return needed <= self._limit_bytes or (num_reading == 0 and self._ready_bytes == 0)


def _count_step(step: list[Batch]) -> int:
    return sum(count_bytes(batch.on_host.data) for batch in step)


def count_bytes(data: Any) -> int:
    """Return the size of the tensors of some data."""
    return sum(tensor.nbytes for tensor in list_tensors(data))


class ReadAhead:
    """Runs an iterator in a background thread, at most `depth` items ahead; its errors are raised in order.

    Args:
        open_items: Function that returns the steps that are read, called in the thread with a stack that is closed
            there.
        depth: Number of steps that may be ready.
        clock: Clock of reading.
        after_first: Function that is called in the thread once the first step is ready.
    """

    def __init__(
        self,
        open_items: Callable[[ExitStack], Iterator[list[Batch]]],
        depth: int,
        clock: ReadingClock,
        after_first: Callable[[], None] = lambda: None,
    ) -> None:
        self._open, self._clock, self._after_first = open_items, clock, after_first
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
            self._clock.ask()
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
            with ExitStack() as stack:  # here, not whenever memory is freed: it may own processes
                for number, item in enumerate(self._open(stack)):
                    self._clock.put(item)
                    if not self._put(item):
                        return
                    if number == 0:
                        self._after_first()
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
