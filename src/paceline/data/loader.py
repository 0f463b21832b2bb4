"""Batches of one worker, in the global order, read ahead of their use."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.comm.group import Group
from paceline.comm.join import find_group
from paceline.comm.local_group import LocalGroup
from paceline.comm.membership import PREEMPTED
from paceline.data.base import Source
from paceline.data.batch import Batch, note_given
from paceline.data.division import Batches, Ending, Shares, check_batch, find_progress
from paceline.data.first_samples import sketch_dataset
from paceline.data.map_source import CollateFn, check_dataset, collate, open_source, take_apart
from paceline.data.order import ENDLESS, Dispatcher, GlobalOrder, Interval, Ledger, apportion, choose_tail
from paceline.data.randomness import watch_draws
from paceline.data.read_ahead import ReadAhead
from paceline.data.read_steps import StepReads, read_here, read_in_processes
from paceline.data.stream import Stream, refuse_for_stream
from paceline.data.virtual_workers import VirtualShares, divide_steps
from paceline.errors import CommunicationError, DataError, SettingsError
from paceline.registry import check_whole

_FAR = 2**40
"""A step that no training reaches."""


class Loader:
    """This worker's batches, in one global order that does not depend on the number of workers.

    Each step takes the next `global_batch` positions of the order and divides them into shares. Without `num_epochs` or
    `num_steps` it never ends; both count from the beginning of training, not from where a checkpoint resumes. A
    batch counts as used once `ack` was called for it, the next one was requested, or the loop was left.

    Args:
        dataset: Any torch data set; every worker reads all of an iterable one, in its own order. Of a DataLoader its
            data set, `collate_fn`, `drop_last`, shuffling and number of processes are used.
        global_batch: Samples per step, over all workers; by default a DataLoader's batch size.
        group: The workers; by default those that `paceline.join` has joined.
        num_epochs: Passes over the data set; None for no end.
        num_steps: Steps after which it ends; None for no end.
        collate_fn: Function that makes a batch from a list of samples, as in a DataLoader; by default it stacks them.
        drop_last: Whether an epoch's last samples are dropped if they are too few for a full global batch.
        join_epochs: Whether such samples share a global batch with the next epoch's first ones instead.
        seed: Random seed of the order; by default that of a DataLoader's own generator, else 0.
        shuffle: Whether each epoch has its own random order; true by default, unless the data set is iterable.
        shares: Shares of a global batch: one non-negative weight per worker; None for even ones.
        num_micro_batches: Micro-batches that a worker's share is split into, for gradient accumulation.
        num_virtual_workers: Parts that each global batch is cut into, whatever the number of workers. A worker gets
            some of them as micro-batches, each with random generators seeded anew; give `Replica` the same number.
        prefetch: Steps to read ahead.
        num_processes: Number of processes that read; 0 for a background thread. In a process each sample has its own
            random numbers, by its position: augmentation is then the same on any number of workers, and after resuming.
        split: Function that returns this rank's part of a batch, if ranks of a worker have different tokens of the same
            samples; by default, as the group, the one that `paceline.parallelize` chose.
        dispatcher: Sample dispatcher of workers that run at their own pace: each step is then this worker's alone, with
            an even share of `global_batch`, and iteration ends where all workers synchronise.
        changes: Pairs of a step and the global batch from that step on, if it does not stay `global_batch`.
        adds_micro_batches: Whether a larger global batch has more micro-batches, so that none becomes larger than the
            first ones.

    Raises:
        SettingsError: The settings do not fit each other, the data set or the group.
        DataError: The kind of data set cannot be read.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | DataLoader[Any],
        global_batch: int | None = None,
        *,
        group: Group | None = None,
        num_epochs: int | None = None,
        num_steps: int | None = None,
        collate_fn: CollateFn | None = None,
        drop_last: bool = False,
        join_epochs: bool = False,
        seed: int | None = None,
        shuffle: bool | None = None,
        shares: Sequence[float] | None = None,
        num_micro_batches: int = 1,
        num_virtual_workers: int | None = None,
        prefetch: int = 2,
        num_processes: int = 0,
        split: Callable[[Batch], Batch] | None = None,
        dispatcher: Dispatcher | None = None,
        changes: Sequence[tuple[int, int]] = (),
        adds_micro_batches: bool = False,
    ) -> None:
        if isinstance(dataset, DataLoader):
            parts = take_apart(dataset)
            dataset, global_batch = parts.dataset, parts.batch_size if global_batch is None else global_batch
            collate_fn, drop_last = collate_fn or parts.collate_fn, drop_last or parts.drop_last
            num_processes = num_processes or parts.num_processes
            shuffle, seed = parts.shuffle if shuffle is None else shuffle, parts.seed if seed is None else seed
        self._is_used_up = False
        self._finds_dispatcher = False
        """Whether to look up the group's sample dispatcher, if there is one."""
        if group is None:
            group = find_group()
            if group.membership.reading is None:
                group.membership.loaders.add(self)
            group, split = group.membership.reading or (group, split)
            self._finds_dispatcher = True
        self._rank, self._num_workers, self._device = group.rank, group.size, group.device
        self._group, self._membership = group, group.membership
        self._split, self._shares = split, Shares(shares, self._num_workers)
        if dispatcher is not None and (num_epochs is not None or num_steps is not None):
            raise SettingsError("num_epochs and num_steps must be left out with a dispatcher, which ends the loop")
        check_dataset(dataset, collate_fn)
        seed = check_whole("seed", 0 if seed is None else seed)
        self._name, self._sketch = type(dataset).__name__, sketch_dataset(dataset)
        tail = choose_tail(drop_last=drop_last, join_epochs=join_epochs)
        self._collate_fn = collate_fn
        self._source: Source | None = None
        self._stream: Stream | None = None
        if isinstance(dataset, IterableDataset):
            refuse_for_stream(
                shuffle=bool(shuffle), drop_last=drop_last, num_processes=num_processes, dispatcher=dispatcher
            )
            self._stream = Stream(dataset, num_epochs)
            self.order = GlobalOrder(ENDLESS, seed, shuffle=False, tail="join")
        else:
            self._source = open_source(dataset, collate_fn)
            self.order = GlobalOrder(len(self._source), seed, shuffle is not False, tail)
        self._first_batch = check_batch(global_batch, self._num_workers, self.order)
        changes = [(step, check_batch(batch, self._num_workers, self.order)) for step, batch in changes]
        self._batches = Batches(self.order, self._first_batch, changes)
        self._ending = Ending(self.order, self._batches, num_epochs, num_steps)
        self._ends_unknown = self._stream is not None and num_epochs is not None
        self._micro_batches = divide_steps(
            self._batches, self._shares, self._rank, num_micro_batches, num_virtual_workers, adds_micro_batches, seed
        )
        self.num_micro_batches = self._micro_batches.num_parts
        self._prefetch = check_whole("prefetch", prefetch, 0)
        self._dispatcher = dispatcher
        self._claim_size = max(1, round(self._first_batch / self._num_workers))
        self._num_processes = check_whole("num_processes", num_processes, 0)
        self._ledger = Ledger()
        self._reading: ReadAhead | None = None
        self.in_hand: Batch | None = None
        """Current batch of a loop over the loader, before ranks of a worker take their parts."""

    def __len__(self) -> int:
        """Return the number of micro-batches left to iterate over.

        Raises:
            TypeError: The loader never ends, or its end is unknown: data is iterable, or workers run at their own pace.
        """
        end = self._ending.step
        is_paced = self._dispatcher is not None or self._found_dispatcher is not None
        if end is None or is_paced or self._ends_unknown:
            raise TypeError("a loader has a length only with num_epochs or num_steps, and a data set of known length")
        if self._ending.is_reached(self.position):
            return 0
        steps = range(self.step, end)
        if not self._micro_batches.adds:
            return len(steps) * self._micro_batches.count(0)
        return sum(self._micro_batches.count(self._batches.position_of(step)) for step in steps)

    def __str__(self) -> str:
        end = "without end" if self._ending.step is None else f"for {self._ending.step} steps"
        return f"{self.order} in global batches of {self._first_batch}, {end}"

    @property
    def position(self) -> int:
        """Samples used since the start of training: the low-water mark."""
        return self._ledger.low_water

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
        return [str(self), self._stream.sketch if self._stream else self._sketch, self._stream is not None]

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
            boundaries, end = (_FAR,), self._ending.find(self.position)
        stops = [min(self._batches.position_of(step), end) for step in boundaries]
        if is_asynchronous:
            sizes: set[int] = set()
            for start, stop in pairwise([self.position, *stops]):
                claimed = self.order.batch_sizes(start, stop, self._claim_size) if start < stop else ()
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

    def load_shares(self, state: dict[str, Any]) -> bool:
        """Load the shares of a `state_dict`, if it is of the same number of workers; return whether it is."""
        return "shares" in state and self._shares.load(state["shares"])

    def ack(self, batch: Batch) -> None:
        """Note that the step of `batch` is done, so that a checkpoint written now does not repeat it."""
        self.in_hand = None
        if self._dispatcher is not None:
            self._dispatcher.ack(batch.interval)
        elif batch.interval.start >= self._ledger.low_water:
            self._ledger.ack(batch.interval)

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
        self._ledger = Ledger(*find_progress(self.order, self._batches, self._shares, num_steps))

    def state_dict(self) -> dict[str, object]:
        """Return the position in the data as JSON, which fits any number of workers, shares and batches.

        Inside a loop over the loader, the current batch counts as used.

        Raises:
            DataError: The current batch is not the last micro-batch of its step.
        """
        if self.in_hand is not None:
            if not self.in_hand.last:
                raise DataError("a loader must be saved after the last micro-batch of a step, but more follow")
            self.ack(self.in_hand)
        stream = {"stream": self._stream.state(self.position)} if self._stream is not None else {}
        return {
            **asdict(self.order),
            **self._ledger.state_dict(),
            **stream,
            "shares": self._shares.state(self.position),
            "batches": self._batches.state(self.position),
            "save_every": self._membership.save_every,
        }

    def load_batches(self, state: dict[str, Any]) -> None:
        """Load the global batches of a `state_dict`, including those that `change_batch` set.

        Raises:
            SettingsError: A global batch is below the number of workers.
        """
        for _, _, batch in state["batches"]:
            check_batch(batch, self._num_workers, self.order)
        self._batches.load(state["batches"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, on any number of workers, with this loader's own shares and batches.

        Raises:
            DataError: The state is of other data or another seed, for which "the rest of the epoch" means nothing.
        """
        if ("stream" in state) != (self._stream is not None):
            raise DataError(
                "a data set must be iterable where that of the checkpoint is, and only there, but one of them is not; "
                "resume with the data that the run was started with"
            )
        for name, here in asdict(self.order).items():
            saved = state.get(name, "short")  # older checkpoints know no other tail
            if saved != here:
                name = "way to end an epoch (drop_last, join_epochs)" if name == "tail" else name
                raise DataError(
                    f"the data's {name} must be that of the checkpoint, but got {here} instead of {saved}; "
                    "resume with the data and order that the run was started with"
                )
        self._ledger, self._is_used_up = Ledger.from_state(state), False
        self._membership.save_every = state.get("save_every")
        if self._stream is not None:
            self._stream = self._stream.resume(state["stream"], self.position)
        if "batches" in state:
            self._batches.resume(state["batches"][0][0], self.position)

    def __iter__(self) -> Iterator[Batch]:
        """Yield micro-batch after micro-batch, from the low-water mark to the end, if there is one.

        While it runs, a signal that asks this process to stop is a request to all workers, and iteration ends after the
        step on which they agree: see `Replica.should_save`.
        """
        with self._membership.stopping_on_signals():
            try:
                if self._found_dispatcher is not None:
                    yield from self._iterate_at_own_pace(self._found_dispatcher)
                else:
                    if self._is_used_up and self._finds_dispatcher:
                        raise SettingsError(
                            "a loader must be iterated once, over all epochs, but it was iterated again after its end; "
                            "leave the loop over epochs out and give num_epochs, or make a new Loader for each"
                        )
                    yield from self._iterate()
                    self._is_used_up = not self._membership.is_stopping
            finally:
                note_given(None)
        if self._membership.is_saved:
            raise SystemExit(PREEMPTED)  # the code after the loop is for a training that has ended

    def _give(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch, and note that this thread has it."""
        note_given(batch)
        self._micro_batches.begin(batch)
        return self._split(batch.arrived()) if self._split is not None else batch.arrived()

    @property
    def _found_dispatcher(self) -> Dispatcher | None:
        return self._membership.dispatcher if self._finds_dispatcher else None

    def _iterate_at_own_pace(self, dispatcher: Dispatcher) -> Iterator[Batch]:
        """Yield samples that no other worker has; all synchronise with a batch of weight 0: to save, stop and end."""
        if self._source is None:
            refuse_for_stream(shuffle=False, drop_last=False, num_processes=0, dispatcher=dispatcher)
        if self.order.tail == "drop":
            raise SettingsError(
                "drop_last must be left out where workers run at their own pace, each of which takes a part of what is "
                "left; take a synchronous rule, or join_epochs"
            )
        self._dispatcher = dispatcher
        dispatcher.set_source(self.claim_next, self.mark_used)
        membership = self._membership
        next_step = self.step + 1  # by then a loop that saves has said how often
        while not self._ending.is_reached(self.position):
            if membership.save_every is not None:
                next_step = (self.step // membership.save_every + 1) * membership.save_every
            boundary = self._batches.position_of(min(next_step, self._ending.step or next_step))
            dispatcher.set_boundary(min(boundary, self._ending.position or boundary))
            next_step = _FAR
            yield from self._iterate()
            if dispatcher.lost:
                raise CommunicationError(dispatcher.lost)
            self.set_used([(0, self._group.gather_documents(self.position, name="position")[0])])
            membership.boundary_step = self.step
            membership.is_stopping |= dispatcher.is_stopping
            self.in_hand = None
            assert self._source is not None
            here = Interval(self.position, self.position)
            borrowed = self._source.read(self.order.samples_at(Interval(here.start, here.start + 1)))
            yield self._give(Batch(borrowed, 0, here).to(self._device))
            membership.boundary_step = None
            if membership.is_stopping:
                return

    def _iterate(self) -> Iterator[Batch]:
        if self._dispatcher is None:
            self._ledger = Ledger.from_state(self._ledger.state_dict())
        if self._stream is not None:
            self._stream = self._stream.resume(self._stream.state(self.position), self.position)
        if self._reading is not None:
            self._reading.stop()  # the thread of an older iterator that is still referenced
        mine = self._reading = ReadAhead(self._read_steps(self._ledger, self._stream), self._prefetch)
        try:
            with mine:
                yield from self._use(mine)
        finally:
            if mine is self._reading:
                self._reading = self.in_hand = None

    def _use(self, mine: ReadAhead) -> Iterator[Batch]:
        for step in mine:
            for batch in step:
                self.in_hand = batch
                try:
                    yield self._give(batch)
                except GeneratorExit:  # the loop was left by break: its last batch was used nevertheless
                    if self.in_hand is not None and batch.last and mine is self._reading:
                        self.ack(batch)
                    raise
                if mine is not self._reading:
                    raise DataError(
                        "a loader must be iterated once at a time, but a newer iterator exists; end one loop first"
                    )
            if self.in_hand is not None:
                self.ack(step[-1])
            if self._membership.is_stopping if self._dispatcher is None else self._dispatcher.lost:
                return

    @property
    def _first_unread(self) -> int:
        """First position that no worker at this one's position can have begun to read."""
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
        num_waiting = max(1, self._prefetch) + 1  # the ready ones, and the current one
        return num_waiting + -(-self._num_processes * self._prefetch_factor // self.num_micro_batches)

    def _plan_steps(self, ledger: Ledger) -> Iterator[StepReads]:
        last = self._ending.position
        while self._dispatcher is None and not self._ending.is_reached(ledger.next_claim):
            interval = ledger.claim(self.order, self._batches.rest_at)
            if last is not None and last < interval.stop:  # no next epoch to join
                interval = Interval(interval.start, last)
            yield self._micro_batches.cut(interval)
        while self._dispatcher is not None and (claimed := self._dispatcher.claim(self._claim_size)) is not None:
            yield self._micro_batches.cut(Interval(*claimed), is_all_mine=True)

    def _read_steps(self, ledger: Ledger, stream: Stream | None) -> Generator[list[Batch]]:
        plan = self._plan_steps(ledger)
        if self._num_processes > 0:
            assert self._source is not None
            yield from read_in_processes(
                self._source, self.order, plan, self._device, self._num_processes, self._prefetch_factor
            )
            return
        if stream is not None:
            steps, advice = self._read_stream(ledger, stream), "let it draw from a generator that set_epoch seeds"
        else:
            assert self._source is not None
            steps = read_here(self._source, self.order, plan, self._device)
            advice = "give num_processes=1 (num_data_processes of a run), where each sample has its own random numbers"
        if isinstance(self._group, LocalGroup) and self._group.size > 1:  # threads, which draw from one generator
            yield from steps
        else:
            yield from watch_draws(steps, self._name, advice, refuses=isinstance(self._micro_batches, VirtualShares))

    def _read_stream(self, ledger: Ledger, stream: Stream) -> Iterator[list[Batch]]:
        while not self._ending.is_reached(start := ledger.next_claim):
            samples = stream.take(self.batch_at(start))
            if not samples:
                return
            step = self._micro_batches.cut(ledger.claim(self.order, len(samples)))
            read = [collate(samples[a - start : b - start], self._collate_fn) for a, b in step.parts]
            yield step.make_batches(read, self._device)
