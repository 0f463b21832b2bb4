"""Reading the samples of planned steps, here or in processes."""

import dataclasses
import functools
import multiprocessing
import multiprocessing.context
import multiprocessing.pool
import multiprocessing.popen_fork
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.comm.streams import SideStream
from paceline.data.batch import Batch, map_tensors
from paceline.data.order import Interval
from paceline.data.pipeline import Decoded, Fetched, PartReader, PlannedPart, ReadingClock, ReadPart


@dataclass(frozen=True)
class StepReads:
    """One step of one worker: the positions that each micro-batch reads, and the number of them that count."""

    interval: Interval
    parts: list[Interval]
    counts: list[int]
    virtual_workers: list[int] | None = None
    """Virtual worker of each micro-batch, if there are any."""

    def make_batches(self, read: Sequence[ReadPart], device: torch.device) -> list[Batch]:
        """Return its micro-batches, as they were read; what is lost does not count."""
        last = len(read) - 1
        virtual: Sequence[int | None] = self.virtual_workers or [None] * len(read)
        batches = [
            Batch(
                part.data,
                max(0, count - part.num_lost),
                self.interval,
                last=number == last,
                virtual_worker=virtual[number],
            )
            for number, (part, count) in enumerate(zip(read, self.counts, strict=True))
        ]
        return batches if device.type == "cpu" else _send(batches, device)


def _send(batches: list[Batch], device: torch.device) -> list[Batch]:
    """Return batches on a GPU, copied on a stream of their own: they are read ahead while the model computes."""
    stream = _copy_stream(device)
    if device.type == "cuda":  # else the host would copy to pinned memory itself, and wait
        batches = [dataclasses.replace(one, data=map_tensors(Tensor.pin_memory, one.data)) for one in batches]
    with stream.running(None):
        sent = [batch.to(device) for batch in batches]
        arrival = stream.mark()
    return [dataclasses.replace(batch, arrival=arrival) for batch in sent]


@functools.cache
def _copy_stream(device: torch.device) -> SideStream:
    return SideStream(device)


def read_here(
    reader: PartReader, steps: Iterator[StepReads], device: torch.device, clock: ReadingClock
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step, read one after another: see `read_in_processes`."""
    while True:
        clock.wait_for_room()
        step = next(steps, None)
        if step is None:
            return
        yield _finish(reader, step, [reader.read(part) for part in step.parts], device, clock)


def read_in_threads(
    reader: PartReader, steps: Iterator[StepReads], device: torch.device, clock: ReadingClock, num_threads: int
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step: one thread fetches, others decode, augment and collate.

    Where the source decodes samples, all threads decode those of one micro-batch at a time, so that the first one comes
    as soon as it can.

    Args:
        reader: Reader of micro-batches.
        steps: Steps to read; at most ``num_threads + 1`` of them at a time.
        device: Device of the batches.
        clock: Clock of reading, and limit of what is read ahead.
        num_threads: Number of threads that decode.
    """
    reading: deque[tuple[StepReads, list[Future[ReadPart]]]] = deque()
    with (
        ThreadPoolExecutor(1, "paceline-fetch") as fetching,
        ThreadPoolExecutor(num_threads, "paceline-decode") as pool,
    ):

        def begin(part: Interval) -> Future[ReadPart]:
            shared = _SharedPart(reader, reader.plan(part, num_threads))
            for number, indices in enumerate(shared.plan.slices):
                pool.submit(shared.decode, number, fetching.submit(reader.fetch, indices))
            return shared.read

        try:
            while True:
                while len(reading) <= num_threads and (not reading or clock.has_room(len(reading))):
                    if not reading:
                        clock.wait_for_room()
                    step = next(steps, None)
                    if step is None:
                        break
                    reading.append((step, [begin(part) for part in step.parts]))
                if not reading:
                    return
                step, futures = reading.popleft()
                yield _finish(reader, step, [future.result() for future in futures], device, clock)
        finally:
            fetching.shutdown(wait=False, cancel_futures=True)
            pool.shutdown(wait=False, cancel_futures=True)


class _SharedPart:
    """One micro-batch whose slices several threads decode; the one that is last puts them together, and none waits."""

    def __init__(self, reader: PartReader, plan: PlannedPart) -> None:
        self.plan, self._reader = plan, reader
        self.read: Future[ReadPart] = Future()
        self._decoded: list[Decoded | BaseException | None] = [None] * len(plan.slices)
        self._num_left, self._lock = len(plan.slices), threading.Lock()

    def decode(self, number: int, fetched: Future[Fetched]) -> None:
        """Decode one slice, and finish the micro-batch if it is the last one left."""
        try:
            self._decoded[number] = self._reader.decode(fetched.result())
        except BaseException as error:  # raised again where the step is used
            self._decoded[number] = error
        with self._lock:
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            try:
                self.read.set_result(self._reader.finish(self.plan, [_require_decoded(one) for one in self._decoded]))
            except BaseException as error:
                self.read.set_exception(error)


def _require_decoded(decoded: Decoded | BaseException | None) -> Decoded:
    assert decoded is not None
    if isinstance(decoded, BaseException):
        raise decoded
    return decoded


def read_in_processes(
    reader: PartReader,
    steps: Iterator[StepReads],
    device: torch.device,
    clock: ReadingClock,
    num_processes: int,
    prefetch_factor: int,
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step, read by forked processes, which end before the generator does.

    A fork has all objects of the source, including lambdas and open files, and nothing is pickled.

    Args:
        reader: Reader of micro-batches.
        steps: Steps to read.
        device: Device of the batches.
        clock: Clock of reading, and limit of what is read ahead.
        num_processes: Number of processes.
        prefetch_factor: Micro-batches that each process reads ahead.
    """
    plan = _PlannedParts(steps, clock, num_processes * prefetch_factor)
    parts = iter(
        DataLoader(
            _Reader(reader),
            sampler=plan,
            generator=torch.Generator(),  # otherwise it would draw from the model's generator
            batch_size=None,
            num_workers=num_processes,
            worker_init_fn=_live_with_worker,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=_ForkContext() if sys.platform == "linux" else None,
        )
    )
    try:
        while True:
            if not plan.steps:
                clock.wait_for_room()
            _plan_more(parts, plan)
            if not plan.steps:
                return
            step = plan.steps[0]
            read = []
            for _ in step.parts:
                read.append(_raise_if_error(next(parts)))
                plan.num_read += 1
            plan.steps.popleft()
            yield _finish(reader, step, read, device, clock)
    finally:  # an error's traceback would keep them alive
        parts._shutdown_workers()  # type: ignore[attr-defined]  # torch has no other name for it


class _PlannedParts:
    """Sampler of the next micro-batches, as long as there is room for their steps: it stops, and later goes on."""

    def __init__(self, steps: Iterator[StepReads], clock: ReadingClock, most_parts: int) -> None:
        self._source, self._clock, self._most_parts = steps, clock, most_parts
        self._rest: deque[Interval] = deque()
        self.steps: deque[StepReads] = deque()
        """Steps that are being read."""
        self.num_planned = self.num_read = 0

    def __iter__(self) -> "_PlannedParts":
        return self

    def __next__(self) -> Interval:
        if self.num_planned - self.num_read >= self._most_parts:
            raise StopIteration
        if not self._rest:
            if self.steps and not self._clock.has_room(len(self.steps)):
                raise StopIteration
            step = next(self._source)
            self.steps.append(step)
            self._rest.extend(step.parts)
        self.num_planned += 1
        return self._rest.popleft()


def _plan_more(parts: Any, plan: _PlannedParts) -> None:
    """Give processes as many micro-batches as there is room for."""
    before = -1
    while before != plan.num_planned and parts._tasks_outstanding < parts._prefetch_factor * parts._num_workers:
        before = plan.num_planned
        parts._try_put_index()


def _finish(
    reader: PartReader, step: StepReads, read: list[ReadPart], device: torch.device, clock: ReadingClock
) -> list[Batch]:
    for part in read:
        clock.add(part.times)
        reader.bad_samples.note(part.found)
    with clock.timing("collate"):
        return step.make_batches(read, device)


class _Reader(Dataset[Any]):
    """Micro-batches under their positions, as a loader process reads them."""

    def __init__(self, reader: PartReader) -> None:
        self._reader = reader

    def __getitem__(self, part: Interval) -> Any:
        try:
            return self._reader.read(Interval(*part), seeded=True)
        except Exception as error:  # passed on unchanged; torch would put its traceback into its message
            trace = error.__traceback__
            return multiprocessing.pool.ExceptionWithTraceback(_portable(error), trace)  # type: ignore[attr-defined]


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent to another process: this one, or one with its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _raise_if_error(read: Any) -> Any:
    if isinstance(read, Exception):
        raise read
    return read


def _live_with_worker(_: int) -> None:
    """Leave signals to the worker, which a launcher signals too, and end when the worker ends, for any reason."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_worker, daemon=True).start()


def _end_with_worker() -> None:
    worker = multiprocessing.parent_process()
    assert worker is not None
    worker.join()
    os._exit(1)


class _ForkPopen(multiprocessing.popen_fork.Popen):
    """A forked process that ignores SIGTERM, and is killed instead where Python terminates it at its own end."""

    def terminate(self) -> None:
        self.kill()


class _ForkProcess(multiprocessing.context.ForkProcess):
    _Popen = _ForkPopen


class _ForkContext(multiprocessing.context.ForkContext):
    Process = _ForkProcess
