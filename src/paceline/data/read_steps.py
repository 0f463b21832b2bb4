"""Reading the samples of planned steps, here or in processes."""

import dataclasses
import functools
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

from paceline.comm.streams import SideStream
from paceline.data.bad_samples import BadSampleCount, BadSamples, read_samples
from paceline.data.base import Source
from paceline.data.batch import Batch
from paceline.data.order import GlobalOrder, Interval
from paceline.data.orders import Indices
from paceline.data.permutation import derive_seed


@dataclass(frozen=True)
class StepReads:
    """One step of one worker: the positions that each micro-batch reads, and the number of them that count."""

    interval: Interval
    parts: list[Interval]
    counts: list[int]
    virtual_workers: list[int] | None = None
    """Virtual worker of each micro-batch, if there are any."""

    def make_batches(self, read: Sequence[Any], device: torch.device, bad: BadSampleCount | None = None) -> list[Batch]:
        """Return its micro-batches, given what was read for each."""
        parts = [(data, 0) if bad is None else bad.note(data) for data in read]
        last = len(read) - 1
        virtual: Sequence[int | None] = self.virtual_workers or [None] * len(read)
        batches = [
            Batch(data, max(0, count - lost), self.interval, last=number == last, virtual_worker=virtual[number])
            for number, ((data, lost), count) in enumerate(zip(parts, self.counts, strict=True))
        ]
        return batches if device.type == "cpu" else _send(batches, device)


def _send(batches: list[Batch], device: torch.device) -> list[Batch]:
    """Return batches on a GPU, copied on a stream of their own: they are read ahead while the model computes."""
    stream = _copy_stream(device)
    with stream.running(None):
        sent = [batch.to(device) for batch in batches]
        arrival = stream.mark()
    return [dataclasses.replace(batch, arrival=arrival) for batch in sent]


@functools.cache
def _copy_stream(device: torch.device) -> SideStream:
    return SideStream(device)


def read_here(
    source: Source, order: GlobalOrder, steps: Iterator[StepReads], device: torch.device, bad: BadSampleCount
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step: see `read_in_processes`."""
    for step in steps:
        read = [read_samples(source, order.samples_at(part), None, bad.settings) for part in step.parts]
        yield step.make_batches(read, device, bad)


def read_in_processes(
    source: Source,
    order: GlobalOrder,
    steps: Iterator[StepReads],
    device: torch.device,
    bad: BadSampleCount,
    num_processes: int,
    prefetch_factor: int,
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step, read by forked processes, which end before the generator does.

    A fork has all objects of the source, including lambdas and open files, and nothing is pickled.

    Args:
        source: Source of the samples.
        order: Global order of the positions.
        steps: Steps to read.
        device: Device of the batches.
        bad: Count of bad samples.
        num_processes: Number of processes.
        prefetch_factor: Micro-batches that each process reads ahead.
    """
    planned: queue.SimpleQueue[StepReads] = queue.SimpleQueue()

    def plan() -> Iterator[tuple[Interval, Indices]]:
        for step in steps:
            planned.put(step)
            yield from ((part, order.samples_at(part)) for part in step.parts)

    parts = iter(
        DataLoader(
            _Reader(source, order.seed, bad.settings),
            sampler=plan(),
            generator=torch.Generator(),  # otherwise it would draw from the model's generator
            batch_size=None,
            num_workers=num_processes,
            worker_init_fn=_live_with_worker,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=_ForkContext() if sys.platform == "linux" else None,
        )
    )
    try:
        read = map(_raise_if_error, parts)
        for first in read:  # its step was planned before
            step = planned.get()
            yield step.make_batches([first, *itertools.islice(read, len(step.parts) - 1)], device, bad)
    finally:  # an error's traceback would keep them alive
        parts._shutdown_workers()  # type: ignore[attr-defined]  # torch has no other name for it


class _Reader(Dataset[Any]):
    """A source whose keys are batches of positions and indices, as a loader process reads them."""

    def __init__(self, source: Source, seed: int, bad_samples: BadSamples) -> None:
        self._source, self._seed, self._bad_samples = source, seed, bad_samples

    def __getitem__(self, key: tuple[Interval, Indices]) -> Any:
        positions, indices = key
        seeds = [derive_seed(self._seed, position) for position in range(*positions)]
        try:
            return read_samples(self._source, np.asarray(indices), seeds, self._bad_samples)
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
