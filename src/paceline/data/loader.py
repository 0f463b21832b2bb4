"""Batches of one worker, in the global order, read ahead of their use."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import Dataset

from paceline.comm.group import Group
from paceline.data.base import Batch, Source
from paceline.data.batches import Batches
from paceline.data.map_source import MapSource
from paceline.data.order import Claims, GlobalOrder, Interval, Ledger, apportion
from paceline.data.read_ahead import ReadAhead
from paceline.data.read_steps import StepReads, read_in_processes
from paceline.data.shares import Shares
from paceline.errors import DataError, SettingsError


class Loader:
    """This worker's batches, for as many epochs as they are asked for.

    One global order feeds all workers: each step takes the next `global_batch` positions and cuts them into
    shares, so what is learnt from does not depend on how many workers there are. It iterates for ever; an epoch's
    last global batch is shorter. A batch counts as used once `ack` was called for it, the next one was asked for, or
    the loop was left; call `ack` before `state_dict` in the middle of a loop.

    Args:
        dataset: A `Source`, or any torch data set with a length and samples of the form (input, target).
        global_batch: Samples of a step, over all workers.
        group: The workers; alone without it.
        seed: Of the order.
        shuffle: Without it every epoch has the data set's own order.
        shares: How a global batch is divided: one non-negative weight a worker; evenly without it.
        num_micro_batches: Parts that a worker's share is cut into, for gradient accumulation.
        prefetch: Steps that are read ahead.
        num_processes: 0 reads in a background thread; more reads in that many forked processes.
        claims: Hands out positions where workers go at their own pace: each step is then this worker's alone, of an
            even share of `global_batch`, and iterating ends where all workers come together.
        changes: Pairs of a step and the global batch from that step on, where it does not stay `global_batch`.
        adds_micro_batches: Whether a global batch that has grown is cut into more micro-batches, so that none becomes
            larger than the first ones.

    Raises:
        SettingsError: A global batch is below the number of workers, or `shares` do not fit the group.
    """

    def __init__(
        self,
        dataset: Source | Dataset[Any],
        global_batch: int,
        *,
        group: Group | None = None,
        seed: int = 0,
        shuffle: bool = True,
        shares: Sequence[float] | None = None,
        num_micro_batches: int = 1,
        prefetch: int = 2,
        num_processes: int = 0,
        claims: Claims | None = None,
        changes: Sequence[tuple[int, int]] = (),
        adds_micro_batches: bool = False,
    ) -> None:
        self._rank, self._num_workers = (group.rank, group.size) if group else (0, 1)
        self._device = group.device if group else torch.device("cpu")
        self._shares = Shares(shares, self._num_workers)
        for batch in [global_batch, *(batch for _, batch in changes)]:
            self._check_batch(batch)
        if num_micro_batches < 1:
            raise SettingsError(f"num_micro_batches must be at least 1, but got {num_micro_batches}")
        self._source = dataset if isinstance(dataset, Source) else MapSource(dataset)
        self.order = GlobalOrder(len(self._source), seed, shuffle)
        self._batches = Batches(self.order, global_batch, changes)
        self._first_batch = global_batch
        self.num_micro_batches = num_micro_batches
        self._adds_micro_batches = adds_micro_batches
        self._prefetch = prefetch
        self._claims = claims
        self._claim_size = max(1, round(global_batch / self._num_workers))
        self._num_processes = num_processes
        self._ledger = Ledger()
        self._num_iterators = 0

    @property
    def position(self) -> int:
        """Samples used since the start of training: the low-water mark."""
        return self._ledger.low_water

    @property
    def global_batch(self) -> int:
        """Samples of the next step, over all workers, but at an epoch's end."""
        return self.batch_at(self.position)

    def batch_at(self, position: int) -> int:
        """Return the global batch in force for the step that begins at `position`."""
        return self._batches.at(position)

    @property
    def newest_batch(self) -> int:
        """The global batch that was chosen last, whether in force yet or not."""
        return self._batches.newest

    @property
    def shares(self) -> list[int]:
        """Samples of a whole global batch that each worker takes, once the newest shares are in force."""
        return apportion(self.global_batch, self._shares.newest)

    def change_shares(self, shares: Sequence[float]) -> int:
        """Divide global batches by other weights, from the first on that no worker can have begun to read.

        Every worker calls it at the same position, which all of them count from: what was read ahead keeps its shares.

        Returns:
            The position from which they are in force.

        Raises:
            SettingsError: They do not fit the group.
        """
        start = self._first_unread
        self._shares.change(start, shares, position=self.position)
        return start

    def change_batch(self, global_batch: int) -> int:
        """Let steps take another global batch, from the first on that no worker can have begun to read.

        Every worker calls it at the same position, as it does `change_shares`.

        Returns:
            The position from which it is in force.

        Raises:
            SettingsError: It is below the number of workers.
        """
        self._check_batch(global_batch)
        start = self._first_unread
        self._batches.change(start, global_batch)
        return start

    def load_shares(self, state: dict[str, Any]) -> bool:
        """Take on the shares of a `state_dict`, if it is of as many workers; return whether it is."""
        return "shares" in state and self._shares.load(state["shares"])

    def ack(self, batch: Batch) -> None:
        """Note that the step of `batch` is done, so that a checkpoint written now does not repeat it."""
        if self._claims is not None:
            self._claims.ack(batch.interval)
        elif batch.interval.start >= self._ledger.low_water:
            self._ledger.ack(batch.interval)

    def take(self, num_samples: int) -> Interval:
        """Return the next positions that nobody has, for whoever hands them out; `note` them when they were used."""
        return self._ledger.claim(self.order, num_samples)

    def note(self, start: int, stop: int) -> None:
        """Note that positions which `take` returned were used."""
        self._ledger.ack(Interval(start, stop))

    def move_to(self, position: int) -> None:
        """Note that all before `position` has been used, by whomever."""
        self._ledger = Ledger(position)

    def state_dict(self) -> dict[str, object]:
        """Return the position in the data, which fits any number of workers, shares and batches, as JSON."""
        return {
            **asdict(self.order),
            **self._ledger.state_dict(),
            "shares": self._shares.state(self.position),
            "batches": self._batches.state(self.position),
        }

    def load_batches(self, state: dict[str, Any]) -> None:
        """Take on the global batches of a `state_dict`, those that `change_batch` set among them.

        Raises:
            SettingsError: One is below the number of workers.
        """
        for _, _, batch in state["batches"]:
            self._check_batch(batch)
        self._batches.load(state["batches"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, at any number of workers, with this loader's own shares and batches.

        Raises:
            DataError: It was taken over other data or another seed, where "the rest of the epoch" means nothing.
        """
        for name, here in asdict(self.order).items():
            if state[name] != here:
                raise DataError(
                    f"the data's {name} must be that of the checkpoint, but got {here} instead of {state[name]}; "
                    "resume with the data and order that the run was started with"
                )
        self._ledger = Ledger.from_state(state)
        if "batches" in state:
            self._batches.resume(state["batches"][0][0], self.position)

    def __iter__(self) -> Iterator[Batch]:
        """Yield micro-batch after micro-batch, from the low-water mark on, for ever."""
        if self._claims is None:
            self._ledger = Ledger.from_state(self._ledger.state_dict())
        self._num_iterators += 1
        mine = self._num_iterators
        with ReadAhead(self._read_steps(), self._prefetch) as steps:
            for step in steps:
                if mine != self._num_iterators:
                    raise DataError("a loader must be iterated once at a time, but a newer iterator was begun")
                for batch in step:
                    try:
                        yield batch
                    except GeneratorExit:  # the loop was left by break: its last batch is used all the same
                        if batch.last and mine == self._num_iterators:
                            self.ack(batch)
                        raise
                if self._claims is None:
                    self.ack(step[-1])

    def _check_batch(self, global_batch: int) -> None:
        if global_batch < self._num_workers:
            raise SettingsError(
                f"global_batch must be at least the number of workers, but got {global_batch} for {self._num_workers} "
                "workers; raise global_batch or start fewer workers"
            )

    @property
    def _first_unread(self) -> int:
        """The first position that no worker at this one's position can have begun to read."""
        start = self.position
        for _ in range(self._max_steps_ahead):
            start = self.order.next_batch(start, self.batch_at(start)).stop
        assert self._ledger.next_claim <= start, f"{self._ledger.next_claim} is read ahead, and {start} the bound"
        return start

    @property
    def _prefetch_factor(self) -> int:
        """Micro-batches that each loader process reads ahead."""
        return max(1, self._prefetch * self.num_micro_batches // max(1, self._num_processes))

    @property
    def _max_steps_ahead(self) -> int:
        """Global batches that a worker may have claimed beyond its position."""
        num_waiting = max(1, self._prefetch) + 1  # those that are ready, and one in hand
        return num_waiting + -(-self._num_processes * self._prefetch_factor // self.num_micro_batches)

    def _plan_steps(self) -> Iterator[StepReads]:
        while self._claims is None:
            interval = self._ledger.claim(self.order, self.batch_at)
            shares = apportion(interval.num_samples, self._shares.at(interval.start))
            yield self._cut(interval, interval.start + sum(shares[: self._rank]), shares[self._rank])
        while (claimed := self._claims.claim(self._claim_size)) is not None:
            interval = Interval(*claimed)
            yield self._cut(interval, interval.start, interval.num_samples)

    def _cut(self, interval: Interval, start: int, share: int) -> StepReads:
        """Cut this worker's share of an interval into micro-batches."""
        num_parts = self.num_micro_batches
        if self._adds_micro_batches:
            num_parts *= max(1, -(-self.batch_at(interval.start) // self._first_batch))
        parts, counts = [], []
        for count in apportion(share, [1.0] * num_parts):
            # An empty share borrows the batch's first sample: see Batch.num_samples.
            place = Interval(start, start + count) if count else Interval(interval.start, interval.start + 1)
            parts.append(self.order.samples_at(place))
            counts.append(count)
            start += count
        return StepReads(interval, parts, counts)

    def _read_steps(self) -> Iterator[list[Batch]]:
        if self._num_processes > 0:
            yield from read_in_processes(
                self._source, self._plan_steps(), self._device, self._num_processes, self._prefetch_factor
            )
            return
        for step in self._plan_steps():
            yield step.make_batches([self._source.read(part) for part in step.parts], self._device)
