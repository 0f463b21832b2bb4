"""Plan of a loader's steps: the samples of each, as far as batches and shares are known."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from paceline.comm.group import Group
from paceline.data.augment.augmenter import Augmenter
from paceline.data.bad_samples import BadSampleCount, BadSamples, FoundBadSample
from paceline.data.content import describe_content
from paceline.data.division import Batches, Ending, Shares, check_batch, find_progress
from paceline.data.growth import agree_on_shards
from paceline.data.length_groups import open_groups
from paceline.data.open_dataset import OpenDataset
from paceline.data.order import ENDLESS, Interval, Ledger, apportion
from paceline.data.pipeline import ReadSettings
from paceline.data.read_ahead import ReadingClock, ReadTimes
from paceline.data.step_reader import StepReader
from paceline.data.virtual_workers import divide_steps
from paceline.errors import SettingsError

FAR = 2**40
"""A step that no training reaches."""


class StepPlan:
    """Plan of the steps of a loader, and its progress in it: see `Loader` for the arguments."""

    def __init__(
        self,
        dataset: OpenDataset,
        group: Group,
        *,
        global_batch: int | None,
        changes: Sequence[tuple[int, int]],
        shares: Sequence[float] | None,
        num_epochs: int | None,
        num_steps: int | None,
        num_micro_batches: int,
        num_virtual_workers: int | None,
        adds_micro_batches: bool,
        bad_samples: BadSamples,
        settings: ReadSettings,
        augment: Sequence[Any],
        group_by_length: bool,
        lengths: Sequence[int] | None,
    ) -> None:
        self._dataset, self._group, self._num_workers = dataset, group, group.size
        self._shares = Shares(shares, group.size)
        self._stream, self.order = dataset.stream, dataset.order
        self._first_batch = check_batch(global_batch, group.size, self.order)
        changes = [(step, check_batch(batch, group.size, self.order)) for step, batch in changes]
        self._batches = Batches(self.order, self._first_batch, changes)
        self._ending = Ending(self.order, self._batches, num_epochs, num_steps)
        self._ends_unknown = self._stream is not None and num_epochs is not None
        augmenter = self._open_augmenter(augment)
        bad_samples_met = BadSampleCount(bad_samples)
        groups = open_groups(
            self.order,
            dataset.source,
            lengths,
            group_by_length=group_by_length,
            is_bad_fatal=bad_samples_met.is_fatal,
        )
        if groups is not None and (dataset.grows or (augmenter is not None and augmenter.mixes)):
            found = (
                "data that grows, whose new lengths are unknown"
                if dataset.grows
                else ("augment that mixes samples beside each other in the order")
            )
            raise SettingsError(f"group_by_length must be false with {found}; leave one of them out")
        self._micro_batches = divide_steps(
            self._batches,
            self._shares,
            group.rank,
            num_micro_batches,
            num_virtual_workers,
            adds_micro_batches,
            self.order.seed,
            groups,
        )
        self.num_micro_batches = self._micro_batches.num_parts
        self._reader = StepReader(
            dataset,
            self._batches,
            self._micro_batches,
            self._ending,
            group,
            bad_samples_met,
            settings,
            augmenter,
            claim_size=max(1, round(self._first_batch / group.size)),
        )
        self._ledger = Ledger()
        steps_ahead = dataset.source.steps_ahead if dataset.source is not None else None
        self._clock = ReadingClock(settings.read_ahead_bytes, steps_ahead)

    def _open_augmenter(self, augment: Sequence[Any]) -> Augmenter | None:
        if not augment:
            return None
        if self._dataset.source is None:
            raise SettingsError(
                f"augment must be left out for an iterable data set, whose samples have no index, but got {augment}; "
                "augment in the data set itself, or write one with __len__ and __getitem__"
            )
        return Augmenter(augment, self.order, self._dataset.source.spec)

    def take_read_times(self) -> ReadTimes:
        """Return how long each stage of reading took, and the training waited for it, since this was called last."""
        return self._clock.take_times()

    @property
    def waited_s(self) -> float:
        """Time that the training has waited for batches, in all."""
        return self._clock.waited_s

    def __str__(self) -> str:
        end = "without end" if self._ending.step is None else f"for {self._ending.step} steps"
        return f"{self.order} in global batches of {self._first_batch}, {end}"

    @property
    def position(self) -> int:
        """Samples used since the start of training: the low-water mark."""
        return self._ledger.low_water

    @property
    def begun(self) -> int:
        """Position after the step that is in hand; that of the loader where none is."""
        return self.position

    @property
    def step(self) -> int:
        """Steps done at the position: those whose samples are all used. The last may be shorter than its batch."""
        step = self._batches.step_of(self.position)
        return step + (self.position == self._ending.position and self._batches.position_of(step) < self.position)

    @property
    def global_batch(self) -> int:
        """Samples of the next step, over all workers; an epoch's last step may have fewer."""
        return self.batch_at(self.position)

    def batch_at(self, position: int) -> int:
        """Return the global batch of the step that begins at `position`."""
        return self._batches.at(position)

    @property
    def newest_batch(self) -> int:
        """Latest choice of the global batch, even if it is not in force yet."""
        return self._batches.newest

    @property
    def shares(self) -> list[int]:
        """Samples of a full global batch that each worker takes, once the newest shares are in force."""
        return apportion(self.global_batch, self._shares.newest)

    def describe(self) -> list[Any]:
        """Return, as JSON, what shows ranks that their data differs: order, numbers of the data, whether iterable."""
        about = f"{self}{describe_content(self._dataset.source)}"
        return [about, self._stream.sketch if self._stream else self._dataset.sketch, self._stream is not None]

    def list_sizes(
        self, boundaries: Sequence[int] | None = None, *, is_asynchronous: bool = False
    ) -> tuple[set[int], set[int]]:
        """Return the sizes of micro-batches from here on: of a worker's own, and of those of all workers together.

        Empty ones are omitted. Shares and batches that change are taken as currently planned.

        Args:
            boundaries: Steps before which all workers synchronise; the last is the end. By default see `Ending.find`.
            is_asynchronous: Whether workers run at their own pace in between.
        """
        end = ENDLESS if self._ending.position is None else self._ending.position
        if boundaries is None:
            boundaries, end = (FAR,), self._ending.find(self.position)
        stops = [min(self._batches.position_of(step), end) for step in boundaries]
        if is_asynchronous:
            sizes: set[int] = set()
            for start, stop in pairwise([self.position, *stops]):
                claimed = self.order.batch_sizes(start, stop, self._reader.claim_size) if start < stop else ()
                sizes.update(count for size in claimed for count in self._micro_batches.divide(size, start))
            return sizes - {0}, sizes - {0}
        return self._micro_batches.list_sizes(self.order, self.position, stops[-1])

    def change_shares(self, shares: Sequence[float]) -> int:
        """Divide global batches by other weights, beginning with the first that no worker can have begun to read.

        Every worker calls it at the same position: batches that were read ahead keep their shares.

        Returns:
            First position at which the shares are in force.

        Raises:
            SettingsError: The shares do not fit the group.
        """
        start = self._first_unread
        self._shares.change(start, shares, position=self.position)
        return start

    def change_batch(self, global_batch: int) -> int:
        """Change the global batch, beginning with the first step that no worker can have begun to read.

        Every worker calls it at the same position, as for `change_shares`.

        Returns:
            First position at which the global batch is in force.

        Raises:
            SettingsError: The global batch is below the number of workers.
        """
        start = self._first_unread
        self._batches.change(start, check_batch(global_batch, self._num_workers, self.order))
        return start

    @property
    def grows(self) -> bool:
        """Whether the data set looks for more samples itself."""
        return self._dataset.source is not None and self._dataset.source.grows

    @property
    def is_growth_due(self) -> bool:
        """Whether the next epoch that no worker can have begun to read is another one after the next step.

        A training looks for new samples then: once in each epoch, as late as they can still be in the next.
        """
        after = self.order.next_batch(self.position, self.global_batch).stop
        return self._find_epoch(self._unread_from(self.position)) != self._find_epoch(self._unread_from(after))

    def _find_epoch(self, position: int) -> int:
        """Return the first epoch that begins at a position or later."""
        return self.order.epoch_of(position - 1) + 1 if position else 0

    def grow(self, world: Group | None = None) -> int | None:
        """Let epochs have all samples that the source has by now, from the first that no worker can have begun to read.

        Every worker calls it at the same position, with the same samples, which are those from before and more. A
        source that looks for shards itself (`grows`) gets those that all workers see.

        Args:
            world: All ranks, if ranks share a model; by default the workers.

        Returns:
            Position at which the first larger epoch begins; None if there are no more samples than before.

        Raises:
            SettingsError: The loader was not told that data grows.
            DataError: There are fewer samples than before.
        """
        if self.grows:
            assert self._dataset.source is not None
            agree_on_shards(self._dataset.source, world or self._group, looks=True)
        return self._grow()

    def _grow(self) -> int | None:
        if not self._dataset.grows:
            raise SettingsError("grows must be true for a loader whose data gets more samples; give Loader(grows=True)")
        start = self._dataset.grow(self._first_unread)
        if start is not None:
            self._batches.follow_order(start)
        return start

    def load_shares(self, state: dict[str, Any]) -> bool:
        """Load the shares of a `state_dict`, if it is of the same number of workers; return whether it is."""
        return "shares" in state and self._shares.load(state["shares"])

    def claim_next(self, num_samples: int) -> Interval:
        """Return the next unclaimed positions, for a sample dispatcher; `mark_used` tells when they were used."""
        return self._ledger.claim(self.order, num_samples)

    def mark_used(self, start: int, stop: int) -> None:
        """Record that positions from `claim_next` were used."""
        self._ledger.ack(Interval(start, stop))

    def set_used(self, used: Iterable[Sequence[int]]) -> list[Interval]:
        """Record that ranges of positions were used, on any workers; return those before the last that were not."""
        self._ledger = Ledger.of_used(self.position, used)
        return self._ledger.list_gaps()

    def set_progress(self, num_steps: Mapping[int, int]) -> None:
        """Record the number of steps that each of some workers has done at its own pace; see `find_progress`."""
        self._ledger = Ledger(*find_progress(self.order, self._batches, self._micro_batches, num_steps))

    def take_bad_samples(self) -> list[FoundBadSample]:
        """Return the samples of this worker that could not be read, since the last call; each is named once."""
        return self._reader.bad_samples.take()

    def load_batches(self, state: dict[str, Any]) -> None:
        """Load the global batches of a `state_dict`, including those that `change_batch` set.

        Raises:
            SettingsError: A global batch is below the number of workers.
        """
        for _, _, batch in state["batches"]:
            check_batch(batch, self._num_workers, self.order)
        self._batches.load(state["batches"])

    @property
    def _first_unread(self) -> int:
        """First position that no worker at this one's position can have begun to read."""
        start = self._unread_from(self.begun)
        assert self._ledger.next_claim <= start, f"{self._ledger.next_claim} is read ahead, and {start} the bound"
        return start

    def _unread_from(self, position: int) -> int:
        """Return the first position that no worker can have begun to read when all have used those before another."""
        for _ in range(self._reader.max_steps_ahead):
            position = self.order.next_batch(position, self.batch_at(position)).stop
        return position
