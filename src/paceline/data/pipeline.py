"""Stages in which samples are read: fetch, decode, augment and collate; their times, and a limit in bytes."""

import dataclasses
import functools
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from paceline.comm.streams import SideStream
from paceline.data.augment.augmenter import Augmenter
from paceline.data.bad_samples import BadSampleCount, FoundBadSample, GoodSamples, read_good
from paceline.data.base import Source
from paceline.data.batch import Batch, map_tensors, select
from paceline.data.order import GlobalOrder, Interval, Positions, list_positions
from paceline.data.orders import Indices
from paceline.data.permutation import derive_seed
from paceline.data.read_ahead import READ_AHEAD_BYTES, ReadingClock, count_bytes
from paceline.errors import BadSample, SettingsError
from paceline.registry import check_whole

MAX_READERS = 8
"""Largest number of threads or processes that ``auto`` chooses: all workers must know how far any may read ahead."""
NumProcesses = int | Literal["auto"]


@dataclass(frozen=True)
class ReadSettings:
    """Settings of how a worker reads: see `Loader`."""

    prefetch: int = 2
    num_processes: NumProcesses = 0
    num_threads: int = 1
    read_ahead_bytes: int = READ_AHEAD_BYTES

    def __post_init__(self) -> None:
        check_whole("prefetch", self.prefetch, 0)
        check_whole("num_threads", self.num_threads, 1)
        check_whole("read_ahead_bytes", self.read_ahead_bytes, 1)
        if self.num_processes != "auto":
            check_whole("num_processes", self.num_processes, 0)
        if self.num_processes and self.num_threads > 1:
            raise SettingsError(
                "either num_processes or num_threads must be left out, but got "
                f"{self.num_processes} and {self.num_threads}; give the one that reads faster, or num_processes auto"
            )


@dataclass(frozen=True)
class PlannedPart:
    """One micro-batch that is to be read, in slices that may be read apart."""

    positions: Indices
    """Positions to read: those of the part, with partners for mixing."""
    first: int
    """Place of the part's first position among them."""
    num_samples: int
    """Number of samples of the part."""
    indices: Indices
    slices: list[Indices]
    """Indices in order, one slice or more."""


@dataclass(frozen=True)
class Fetched:
    """Samples that are fetched, and not decoded yet."""

    samples: Any
    fetch_s: float
    is_bad: bool = False
    """Whether a sample could not be fetched."""


@dataclass(frozen=True)
class Decoded:
    """Samples that are decoded, and not augmented yet."""

    samples: Any
    fetch_s: float
    decode_s: float
    is_bad: bool = False
    """Whether a sample could not be fetched or decoded."""


@dataclass(frozen=True)
class ReadPart:
    """One micro-batch that was read, and the seconds that each stage took."""

    data: Any
    times: tuple[float, ...]
    num_lost: int = 0
    """Number of samples that are not in the data."""
    found: Sequence[FoundBadSample] = ()
    """Samples that could not be read."""

    @property
    def num_bytes(self) -> int:
        """Size of its tensors."""
        return count_bytes(self.data)


class PartReader:
    """Reader of micro-batches, in stages; what it returns depends on the positions alone.

    Args:
        source: Source of the samples.
        order: Global order of the positions.
        bad_samples: Count of bad samples, with their settings.
        augmenter: Operations on samples; None for none.
    """

    def __init__(
        self, source: Source, order: GlobalOrder, bad_samples: BadSampleCount, augmenter: Augmenter | None = None
    ) -> None:
        self.source, self.bad_samples = source, bad_samples
        self.has_fetch = has_fetch(source)
        """Whether fetching samples is a stage of its own."""
        self._order, self._augmenter = order, augmenter

    @property
    def draws_globally(self) -> bool:
        """Whether augmentation may draw from the global random generators."""
        return self._augmenter is not None and self._augmenter.draws_globally

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may read at once."""
        return self.source.is_thread_safe and (self._augmenter is None or self._augmenter.is_thread_safe)

    def read(self, part: Positions, *, seeded: bool = False) -> ReadPart:
        """Return the micro-batch of a part.

        Args:
            part: Positions of the micro-batch.
            seeded: Whether the global random generators are this process's own, to be seeded for each sample.
        """
        plan = self.plan(part)
        seeds = [derive_seed(self._order.seed, position) for position in plan.positions.tolist()] if seeded else None
        return self.finish(plan, [self.decode(self.fetch(plan.indices), seeds)], seeds)

    def plan(self, part: Positions, num_slices: int = 1) -> PlannedPart:
        """Return what to read for a part.

        Args:
            part: Positions of the micro-batch.
            num_slices: Number of slices, where the source decodes samples and not batches; else there is one.
        """
        own = list_positions(part)
        wide = part if self._augmenter is None else self._augmenter.widen(part)
        positions, indices = list_positions(wide), self._order.samples_at(wide)
        number = max(1, min(num_slices, len(indices))) if self.source.decodes_samples else 1
        first = int(own[0] - positions[0]) if wide is not part else 0
        return PlannedPart(positions, first, len(own), indices, np.array_split(indices, number))

    def fetch(self, indices: Indices) -> Fetched:
        """Return the samples at some indices, fetched."""
        began_s, samples, is_bad = time.perf_counter(), None, False
        try:
            samples = self.source.fetch(indices) if self.has_fetch else indices
        except BadSample:
            if self.bad_samples.is_fatal:
                raise
            is_bad = True
        return Fetched(samples, time.perf_counter() - began_s, is_bad)

    def decode(self, fetched: Fetched, seeds: Sequence[int] | None = None) -> Decoded:
        """Return samples, decoded; with seeds each has its own random numbers."""
        began_s, samples, is_bad = time.perf_counter(), None, fetched.is_bad
        try:
            samples = None if is_bad else self.source.decode(fetched.samples, seeds)
        except BadSample:
            if self.bad_samples.is_fatal:
                raise
            is_bad = True
        return Decoded(samples, fetched.fetch_s, time.perf_counter() - began_s, is_bad)

    def finish(self, plan: PlannedPart, slices: Sequence[Decoded], seeds: Sequence[int] | None = None) -> ReadPart:
        """Return a micro-batch, augmented and collated, given its slices in order."""
        source, good = self.source, None
        if any(one.is_bad for one in slices):
            good = self._read_good(plan, seeds)
            decoded = good.data
        else:
            decoded = slices[0].samples if len(slices) == 1 else [sample for one in slices for sample in one.samples]
        began_s, collate_s = time.perf_counter(), 0.0

        def collate(samples: list[Any]) -> Any:
            nonlocal collate_s
            began_s = time.perf_counter()
            batch = source.collate(samples)
            collate_s += time.perf_counter() - began_s
            return batch

        kept = None if good is None or not self.bad_samples.skips else good.kept
        if self._augmenter is not None:
            data = self._augmenter.apply(
                decoded,
                plan.positions,
                slice(plan.first, plan.first + plan.num_samples),
                plan.indices,
                collate if source.decodes_samples else None,
                stacks=source.stacks,
            )
            if kept is not None:
                data, kept = _drop(data, plan, kept)
        else:
            data = collate(decoded) if source.decodes_samples else decoded
        augment_s = time.perf_counter() - began_s - collate_s
        times = (sum(one.fetch_s for one in slices), sum(one.decode_s for one in slices), augment_s, collate_s)
        num_lost = 0 if kept is None else plan.num_samples - len(kept)
        return ReadPart(data, times, num_lost, () if good is None else good.found)

    def _read_good(self, plan: PlannedPart, seeds: Sequence[int] | None) -> GoodSamples:
        """Return a part's samples without the bad ones.

        Where samples are augmented, or replaced, bad ones have a neighbour in their place.
        """
        replaces = self._augmenter is not None or not self.bad_samples.skips
        return read_good(self.source, plan.indices, seeds, replaces=replaces)


def _drop(data: Any, plan: PlannedPart, kept: list[int]) -> tuple[Any, list[int]]:
    """Return a part's samples without the bad ones, or the first if there is no other; and the places that are left."""
    left = [place - plan.first for place in kept if 0 <= place - plan.first < plan.num_samples]
    return select(data, left or [0], plan.num_samples), left


def has_fetch(source: Source) -> bool:
    """Return whether fetching a source's samples is a stage of its own."""
    return type(source).fetch is not Source.fetch


@dataclass(frozen=True)
class StepReads:
    """One step of one worker: the positions that each micro-batch reads, and the number of them that count."""

    interval: Interval
    parts: list[Positions]
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
) -> Generator[list[Batch]]:
    """Yield the micro-batches of each step, read one after another: see `read_in_processes`."""
    while True:
        clock.wait_for_room()
        step = next(steps, None)
        if step is None:
            return
        yield finish_step(reader, step, [reader.read(part) for part in step.parts], device, clock)


def read_in_threads(
    reader: PartReader, steps: Iterator[StepReads], device: torch.device, clock: ReadingClock, num_threads: int
) -> Generator[list[Batch]]:
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

        def begin(part: Positions) -> Future[ReadPart]:
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
                yield finish_step(reader, step, [future.result() for future in futures], device, clock)
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


def finish_step(
    reader: PartReader, step: StepReads, read: list[ReadPart], device: torch.device, clock: ReadingClock
) -> list[Batch]:
    """Return the micro-batches of a step that was read, and note their times and bad samples."""
    for part in read:
        clock.add(part.times)
        if part.found:
            reader.bad_samples.note(part.found)
    with clock.timing("collate"):
        return step.make_batches(read, device)
