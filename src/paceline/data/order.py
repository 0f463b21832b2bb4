"""The global sample order: one per epoch, the same whatever the number of workers.

A *position* counts samples since the start of training: position p is the (p mod n)-th sample of epoch p // n.
Nothing about workers enters the order, so resuming, resizing and uneven shares cannot change what is learned from.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from paceline.errors import SettingsError

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]
_Words = np.ndarray[tuple[int], np.dtype[np.uint64]]


Tail = Literal["short", "drop", "join"]
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


@dataclass(frozen=True)
class GlobalOrder:
    """The sample at each position.

    Each epoch is its own permutation, computed when it is read (a Feistel network over the index bits,
    walked until it lands inside the epoch: Black and Rogaway 2002), so that a data set of any size costs no memory and
    resuming in its middle costs no time.

    Args:
        num_samples: Samples in the data set.
        seed: Random seed of all epochs.
        shuffle: Whether each epoch has its own random order; if not, every epoch has the data set's order.
        tail: Treatment of an epoch's last samples if they are too few for a full global batch: they make a ``short``
            one, they are dropped (``drop``), or the next epoch's first samples ``join`` them.
    """

    num_samples: int
    seed: int = 0
    shuffle: bool = True
    tail: Tail = "short"

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise SettingsError(f"num_samples must be at least 1, but got {self.num_samples}; the data set is empty")

    def epoch_of(self, position: int) -> int:
        """Return the epoch that `position` is in, from 0."""
        return position // self.num_samples

    def next_batch(self, position: int, global_batch: int) -> Interval:
        """Return the next global batch from `position` on."""
        epoch_end = (self.epoch_of(position) + 1) * self.num_samples
        if self.tail == "join":
            return Interval(position, position + global_batch)
        if self.tail == "drop" and epoch_end - position < global_batch:
            position, epoch_end = epoch_end, epoch_end + self.num_samples
        return Interval(position, min(position + global_batch, epoch_end))

    def batch_sizes(self, start: int, stop: int, global_batch: int) -> set[int]:
        """Return the sizes of the batches that cover the positions from `start` to `stop`."""
        epoch_end = (self.epoch_of(start) + 1) * self.num_samples
        if self.tail == "join" or stop <= epoch_end:
            parts = [(start, stop)]
        else:  # one whole epoch is like all others
            last = self.epoch_of(stop) * self.num_samples
            parts = [(start, epoch_end), (epoch_end, min(last, epoch_end + self.num_samples)), (last, stop)]
        sizes = set()
        for begin, end in parts:
            num_whole, rest = divmod(end - begin, global_batch)
            is_dropped = self.tail == "drop" and end % self.num_samples == 0
            sizes |= {global_batch} if num_whole else set()
            sizes |= {rest} if rest and not is_dropped else set()
        return sizes

    def position_of(self, step: int, global_batch: int, *, start: int = 0) -> int:
        """Return the position at which `step` begins, if step 0 begins at `start` and each takes a global batch."""
        if self.tail == "join":
            return start + step * global_batch
        epoch_end = (self.epoch_of(start) + 1) * self.num_samples
        num_left = self._count_steps(epoch_end - start, global_batch)
        if step < num_left:
            return start + step * global_batch
        epoch, rest = divmod(step - num_left, self._count_steps(self.num_samples, global_batch))
        return epoch_end + epoch * self.num_samples + rest * global_batch

    def step_of(self, position: int, global_batch: int, *, start: int = 0) -> int:
        """Return the number of steps, each of a global batch, from `start` to `position`."""
        if self.tail == "join":
            return (position - start) // global_batch
        epoch_end = (self.epoch_of(start) + 1) * self.num_samples
        num_left = self._count_steps(epoch_end - start, global_batch)
        if position < epoch_end:
            return min((position - start) // global_batch, num_left)
        epoch, rest = divmod(position - epoch_end, self.num_samples)
        per_epoch = self._count_steps(self.num_samples, global_batch)
        return num_left + epoch * per_epoch + min(rest // global_batch, per_epoch)

    def count_steps(self, num_epochs: int, global_batch: int) -> int:
        """Return the number of steps in `num_epochs` passes over the data set."""
        last = num_epochs * self.num_samples
        steps = self.step_of(last, global_batch)
        return steps if self.position_of(steps, global_batch) >= last else steps + 1

    def _count_steps(self, num_samples: int, global_batch: int) -> int:
        """Return the number of steps in the rest of an epoch."""
        return num_samples // global_batch if self.tail == "drop" else -(-num_samples // global_batch)

    def samples_at(self, interval: Interval) -> Indices:
        """Return the data set's indices of the samples at the positions of `interval`."""
        parts = [np.zeros(0, dtype=np.int64)]
        start = interval.start
        while start < interval.stop:
            epoch = self.epoch_of(start)
            stop = min(interval.stop, (epoch + 1) * self.num_samples)
            places = np.arange(start, stop, dtype=np.uint64) - np.uint64(epoch * self.num_samples)
            if self.shuffle:
                places = _permute(places, self.num_samples, _mix_int(self.seed, epoch))
            parts.append(places.astype(np.int64))
            start = stop
        return np.concatenate(parts)


class Dispatcher(Protocol):
    """Interface through which a worker that runs at its own pace claims positions."""

    @property
    def is_stopping(self) -> bool:
        """Whether `claim` returned None because some worker was asked to stop."""

    @property
    def lost(self) -> str:
        """Words on a worker that is lost, so that the others stop after their present step; empty while none is."""

    def set_source(self, claim_next: Callable[[int], tuple[int, int]], mark_used: Callable[[int, int], None]) -> None:
        """Set the source of positions: `claim_next` returns the next ones, `mark_used` is told which were used."""

    def set_boundary(self, position: int) -> None:
        """Hand out no positions from `position` on; every worker calls it, after the previous boundary was reached."""

    def claim(self, num_samples: int) -> tuple[int, int] | None:
        """Return start and stop of the next unclaimed positions; None where all workers synchronise."""

    def ack(self, interval: tuple[int, int]) -> bool:
        """Record that claimed positions were used; False if they do not count, and are handed out again."""


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


_NUM_ROUNDS = 6


def _permute(places: _Words, size: int, key: int) -> _Words:
    """Return the image of each of `places` under the permutation of 0..size-1 with that `key`."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    keys = [np.uint64(_mix_int(key, number)) for number in range(_NUM_ROUNDS)]
    result = places.copy()
    outside = np.arange(len(places))
    while len(outside):
        left, right = result[outside] >> shift, result[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        result[outside] = (left << shift) | right
        outside = outside[result[outside] >= size]
    return result


def _mix(words: _Words) -> _Words:
    """Return a hash of each word (the finalizer of SplitMix64, Steele 2014); products wrap."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mix_int(*numbers: int) -> int:
    """Return one 64-bit hash of all `numbers`."""
    state = 0
    for number in numbers:
        word = np.array([(state ^ (number & _WORD)) + 0x9E3779B97F4A7C15 & _WORD], dtype=np.uint64)
        state = int(_mix(word)[0])
    return state


_WORD = (1 << 64) - 1
derive_seed = _mix_int
"""One 64-bit seed from several numbers, such as (seed, step, worker)."""
