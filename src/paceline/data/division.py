"""Division of the global order into steps, and of each step among workers."""

import math
import threading
from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from paceline.data.batch import Batch
from paceline.data.length_groups import LengthGroups
from paceline.data.order import (
    ENDLESS,
    Dispatcher,
    GlobalOrder,
    Interval,
    Ledger,
    Positions,
    apportion,
    count_positions,
    join_positions,
)
from paceline.data.pipeline import StepReads
from paceline.errors import SettingsError
from paceline.registry import check_whole


class Stretch(NamedTuple):
    """Steps that take the same global batch: from `step` on, which begins at `position`."""

    step: int
    position: int
    batch: int


class Batches:
    """Global batch of each step, as stretches of the global order.

    A loader's background thread reads it while the training changes it.

    Args:
        order: Global order, which is cut into batches.
        first: Global batch of step 0.
        changes: Pairs of a step and the global batch from that step on, by ascending step.
    """

    def __init__(self, order: GlobalOrder, first: int, changes: Sequence[tuple[int, int]] = ()) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._planned = [(0, first), *changes]
        self._stretches = self._lay_out(0, 0)

    @property
    def first(self) -> int:
        """Global batch of step 0."""
        return self._planned[0][1]

    @property
    def newest(self) -> int:
        """Global batch of the last stretch."""
        with self._lock:
            return self._stretches[-1].batch

    def at(self, position: int) -> int:
        """Return the global batch of the step that begins at `position`."""
        with self._lock:
            return self._find(position).batch

    def rest_at(self, position: int) -> int:
        """Return the number of samples from `position` to the end of its step, at most a global batch.

        It is less than one inside a step of which workers at their own pace have used what comes before.
        """
        return min(self.at(position), self.position_of(self.step_of(position) + 1) - position)

    def step_of(self, position: int) -> int:
        """Return the number of steps done at `position`."""
        with self._lock:
            stretch = self._find(position)
        return stretch.step + self._order.step_of(position, stretch.batch, start=stretch.position)

    def position_of(self, step: int) -> int:
        """Return the position at which `step` begins."""
        with self._lock:
            stretch = self._stretches[bisect_right(self._stretches, step, key=lambda one: one.step) - 1]
        return self._order.position_of(step - stretch.step, stretch.batch, start=stretch.position)

    def change(self, position: int, batch: int) -> None:
        """Let steps take `batch` samples from `position` on, where a step begins; later planned changes are dropped."""
        step = self.step_of(position)
        with self._lock:
            kept = [stretch for stretch in self._stretches if stretch.position < position]
            self._stretches = [*kept, Stretch(step, position, batch)]

    def resume(self, step: int, position: int) -> None:
        """Continue as planned, with `step` at `position`."""
        with self._lock:
            self._stretches = self._lay_out(step, position)

    def follow_order(self, position: int) -> None:
        """Move planned changes after `position`, from which on epochs have more samples, to where their steps begin."""
        with self._lock:
            stretches = [stretch for stretch in self._stretches if stretch.position <= position]
            for stretch in self._stretches[len(stretches) :]:
                self._append(stretches, stretch.step, stretch.batch)
            self._stretches = stretches

    def state(self, position: int) -> list[list[int]]:
        """Return the stretch that `position` is in, cut to begin there, and those that follow, as JSON."""
        here = Stretch(self.step_of(position), position, self.at(position))
        with self._lock:
            return [list(here), *(list(stretch) for stretch in self._stretches if stretch.position > position)]

    def load(self, state: Sequence[Sequence[int]]) -> None:
        """Load a saved state."""
        with self._lock:
            self._stretches = [Stretch(*stretch) for stretch in state]

    def _lay_out(self, step: int, position: int) -> list[Stretch]:
        batch = [batch for start, batch in self._planned if start <= step][-1]
        stretches = [Stretch(step, position, batch)]
        for start, batch in self._planned:
            if start > step:
                self._append(stretches, start, batch)
        return stretches

    def _append(self, stretches: list[Stretch], step: int, batch: int) -> None:
        last = stretches[-1]
        # From the end of the step before: by the new batch, the rest of an epoch is dropped or not.
        before = self._order.position_of(step - last.step - 1, last.batch, start=last.position)
        stretches.append(Stretch(step, self._order.next_batch(before, last.batch).stop, batch))

    def _find(self, position: int) -> Stretch:
        number = bisect_right(self._stretches, position, key=lambda stretch: stretch.position)
        return self._stretches[max(0, number - 1)]


class Ending:
    """End of the data: after a number of epochs or steps, both counted from the beginning of training, or never.

    Args:
        order: Global order.
        batches: Global batch of each step.
        num_epochs: Epochs after which the data ends; None for no end.
        num_steps: Steps after which the data ends; None for no end.
    """

    def __init__(self, order: GlobalOrder, batches: Batches, num_epochs: int | None, num_steps: int | None) -> None:
        num_epochs = num_epochs if num_epochs is None else check_whole("num_epochs", num_epochs, 1)
        num_steps = num_steps if num_steps is None else check_whole("num_steps", num_steps, 1)
        self._order, self._batches, self._num_steps = order, batches, num_steps
        self._num_epochs = num_epochs

    @property
    def position(self) -> int | None:
        """Position at which the last epoch ends; None if there is no last one."""
        return None if self._num_epochs is None else self._order.start_of(self._num_epochs)

    @property
    def step(self) -> int | None:
        """Step before which the data ends, by the currently planned batches."""
        ends = [self._num_steps] if self._num_steps is not None else []
        if (position := self.position) is not None:
            step = self._batches.step_of(position)
            ends.append(step if self._batches.position_of(step) >= position else step + 1)
        return min(ends, default=None)

    def find(self, position: int) -> int:
        """Return the position where data ends; if it never does two epochs on, if nobody knows (a stream) a batch."""
        if self._order.num_samples == ENDLESS:
            return position + self._batches.at(position)
        if self.step is None:
            return self._order.start_of(self._order.epoch_of(position) + 2)
        end = self._batches.position_of(self.step)
        return end if self.position is None else min(end, self.position)

    def is_reached(self, position: int) -> bool:
        """Return whether no step begins at `position`, or after the samples that are dropped there."""
        if self._num_steps is not None and self._batches.step_of(position) >= self._num_steps:
            return True
        if self.position is None:
            return False
        return self._order.next_batch(position, self._batches.at(position)).start >= self.position


class Shares:
    """Shares of a global batch: one non-negative weight per worker, which may change at a position of the global order.

    A loader's background thread reads it while the training changes it.

    Args:
        weights: Weights at the start; None for even ones.
        num_workers: Number of workers.

    Raises:
        SettingsError: See `check_shares`.
    """

    def __init__(self, weights: Sequence[float] | None, num_workers: int) -> None:
        self._num_workers = num_workers
        self._lock = threading.Lock()
        self._changes: list[tuple[int, list[float]]] = [(0, check_shares(weights, num_workers))]

    @property
    def newest(self) -> list[float]:
        """Latest weights, even if they are not in force yet."""
        return self._changes[-1][1]

    def at(self, position: int) -> list[float]:
        """Return the weights of the global batch that begins at `position`."""
        with self._lock:
            return self._since(position)[0][1]

    def change(self, start: int, weights: Sequence[float], *, position: int) -> None:
        """Divide global batches from `start` on by other weights; no later request is below `position`.

        Raises:
            SettingsError: See `check_shares`.
        """
        checked = check_shares(weights, self._num_workers)
        with self._lock:
            self._changes = [change for change in self._since(position) if change[0] < start] + [(start, checked)]

    def state(self, position: int) -> list[list[Any]]:
        """Return the weights at `position`, and those that follow, as JSON."""
        with self._lock:
            return [[start, weights] for start, weights in self._since(position)]

    def load(self, state: Sequence[Sequence[Any]]) -> bool:
        """Load a saved state, if it is of the same number of workers; return whether it is."""
        if len(state[0][1]) != self._num_workers:
            return False
        with self._lock:
            self._changes = [(start, check_shares(weights, self._num_workers)) for start, weights in state]
            self._changes[0] = (0, self._changes[0][1])
        return True

    def _since(self, position: int) -> list[tuple[int, list[float]]]:
        number = max(number for number, (start, _) in enumerate(self._changes) if start <= position)
        return self._changes[number:]


class MicroBatches:
    """Division of workers' shares of global batches into micro-batches.

    Args:
        batches: Global batches.
        shares: Each worker's share of them.
        rank: This worker's rank.
        num_micro_batches: Micro-batches per share.
        adds: Whether a larger global batch has more micro-batches, each as large as at first.
        groups: Groups of similar length that samples are dealt to; None to take them in their order.
    """

    def __init__(
        self,
        batches: Batches,
        shares: Shares,
        rank: int,
        num_micro_batches: int,
        *,
        adds: bool,
        groups: LengthGroups | None = None,
    ) -> None:
        self._batches, self._shares, self._rank, self._groups = batches, shares, rank, groups
        self.num_parts = num_micro_batches
        """Micro-batches per share of a global batch of the first size."""
        self.adds = adds

    def begin(self, batch: Batch) -> None:
        """Do nothing before `batch` is used: the caller seeds random numbers."""

    def count(self, position: int) -> int:
        """Return the number of micro-batches per share in the step that begins at `position`."""
        if not self.adds:
            return self.num_parts
        return self.num_parts * max(1, -(-self._batches.at(position) // self._batches.first))

    def divide(self, share: int, position: int) -> list[int]:
        """Return the sizes of a share's micro-batches in the step that begins at `position`."""
        return apportion(share, [1.0] * self.count(position))

    def cut(self, interval: Interval, *, is_all_mine: bool = False) -> StepReads:
        """Cut this worker's share of an interval, or all of it, into micro-batches."""
        if is_all_mine:
            mine = self._deal(interval, [1.0])[0]
        else:
            mine = self._deal(interval, self._shares.at(interval.start))[self._rank]
        # An empty share borrows the batch's first sample: see Batch.num_samples.
        borrowed = Interval(interval.start, interval.start + 1)
        counts = [count_positions(part) for part in mine]
        return StepReads(interval, [part if count_positions(part) else borrowed for part in mine], counts)

    def list_used(self, interval: Interval, ranks: Container[int]) -> list[Interval]:
        """Return the positions of an interval that some ranks take, in order."""
        parts = [
            part
            for rank, mine in enumerate(self._deal(interval, self._shares.at(interval.start)))
            for part in mine
            if rank in ranks
        ]
        return join_positions([part for part in parts if count_positions(part)])

    def _deal(self, interval: Interval, weights: Sequence[float]) -> list[list[Positions]]:
        """Return the micro-batches of each worker in an interval."""
        if self._groups is not None:
            # One after another over the workers, so that all are at micro-batches of similar lengths.
            groups = self._groups.divide(interval, list(weights) * self.count(interval.start))
            return [list(groups[rank :: len(weights)]) for rank in range(len(weights))]
        dealt: list[list[Positions]] = []
        start = interval.start
        for share in apportion(interval.num_samples, weights):
            ends = accumulate(self.divide(share, interval.start), initial=start)
            dealt.append([Interval(*part) for part in pairwise(ends)])
            start += share
        return dealt

    def list_sizes(self, order: GlobalOrder, position: int, end: int) -> tuple[set[int], set[int]]:
        """Return the sizes of micro-batches between two positions: of a worker's own, and of those of all workers.

        Empty ones are omitted.
        """
        own: set[int] = set()
        joint: set[int] = set()
        stretches = [(start, batch) for _, start, batch in self._batches.state(position) if start < end]
        for (start, batch), (stop, _) in pairwise([*stretches, (end, 0)]):
            for size in order.batch_sizes(start, stop, batch):
                divided = [self.divide(share, start) for share in apportion(size, self._shares.at(start))]
                own.update(count for counts in divided for count in counts)
                joint.update(sum(counts) for counts in zip(*divided, strict=True))
        if self._groups is not None:  # a long sample may be alone
            own |= {1}
        return own - {0}, joint - {0}


def find_progress(
    order: GlobalOrder, batches: Batches, micro_batches: MicroBatches, num_steps: Mapping[int, int]
) -> tuple[int, list[Interval]]:
    """Return the position below which all samples count as used, and the intervals above it that were used.

    Steps that all workers of `num_steps` have done count as used. Of a later step that some have done, their shares do;
    the others' shares will be used, and so will those of ranks that are not in `num_steps`.

    Args:
        order: Global order.
        batches: Global batch of each step.
        micro_batches: Division of steps among the workers.
        num_steps: Number of steps done, by rank.
    """
    first, done = min(num_steps.values()), []
    for step in range(first, max(num_steps.values())):
        start = batches.position_of(step)
        batch = order.next_batch(start, batches.at(start))
        done += micro_batches.list_used(batch, [rank for rank, number in num_steps.items() if number > step])
    return batches.position_of(first), done


def check_shares(shares: Sequence[float] | None, num_workers: int) -> list[float]:
    """Return the weights of all workers.

    Raises:
        SettingsError: There are too few or too many, one is negative or not finite, or all are 0.
    """
    weights = [1.0] * num_workers if shares is None else [float(weight) for weight in shares]
    if len(weights) != num_workers or not min(weights) >= 0 or not 0 < sum(weights) < math.inf:
        raise SettingsError(
            f"shares must be {num_workers} weights (one per worker), none negative and not all 0, but got {shares}"
        )
    return weights


def check_batch(global_batch: int | None, num_workers: int, order: GlobalOrder) -> int:
    """Return a size of the global batch.

    Raises:
        SettingsError: There is none, or it does not fit the workers or the data set.
    """
    if global_batch is None:
        raise SettingsError("global_batch must be given, the number of samples per step over all workers")
    checked = check_whole("global_batch", global_batch, 1)
    if checked < num_workers:
        raise SettingsError(
            f"global_batch must be at least the number of workers, but got {checked} for {num_workers} workers; raise "
            "global_batch or start fewer workers"
        )
    if order.tail == "drop" and checked > order.num_samples:
        raise SettingsError(
            f"global_batch must be at most the data set's {order.num_samples} samples with drop_last, or nothing is "
            f"left, but got {checked}; lower it, or leave drop_last out"
        )
    return checked


def plan_steps(
    ledger: Ledger,
    order: GlobalOrder,
    batches: Batches,
    micro_batches: MicroBatches,
    ending: Ending,
    dispatcher: Dispatcher | None,
    claim_size: int,
) -> Iterator[StepReads]:
    """Yield this worker's part of each step, claimed when it is asked for; or positions that a dispatcher hands out."""
    while dispatcher is None and not ending.is_reached(ledger.next_claim):
        interval = ledger.claim(order, batches.rest_at)
        last = ending.position  # data may have grown since
        if last is not None and last < interval.stop:  # no next epoch to join
            interval = Interval(interval.start, last)
        yield micro_batches.cut(interval)
    while dispatcher is not None and (claimed := dispatcher.claim(claim_size)) is not None:
        yield micro_batches.cut(Interval(*claimed), is_all_mine=True)
