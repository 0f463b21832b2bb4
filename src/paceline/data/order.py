"""The global sample order: one per epoch, the same whatever the number of workers.

A *position* counts samples since the start of training: position p is the (p mod n)-th sample of epoch p // n.
Nothing about workers enters the order, so resuming, resizing and uneven shares cannot change what is learned from.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from paceline.data.orders import Arrangement, Full, Indices
from paceline.data.permutation import Words
from paceline.errors import CommunicationError, SettingsError

Tail = Literal["short", "drop", "join"]
_BLOCK = 1024
"""Positions whose samples are computed at once: many, since each computation has a price of its own."""
ENDLESS = 2**62
"""Number of samples of an order without end."""


class Interval(NamedTuple):
    """Positions start..stop-1 of the global order."""

    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        """Number of positions."""
        return self.stop - self.start


Positions = Interval | Indices
"""Positions that are read together: one after another, or those of a list."""


def list_positions(positions: Positions) -> Indices:
    """Return positions as an array."""
    return positions if isinstance(positions, np.ndarray) else np.arange(*positions, dtype=np.int64)


def count_positions(positions: Positions) -> int:
    """Return the number of positions."""
    return len(positions) if isinstance(positions, np.ndarray) else positions.num_samples


def join_positions(parts: Sequence[Positions]) -> list[Interval]:
    """Return the positions of some parts as intervals, in order, as few as they can be."""
    listed = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *map(list_positions, parts)]))
    runs = np.split(listed, np.flatnonzero(np.diff(listed) > 1) + 1)
    return [Interval(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]


class Era(NamedTuple):
    """Epochs of the same samples: from number `epoch` on, which begins at `position`."""

    epoch: int
    position: int
    arrangement: Arrangement

    @property
    def num_samples(self) -> int:
        """Number of samples of an epoch."""
        return self.arrangement.num_samples

    def epoch_of(self, position: int) -> int:
        """Return the epoch that `position` is in."""
        return self.epoch + (position - self.position) // self.num_samples

    def end_of_epoch(self, position: int) -> int:
        """Return the first position after the epoch that `position` is in."""
        return self.position + ((position - self.position) // self.num_samples + 1) * self.num_samples


def _position_of(era: Era) -> int:
    return era.position


class GlobalOrder:
    """The sample at each position.

    Each epoch has its own arrangement of the samples, computed when it is read, so that resuming in the middle of a
    data set of any size costs no time. Data may grow at the end of an epoch: the epochs after it are longer.

    Args:
        num_samples: Samples in the data set.
        seed: Random seed of all epochs.
        tail: Treatment of an epoch's last samples if they are too few for a full global batch: they make a ``short``
            one, they are dropped (``drop``), or the next epoch's first samples ``join`` them.
        arrangement: Arrangement of the samples of each epoch; by default all are in random order.

    Raises:
        SettingsError: There are no samples.
    """

    def __init__(
        self, num_samples: int, seed: int = 0, *, tail: Tail = "short", arrangement: Arrangement | None = None
    ) -> None:
        if num_samples < 1:
            raise SettingsError(f"num_samples must be at least 1, but got {num_samples}; the data set is empty")
        self.seed, self.tail = seed, tail
        self._block: tuple[int, Indices] = 0, np.zeros(0, dtype=np.int64)
        self._eras: tuple[Era, ...] = (Era(0, 0, arrangement or Full().arrange([num_samples], seed)),)

    @property
    def num_samples(self) -> int:
        """Number of samples of the newest epochs."""
        return self._eras[-1].num_samples

    @property
    def newest_start(self) -> int:
        """Position from which on epochs have the newest number of samples; 0 if data has not grown."""
        return self._eras[-1].position

    def __str__(self) -> str:
        arrangement = self._eras[-1].arrangement.describe()
        return f"GlobalOrder(num_samples={self.num_samples}, seed={self.seed}, tail={self.tail}, {arrangement})"

    def epoch_of(self, position: int) -> int:
        """Return the epoch that `position` is in, from 0."""
        return self._era_at(position).epoch_of(position)

    def start_of(self, epoch: int) -> int:
        """Return the position at which `epoch` begins."""
        era = [era for era in self._eras if era.epoch <= epoch][-1]
        return era.position + (epoch - era.epoch) * era.num_samples

    def grow(self, position: int, arrangement: Arrangement) -> int:
        """Let epochs have another arrangement, of more samples, from the first on that begins at `position` or later.

        Returns:
            Position at which that epoch begins.
        """
        era = self._era_at(max(0, position - 1))
        start = 0 if position <= 0 else era.end_of_epoch(position - 1)
        kept = tuple(older for older in self._eras if older.position < start)
        self._block = 0, np.zeros(0, dtype=np.int64)
        self._eras = (*kept, Era(era.epoch_of(start - 1) + 1 if start else 0, start, arrangement))
        return start

    def restore(self, eras: Sequence[Era]) -> None:
        """Take the epochs of a checkpoint."""
        self._block = 0, np.zeros(0, dtype=np.int64)
        self._eras = tuple(eras)

    def next_batch(self, position: int, global_batch: int) -> Interval:
        """Return the next global batch from `position` on."""
        if self.tail == "join":
            return Interval(position, position + global_batch)
        epoch_end = self._era_at(position).end_of_epoch(position)
        if self.tail == "drop" and epoch_end - position < global_batch:
            position, epoch_end = epoch_end, self._era_at(epoch_end).end_of_epoch(epoch_end)
        return Interval(position, min(position + global_batch, epoch_end))

    def batch_sizes(self, start: int, stop: int, global_batch: int) -> set[int]:
        """Return the sizes of the batches that cover the positions from `start` to `stop`."""
        sizes = set()
        for begin, end in [(start, stop)] if self.tail == "join" else self._list_alike(start, stop):
            num_whole, rest = divmod(end - begin, global_batch)
            is_dropped = self.tail == "drop" and end == self._era_at(end - 1).end_of_epoch(end - 1)
            sizes |= {global_batch} if num_whole else set()
            sizes |= {rest} if rest and not is_dropped else set()
        return sizes

    def position_of(self, step: int, global_batch: int, *, start: int = 0) -> int:
        """Return the position at which `step` begins, if step 0 begins at `start` and each takes a global batch."""
        if self.tail == "join":
            return start + step * global_batch
        for era, stop in self._eras_from(start):
            num_steps = self._count_between(era, start, stop, global_batch) if stop is not None else step + 1
            if stop is None or step < num_steps:
                break
            start, step = stop, step - num_steps
        epoch_end = era.end_of_epoch(start)
        num_left = self._count_steps(epoch_end - start, global_batch)
        if step < num_left:
            return start + step * global_batch
        epoch, rest = divmod(step - num_left, self._count_steps(era.num_samples, global_batch))
        return epoch_end + epoch * era.num_samples + rest * global_batch

    def step_of(self, position: int, global_batch: int, *, start: int = 0) -> int:
        """Return the number of steps, each of a global batch, from `start` to `position`."""
        if self.tail == "join":
            return (position - start) // global_batch
        num_steps = 0
        for era, stop in self._eras_from(start):
            if stop is None or position < stop:
                return num_steps + self._count_between(era, start, position, global_batch)
            num_steps += self._count_between(era, start, stop, global_batch)
            start = stop
        raise AssertionError("the last era has no end")

    def count_steps(self, num_epochs: int, global_batch: int) -> int:
        """Return the number of steps in `num_epochs` passes over the data set."""
        last = self.start_of(num_epochs)
        steps = self.step_of(last, global_batch)
        return steps if self.position_of(steps, global_batch) >= last else steps + 1

    def samples_at(self, positions: Positions) -> Indices:
        """Return the data set's indices of the samples at some positions."""
        if isinstance(positions, np.ndarray):
            interval = Interval(int(positions.min()), int(positions.max()) + 1)
            return self.samples_at(interval)[positions - interval.start]
        interval = positions
        parts, start = [np.zeros(0, dtype=np.int64)], interval.start
        while start < interval.stop:
            first, samples = self._find_block(start)
            part = samples[start - first : interval.stop - first]
            parts.append(part)
            start += len(part)
        return np.concatenate(parts)

    def _find_block(self, position: int) -> tuple[int, Indices]:
        """Return the samples of the part of an epoch that a position is in, and where it begins; the last is kept."""
        first, samples = self._block
        if not first <= position < first + len(samples):
            era = self._era_at(position)
            epoch = era.epoch_of(position)
            start = era.end_of_epoch(position) - era.num_samples
            first = position - (position - start) % _BLOCK
            stop = min(first + _BLOCK, start + era.num_samples)
            samples = era.arrangement.samples_at(epoch, np.arange(first - start, stop - start, dtype=np.uint64))
            self._block = first, samples
        return first, samples

    def epochs_at(self, positions: Positions) -> Indices:
        """Return the epoch of the sample at each position: in a mixture that of its own source."""
        if isinstance(positions, np.ndarray):
            interval = Interval(int(positions.min()), int(positions.max()) + 1)
            return self.epochs_at(interval)[positions - interval.start]
        interval = positions
        parts = [np.zeros(0, dtype=np.int64)]
        parts += [era.arrangement.epochs_at(epoch, places) for era, epoch, places in self._list_places(interval)]
        return np.concatenate(parts)

    def _list_places(self, interval: Interval) -> Iterator[tuple[Era, int, Words]]:
        """Yield the places of an interval in each of its epochs."""
        start = interval.start
        while start < interval.stop:
            era = self._era_at(start)
            epoch_end = era.end_of_epoch(start)
            stop = min(interval.stop, epoch_end)
            places = np.arange(start, stop, dtype=np.uint64) - np.uint64(epoch_end - era.num_samples)
            yield era, era.epoch_of(start), places
            start = stop

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint knows the order by, as JSON."""
        first = self._eras[0]
        eras = [[era.epoch, era.position, era.num_samples, era.arrangement.describe()] for era in self._eras[1:]]
        state = {"num_samples": first.num_samples, "seed": self.seed, "tail": self.tail}
        return state | {"order": first.arrangement.describe(), "eras": eras}

    def _era_at(self, position: int) -> Era:
        eras = self._eras
        return eras[0] if len(eras) == 1 else eras[bisect_right(eras, position, key=_position_of) - 1]

    def _eras_from(self, start: int) -> list[tuple[Era, int | None]]:
        """Return the era of `start` and those after it, each with the position at which the next one begins."""
        eras = self._eras
        stops = [*(era.position for era in eras[1:]), None]
        return [(era, stop) for era, stop in zip(eras, stops, strict=True) if stop is None or start < stop]

    def _list_alike(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return parts of epochs between two positions that have batches of all sizes that there are."""
        parts = []
        for era, era_end in self._eras_from(start):
            end = stop if era_end is None else min(stop, era_end)
            if start >= end:
                break
            epoch_end = era.end_of_epoch(start)
            if end <= epoch_end:
                parts.append((start, end))
            else:  # one whole epoch is like all others
                last = era.end_of_epoch(end) - era.num_samples
                whole = (epoch_end, min(last, epoch_end + era.num_samples))
                parts += [part for part in ((start, epoch_end), whole, (last, end)) if part[0] < part[1]]
            start = end
        return parts

    def _count_between(self, era: Era, start: int, position: int, global_batch: int) -> int:
        """Return the number of steps from `start` to `position`, both in one era."""
        epoch_end = era.end_of_epoch(start)
        num_left = self._count_steps(epoch_end - start, global_batch)
        if position < epoch_end:
            return min((position - start) // global_batch, num_left)
        epoch, rest = divmod(position - epoch_end, era.num_samples)
        per_epoch = self._count_steps(era.num_samples, global_batch)
        return num_left + epoch * per_epoch + min(rest // global_batch, per_epoch)

    def _count_steps(self, num_samples: int, global_batch: int) -> int:
        """Return the number of steps in the rest of an epoch."""
        return num_samples // global_batch if self.tail == "drop" else -(-num_samples // global_batch)


def apportion(num_samples: int, weights: Sequence[float]) -> list[int]:
    """Divide `num_samples` into whole shares, as close to the `weights` as possible (largest remainder).

    Shares add up exactly; ties go to the lower rank. With fewer samples than workers some shares are 0.
    """
    total = sum(weights)
    exact = [num_samples * weight / total for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (shares[rank] - exact[rank], rank))
    for rank in by_remainder[: num_samples - sum(shares)]:
        shares[rank] += 1
    return shares


def choose_tail(*, drop_last: bool, join_epochs: bool) -> Tail:
    """Return the treatment of an epoch's last samples.

    Raises:
        SettingsError: Both are true.
    """
    if drop_last and join_epochs:
        raise SettingsError("drop_last and join_epochs must not both be true; leave one of them out")
    return "drop" if drop_last else "join" if join_epochs else "short"


class Dispatcher(Protocol):
    """Interface through which a worker that runs at its own pace claims positions."""

    @property
    def is_stopping(self) -> bool:
        """Whether `claim` returned None because some worker was asked to stop."""

    @property
    def lost(self) -> CommunicationError | None:
        """Error of a worker that is lost, so that the others stop after their present step; None while none is."""

    def set_source(self, claim_next: Callable[[int], tuple[int, int]], mark_used: Callable[[int, int], None]) -> None:
        """Set the source of positions: `claim_next` returns the next ones, `mark_used` is told which were used."""

    def set_boundary(self, position: int) -> None:
        """Hand out no positions from `position` on; every worker calls it, after the previous boundary was reached."""

    def claim(self, num_samples: int) -> tuple[int, int] | None:
        """Return start and stop of the next unclaimed positions; None where all workers synchronise."""

    def ack(self, interval: tuple[int, int]) -> bool:
        """Record that claimed positions were used; False if they do not count, and are handed out again."""


@dataclass
class Ledger:
    """The positions that were handed out, and those that were used.

    `low_water` is the position below which every sample has been used; `done_above` holds intervals above it that were
    used out of order. A checkpoint keeps both: all other claimed positions are claimed again after a restart, so no
    sample is lost and none is used twice. If all workers step together the state is one integer.
    """

    low_water: int = 0
    done_above: list[Interval] = field(default_factory=list)
    next_claim: int = field(init=False)
    _dropped: dict[int, int] = field(init=False, default_factory=dict)
    """Dropped ends of epochs, by their first position; they count as used once the positions after them are."""

    def __post_init__(self) -> None:
        self.next_claim = self.low_water

    def claim(self, order: GlobalOrder, global_batch: int | Callable[[int], int]) -> Interval:
        """Hand out the next unclaimed global batch.

        Args:
            order: Global order of the positions.
            global_batch: Size of the batch, or a function from the position at which it begins to its size.
        """
        while (interval := self._find_next(order, global_batch)).start > self.next_claim:
            self._dropped[self.next_claim] = interval.start
            self.next_claim = interval.start
        stops = [done.start for done in self.done_above if interval.start < done.start < interval.stop]
        interval = Interval(interval.start, min(stops, default=interval.stop))
        self.next_claim = interval.stop
        return interval

    def _find_next(self, order: GlobalOrder, global_batch: int | Callable[[int], int]) -> Interval:
        self.next_claim = max(self.next_claim, self.low_water)  # the low-water mark may be ahead
        for done in sorted(self.done_above):
            if done.start <= self.next_claim < done.stop:
                self.next_claim = done.stop
        size = global_batch if isinstance(global_batch, int) else global_batch(self.next_claim)
        return order.next_batch(self.next_claim, size)

    def ack(self, interval: Interval) -> None:
        """Note that every sample of a claimed `interval` has been used.

        Raises:
            SettingsError: The interval was never claimed, or was acknowledged before.
        """
        overlaps = any(done.start < interval.stop and interval.start < done.stop for done in self.done_above)
        if interval.start < self.low_water or interval.stop > self.next_claim or overlaps:
            raise SettingsError(
                f"an acknowledged interval must be claimed and not yet used, but got {tuple(interval)} with "
                f"low water {self.low_water} and next claim {self.next_claim}; acknowledge each batch once"
            )
        self.done_above = sorted([*self.done_above, interval])
        while self.done_above and self.done_above[0].start <= self._dropped.get(self.low_water, self.low_water):
            self.low_water = max(self._dropped.pop(self.low_water, 0), self.done_above.pop(0).stop)

    @classmethod
    def of_used(cls, position: int, used: Iterable[Sequence[int]]) -> "Ledger":
        """Return the ledger of samples that were used: those before a position, and sorted ranges."""
        above = []
        for start, stop in used:
            if start <= position:
                position = max(position, stop)
            else:
                above.append(Interval(start, stop))
        return cls(position, above)

    def list_gaps(self) -> list[Interval]:
        """Return positions that are not used, and are followed by used ones."""
        starts = [self.low_water, *(done.stop for done in self.done_above)]
        return [Interval(start, done.start) for start, done in zip(starts, self.done_above, strict=False)]

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint, as JSON."""
        return {"low_water": self.low_water, "done_above": [list(done) for done in self.done_above]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Ledger":
        """Return the ledger of a checkpoint."""
        return cls(int(state["low_water"]), [Interval(*done) for done in state["done_above"]])
