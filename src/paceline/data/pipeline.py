"""Stages in which samples are read: fetch, decode, augment and collate; their times, and a limit in bytes."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from paceline.data.augment.augmenter import Augmenter
from paceline.data.bad_samples import BadSampleCount, FoundBadSample, GoodSamples, read_good
from paceline.data.base import Source
from paceline.data.batch import Batch, list_tensors, select
from paceline.data.order import GlobalOrder, Interval
from paceline.data.orders import Indices
from paceline.data.permutation import derive_seed
from paceline.errors import BadSample, SettingsError
from paceline.registry import check_whole

STAGES = ("fetch", "decode", "augment", "collate")
"""Stages, in their order."""
MAX_READERS = 8
"""Largest number of threads or processes that ``auto`` chooses: all workers must know how far any may read ahead."""
READ_AHEAD_BYTES = 2**28
_NUM_RECENT = 16
"""Steps of which the typical time is taken."""
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

    part: Interval
    wide: Interval
    """Positions to read: those of the part, with partners for mixing."""
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
        self._order, self._augmenter = order, augmenter

    @property
    def has_fetch(self) -> bool:
        """Whether fetching samples is a stage of its own."""
        return has_fetch(self.source)

    @property
    def draws_globally(self) -> bool:
        """Whether augmentation may draw from the global random generators."""
        return self._augmenter is not None and self._augmenter.draws_globally

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may read at once."""
        return self.source.is_thread_safe and (self._augmenter is None or self._augmenter.is_thread_safe)

    def read(self, part: Interval, *, seeded: bool = False) -> ReadPart:
        """Return the micro-batch of a part.

        Args:
            part: Positions of the micro-batch.
            seeded: Whether the global random generators are this process's own, to be seeded for each sample.
        """
        plan = self.plan(part)
        seeds = [derive_seed(self._order.seed, position) for position in range(*plan.wide)] if seeded else None
        return self.finish(plan, [self.decode(self.fetch(plan.indices), seeds)], seeds)

    def plan(self, part: Interval, num_slices: int = 1) -> PlannedPart:
        """Return what to read for a part.

        Args:
            part: Positions of the micro-batch.
            num_slices: Number of slices, where the source decodes samples and not batches; else there is one.
        """
        wide = part if self._augmenter is None else self._augmenter.widen(part)
        indices = self._order.samples_at(wide)
        number = max(1, min(num_slices, len(indices))) if self.source.decodes_samples else 1
        return PlannedPart(part, wide, indices, np.array_split(indices, number))

    def fetch(self, indices: Indices) -> Fetched:
        """Return the samples at some indices, fetched."""
        began_s, samples, is_bad = time.perf_counter(), None, False
        try:
            samples = self.source.fetch(indices)
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
                plan.part,
                plan.wide,
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
        num_lost = 0 if kept is None else plan.part.num_samples - len(kept)
        return ReadPart(data, times, num_lost, () if good is None else good.found)

    def _read_good(self, plan: PlannedPart, seeds: Sequence[int] | None) -> GoodSamples:
        """Return a part's samples without the bad ones.

        Where samples are augmented, or replaced, bad ones have a neighbour in their place.
        """
        replaces = self._augmenter is not None or not self.bad_samples.skips
        return read_good(self.source, plan.indices, seeds, replaces=replaces)


def _drop(data: Any, plan: PlannedPart, kept: list[int]) -> tuple[Any, list[int]]:
    """Return a part's samples without the bad ones, or the first if there is no other; and the places that are left."""
    first, num_samples = plan.part.start - plan.wide.start, plan.part.num_samples
    left = [place - first for place in kept if 0 <= place - first < num_samples]
    return select(data, left or [0], num_samples), left


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
    """

    def __init__(self, limit_bytes: int = READ_AHEAD_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._ready_bytes = self._largest_bytes = 0
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

    def has_room(self, num_reading: int) -> bool:
        """Return whether one more step may be read, beside `num_reading` that are being read."""
        with self._changed:
            return self._has_room(num_reading)

    def wait_for_room(self) -> None:
        """Wait until a step may be read while none is; return at once after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_room(0))

    def put(self, step: list[Batch]) -> None:
        """Record that a step is ready."""
        size = _count_step(step)
        with self._changed:
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

    def reopen(self) -> None:
        """Begin anew to read ahead, with nothing ready."""
        with self._changed:
            self._is_closed, self._ready_bytes = False, 0

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
        if not self._largest_bytes:
            return num_reading == 0
        needed = self._ready_bytes + (num_reading + 1) * self._largest_bytes
        return needed <= self._limit_bytes or (num_reading == 0 and self._ready_bytes == 0)


def _count_step(step: list[Batch]) -> int:
    return sum(count_bytes(batch.on_host.data) for batch in step)


def has_fetch(source: Source) -> bool:
    """Return whether fetching a source's samples is a stage of its own."""
    return type(source).fetch is not Source.fetch


def count_bytes(data: Any) -> int:
    """Return the size of the tensors of some data."""
    return sum(tensor.nbytes for tensor in list_tensors(data))
