"""Reading the samples of planned steps, here or in processes."""

import itertools
import multiprocessing
import multiprocessing.context
import multiprocessing.pool
import multiprocessing.popen_fork
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from paceline.data.base import Source
from paceline.data.batch import Batch
from paceline.data.order import GlobalOrder, Indices, Interval, derive_seed


@dataclass(frozen=True)
class StepReads:
    """One step of one worker: which positions each micro-batch reads, and how many of them count."""

    interval: Interval
    parts: list[Interval]
    counts: list[int]

    def make_batches(self, read: Sequence[Any], device: torch.device) -> list[Batch]:
        """Return its micro-batches, whose data was read."""
        last = len(read) - 1
        return [
            Batch(data, count, self.interval, last=number == last).to(device)
            for number, (data, count) in enumerate(zip(read, self.counts, strict=True))
        ]


def read_here(
    source: Source, order: GlobalOrder, steps: Iterator[StepReads], device: torch.device
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step: see `read_in_processes`."""
    for step in steps:
        yield step.make_batches([source.read(order.samples_at(part)) for part in step.parts], device)


def read_in_processes(
    source: Source,
    order: GlobalOrder,
    steps: Iterator[StepReads],
    device: torch.device,
    num_processes: int,
    prefetch_factor: int,
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step, read by forked processes, which have ended when this has.

    A fork has all that the source holds, lambdas and open files among it, and nothing is pickled.

    Args:
        source: What they read from.
        order: What the positions of steps are in.
        steps: What they read.
        device: Of the batches.
        num_processes: How many there are.
        prefetch_factor: Micro-batches that each of them reads ahead.
    """
    planned: queue.SimpleQueue[StepReads] = queue.SimpleQueue()

    def plan() -> Iterator[tuple[Interval, Indices]]:
        for step in steps:
            planned.put(step)
            yield from ((part, order.samples_at(part)) for part in step.parts)

    parts = iter(
        DataLoader(
            _Reader(source, order.seed),
            sampler=plan(),
            generator=torch.Generator(),  # or it would draw from that of the model
            batch_size=None,
            num_workers=num_processes,
            worker_init_fn=_live_with_worker,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=_ForkContext() if sys.platform == "linux" else None,
        )
    )
    try:
        read = map(_raise_if_error, parts)
        for first in read:  # its step was planned before it
            step = planned.get()
            yield step.make_batches([first, *itertools.islice(read, len(step.parts) - 1)], device)
    finally:  # an error's traceback would keep them alive
        parts._shutdown_workers()  # type: ignore[attr-defined]  # torch has no other name for it


class _Reader(Dataset[Any]):
    """A source whose keys are whole batches of positions and indices, as a loader process reads them."""

    def __init__(self, source: Source, seed: int) -> None:
        self._source, self._seed = source, seed

    def __getitem__(self, key: tuple[Interval, Indices]) -> Any:
        positions, indices = key
        seeds = [derive_seed(self._seed, position) for position in range(*positions)]
        try:
            return self._source.read_seeded(np.asarray(indices), seeds)
        except Exception as error:  # handed on as it is; torch would make its traceback a part of its message
            trace = error.__traceback__
            return multiprocessing.pool.ExceptionWithTraceback(_portable(error), trace)  # type: ignore[attr-defined]


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent to another process: this one, or its words."""
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
    """Leave signals to the worker, which a launcher signals too, and end when it does, however it ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_worker, daemon=True).start()


def _end_with_worker() -> None:
    worker = multiprocessing.parent_process()
    assert worker is not None
    worker.join()
    os._exit(1)


class _ForkPopen(multiprocessing.popen_fork.Popen):
    """A forked process that ignores SIGTERM: whoever would end it so, as Python does at its own end, must kill it."""

    def terminate(self) -> None:
        self.kill()


class _ForkProcess(multiprocessing.context.ForkProcess):
    _Popen = _ForkPopen


class _ForkContext(multiprocessing.context.ForkContext):
    Process = _ForkProcess
