"""Threads or processes that read, chosen by what the first steps of a training measure."""

import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.data.batch import Batch
from paceline.data.pipeline import MAX_READERS, PartReader, StepReads, read_here, read_in_threads
from paceline.data.randomness import capture_generators
from paceline.data.read_ahead import ReadingClock
from paceline.data.read_in_processes import read_in_processes

NUM_MEASURED = 8
"""Steps that are measured with one thread; then, where more are needed, with several."""
SPARE = 1.3
"""Capacity of reading that is aimed at, as a multiple of what the training uses."""
_LEAST_SPEEDUP = 0.6
"""Part of the ideal speed-up that several threads must reach: else they wait for Python's lock, as processes do not."""


class StepCost(NamedTuple):
    """Measurements of the first steps, in seconds a step."""

    read_s: float
    """Time that one thread takes to read."""
    used_s: float
    """Time that the training takes, without waiting."""


class Readers(NamedTuple):
    """Choice of what reads."""

    number: int
    is_processes: bool
    reason: str
    """Words on why."""


def count_readers(measured: StepCost, num_cores: int) -> int:
    """Return how many threads or processes keep up with the training; at most as many as there are cores."""
    if measured.read_s * SPARE <= measured.used_s:
        return 1
    needed = math.ceil(measured.read_s * SPARE / max(measured.used_s, 1e-9))
    return max(1, min(needed, num_cores, MAX_READERS))


def choose_kind(number: int, one_s: float, several_s: float) -> bool:
    """Return whether processes are to read, and not threads.

    Args:
        number: Number of threads that were tried.
        one_s: Seconds a step with one thread.
        several_s: Seconds a step with that many, each step in one of them.
    """
    return one_s / max(several_s, 1e-9) < 1 + _LEAST_SPEEDUP * (number - 1)


def read_by_measurement(
    reader: PartReader,
    steps: Iterator[StepReads],
    device: torch.device,
    clock: ReadingClock,
    prefetch_factor: Callable[[int], int],
    *,
    shares_generators: bool,
) -> Generator[list[Batch]]:
    """Yield the micro-batches of each step, first read by one thread, then by as many threads or processes as it takes.

    The batches are the same whatever is chosen. Data that draws from the global random generators is read by a process
    from the first step on, and so is what cannot be read by several threads, once one is too slow.

    Args:
        reader: Reader of micro-batches.
        steps: Steps to read.
        device: Device of the batches.
        clock: Clock of reading, by which is chosen.
        prefetch_factor: Function of a number of processes that returns how many micro-batches each reads ahead.
        shares_generators: Whether other threads draw from the global generators, so that draws cannot be noticed.
    """

    def in_processes(number: int, rest: Iterator[StepReads], reason: str) -> Iterator[list[Batch]]:
        return read_as(Readers(number, True, reason), reader, rest, device, clock, prefetch_factor(number))

    if reader.draws_globally:
        yield from in_processes(1, steps, "augmentation may draw from global random generators")
        return
    step = next(steps, None)
    if step is None:
        return
    before = None if shares_generators else _get_generators()
    first = list(read_here(reader, iter([step]), device, clock))
    if before is not None and _get_generators(compared=True) != before[0]:
        _set_generators(before[1])
        yield from in_processes(1, itertools.chain([step], steps), "the data draws from global random generators")
        return
    yield from first
    tried_s = []
    before_s = clock.busy_s
    for batches in read_here(reader, itertools.islice(steps, NUM_MEASURED), device, clock):
        tried_s.append(clock.busy_s - before_s)
        yield batches
        before_s = clock.busy_s
    used_s = clock.typical_use_s
    if not tried_s or used_s is None:
        return  # the steps have come to their end
    measured = StepCost(statistics.median(tried_s), used_s)
    number = count_readers(measured, count_cores())
    found = f"a step's data takes one thread {measured.read_s * 1e3:.3g} ms, and its training {used_s * 1e3:.3g} ms"
    if measured.read_s * SPARE <= used_s or (number == 1 and reader.is_thread_safe):
        yield from read_as(Readers(1, False, found), reader, steps, device, clock, 1)
        return
    if not reader.is_thread_safe:
        yield from in_processes(number, steps, f"{found}; not all that reads may do so in several threads at once")
        return
    trial = _Trial()
    yield from trial.watch(read_in_threads(reader, itertools.islice(steps, 2 * number), device, clock, number))
    reason = f"{found}; with {number} threads {trial.step_s * 1e3:.3g} ms"
    is_processes = choose_kind(number, measured.read_s, trial.step_s)
    readers = Readers(number, is_processes, reason)
    yield from read_as(readers, reader, steps, device, clock, prefetch_factor(number))


def read_as(
    readers: Readers,
    reader: PartReader,
    steps: Iterator[StepReads],
    device: torch.device,
    clock: ReadingClock,
    prefetch_factor: int,
) -> Iterator[list[Batch]]:
    """Return the micro-batches of each step, read as chosen."""
    clock.num_readers, clock.is_processes, clock.choice = readers.number, readers.is_processes, readers.reason
    if readers.is_processes:
        return read_in_processes(reader, steps, device, clock, readers.number, prefetch_factor)
    if readers.number > 1 or reader.has_fetch:
        return read_in_threads(reader, steps, device, clock, readers.number)
    return read_here(reader, steps, device, clock)


def count_cores() -> int:
    """Return this worker's part of the host's cores."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


class _Trial:
    """A measurement of the seconds a step that reading takes while somebody waits for it."""

    def __init__(self) -> None:
        self.step_s = 0.0

    def watch(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        taken_s, count = 0.0, 0
        while True:
            began_s = time.perf_counter()
            step = next(steps, None)
            if step is None:
                self.step_s = taken_s / max(count, 1)
                return
            taken_s, count = taken_s + time.perf_counter() - began_s, count + 1
            yield step


def _get_generators(*, compared: bool = False) -> Any:
    """Return the states of the global generators to compare, and unless only `compared` those to set."""
    states = capture_generators()
    return (
        states
        if compared
        else (states, (torch.default_generator.get_state(), np.random.get_state(), random.getstate()))
    )


def _set_generators(states: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
