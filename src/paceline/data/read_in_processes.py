"""Reading the samples of planned steps in processes."""

import itertools
import multiprocessing
import multiprocessing.context
import multiprocessing.pool
import multiprocessing.popen_fork
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.data.batch import Batch
from paceline.data.order import Positions
from paceline.data.pipeline import PartReader, StepReads, finish_step
from paceline.data.read_ahead import ReadingClock
from paceline.errors import DataError

_MOST_LOST = 2
"""Number of processes in a row that may be lost without a step that was read."""
_ENDS_S = 1.0
"""Longest time between what is missed of a process and its end."""


def read_in_processes(
    reader: PartReader,
    steps: Iterator[StepReads],
    device: torch.device,
    clock: ReadingClock,
    num_processes: int,
    prefetch_factor: int,
) -> Generator[list[Batch]]:
    """Yield the micro-batches of each step, read by forked processes, which end before the generator does.

    A fork has all objects of the source, including lambdas and open files, and nothing is pickled. Where a process is
    killed, as where memory is short, others read the steps that were under way again.

    Args:
        reader: Reader of micro-batches.
        steps: Steps to read.
        device: Device of the batches.
        clock: Clock of reading, and limit of what is read ahead.
        num_processes: Number of processes.
        prefetch_factor: Micro-batches that each process reads ahead.

    Raises:
        DataError: Processes end again and again.
    """
    num_lost = 0
    while True:
        plan = _PlannedParts(steps, clock, num_processes * prefetch_factor)
        try:
            for batches in _read_plan(reader, plan, device, clock, num_processes, prefetch_factor):
                num_lost = 0
                yield batches
        except _LostReaderError as error:
            if clock.is_closed or multiprocessing.util.is_exiting():  # nobody reads any more, and Python ends them
                return
            num_lost += 1
            if num_lost > _MOST_LOST:
                raise DataError(
                    f"processes that read data must live, but {num_lost} in a row ended before they had read a step, "
                    f"the last one {error}; memory may be short, which fewer num_processes need less of, or the data's "
                    "own code ends its process: num_processes=0 shows where"
                ) from error
            warnings.warn(
                f"a process that reads data {error}; others are started, and read the same samples", stacklevel=2
            )
            steps = itertools.chain(list(plan.steps), steps)
        else:
            return


class _LostReaderError(Exception):
    """A process that reads has ended; the message says how."""


def _read_plan(
    reader: PartReader,
    plan: "_PlannedParts",
    device: torch.device,
    clock: ReadingClock,
    num_processes: int,
    prefetch_factor: int,
) -> Generator[list[Batch]]:
    """Yield the micro-batches of each planned step.

    Raises:
        _LostReaderError: A process has ended; the plan has the steps that it does not yield.
    """
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
                read.append(_raise_if_error(_next_part(parts)))
                plan.num_read += 1
            plan.steps.popleft()
            yield finish_step(reader, step, read, device, clock)
    finally:  # an error's traceback would keep them alive
        parts._shutdown_workers()  # type: ignore[attr-defined]  # torch has no other name for it


def _next_part(parts: Any) -> Any:
    """Return the next micro-batch; raise `_LostReaderError` if it does not come since a process has ended."""
    try:
        return next(parts)
    except (RuntimeError, OSError, EOFError) as error:  # what torch meets before it finds the process dead
        deadline_s = time.monotonic() + _ENDS_S
        while time.monotonic() < deadline_s:
            if ended := [process for process in parts._workers if process.exitcode is not None]:
                raise _LostReaderError(_describe(ended[0])) from error
            time.sleep(0.01)
        raise


def _describe(process: Any) -> str:
    code = process.exitcode
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"(pid {process.pid}) {end}"  # with its number, as a warning is shown once


class _PlannedParts:
    """Sampler of the next micro-batches, as long as there is room for their steps: it stops, and later goes on."""

    def __init__(self, steps: Iterator[StepReads], clock: ReadingClock, most_parts: int) -> None:
        self._source, self._clock, self._most_parts = steps, clock, most_parts
        self._rest: deque[Positions] = deque()
        self.steps: deque[StepReads] = deque()
        """Steps that are being read."""
        self.num_planned = self.num_read = 0

    def __iter__(self) -> "_PlannedParts":
        return self

    def __next__(self) -> Positions:
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


class _Reader(Dataset[Any]):
    """Micro-batches under their positions, as a loader process reads them."""

    def __init__(self, reader: PartReader) -> None:
        self._reader = reader

    def __getitem__(self, part: Positions) -> Any:
        try:
            return self._reader.read(part, seeded=True)
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
