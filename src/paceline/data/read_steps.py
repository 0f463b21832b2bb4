"""Reading the samples of planned steps, here or in processes."""

import itertools
import queue
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.data.base import Batch, Indices, Source
from paceline.data.order import Interval


@dataclass(frozen=True)
class StepReads:
    """One step of one worker: which samples each micro-batch reads, and how many of them count."""

    interval: Interval
    parts: list[Indices]
    counts: list[int]

    def make_batches(self, read: Sequence[Sequence[Tensor]], device: torch.device) -> list[Batch]:
        """Return its micro-batches, of which inputs and targets were read."""
        last = len(read) - 1
        return [
            Batch(inputs, targets, count, self.interval, last=number == last).to(device)
            for number, ((inputs, targets), count) in enumerate(zip(read, self.counts, strict=True))
        ]


def read_in_processes(
    source: Source, steps: Iterator[StepReads], device: torch.device, num_processes: int, prefetch_factor: int
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step, read by forked processes.

    Args:
        source: What they read from.
        steps: What they read.
        device: Of the batches.
        num_processes: How many there are.
        prefetch_factor: Micro-batches that each of them reads ahead.
    """
    planned: queue.SimpleQueue[StepReads] = queue.SimpleQueue()

    def plan() -> Iterator[Indices]:
        for step in steps:
            planned.put(step)
            yield from step.parts

    parts = iter(
        DataLoader(
            _Reader(source),
            sampler=plan(),
            batch_size=None,
            num_workers=num_processes,
            worker_init_fn=_ignore_signals,
            prefetch_factor=prefetch_factor,
        )
    )
    for first in parts:  # its step was planned before it
        step = planned.get()
        yield step.make_batches([first, *itertools.islice(parts, len(step.parts) - 1)], device)


class _Reader(Dataset[Any]):
    """A source whose keys are whole batches of indices, as a loader process reads them."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, indices: Indices) -> tuple[Tensor, Tensor]:
        return self._source.read(np.asarray(indices))


def _ignore_signals(_: int) -> None:
    """Leave it to the worker, which a launcher signals too, to end this process after its last step."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
