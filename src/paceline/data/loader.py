"""Batches of one worker, in the global order, read ahead of their use."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset

from paceline.comm.group import Group
from paceline.comm.join import find_group
from paceline.comm.membership import PREEMPTED
from paceline.data.bad_samples import BadSamples
from paceline.data.batch import Batch, note_given
from paceline.data.content import check_content, content_state
from paceline.data.map_source import CollateFn, take_apart
from paceline.data.open_dataset import open_dataset
from paceline.data.order import Dispatcher, Interval, Ledger
from paceline.data.orders import SampleOrder
from paceline.data.pipeline import NumProcesses, ReadSettings
from paceline.data.read_ahead import READ_AHEAD_BYTES, ReadAhead
from paceline.data.step_plan import FAR, StepPlan
from paceline.data.stream import refuse_for_stream
from paceline.errors import DataError, SettingsError


class Loader(StepPlan):
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
        order: Order of each epoch's samples: settings, or the name of one; by default ``full``, which mixes all of them
            anew, unless the data set is iterable.
        shuffle: Whether each epoch has its own random order, as in a DataLoader; give either this or `order`.
        shares: Shares of a global batch: one non-negative weight per worker; None for even ones.
        num_micro_batches: Micro-batches that a worker's share is split into, for gradient accumulation.
        num_virtual_workers: Parts that each global batch is cut into, whatever the number of workers. A worker gets
            some of them as micro-batches, each with random generators seeded anew; give `Replica` the same number.
        grows: Whether the data set may get more samples, which `grow` lets later epochs have; a source that looks for
            them itself says so.
        bad_samples: Settings for samples that cannot be read; by default the first one is an error.
        prefetch: Steps to read ahead.
        num_processes: Number of processes that read; 0 for background threads; auto for threads or processes, as many
            as measurement in the first steps shows to be needed. In a process each sample has its own random numbers,
            by its position: data sets that draw are then the same on any number of workers, and after resuming.
        num_threads: Number of threads that decode, beside one that fetches, if no process reads; more than one only for
            data that several threads may read at once.
        read_ahead_bytes: Largest size of the batches that are read ahead; at least one step is.
        augment: Operations on training samples, one after another: settings, names such as flip, or callables of a
            sample. Their random numbers depend on seed, epoch, sample and operation alone.
        group_by_length: Whether the samples of each global batch are sorted by length and dealt to workers and
            micro-batches so that there is little padding and each has a like number of tokens. It is the same global
            batch; the weight of a loss must be tokens: ``batch.count(mask)``.
        lengths: Length of each sample, for `group_by_length`; by default all samples are read once and measured, if
            `collate_fn` is a `Padding`.
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

    in_hand: Batch | None = None
    """Current batch of a loop over the loader, before ranks of a worker take their parts."""
    _reading: ReadAhead | None = None

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
        order: SampleOrder | str | None = None,
        shuffle: bool | None = None,
        shares: Sequence[float] | None = None,
        num_micro_batches: int = 1,
        num_virtual_workers: int | None = None,
        grows: bool = False,
        bad_samples: BadSamples | None = None,
        prefetch: int = 2,
        num_processes: NumProcesses = 0,
        num_threads: int = 1,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        augment: Sequence[Any] = (),
        group_by_length: bool = False,
        lengths: Sequence[int] | None = None,
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
            shuffle = parts.shuffle if shuffle is None and order is None else shuffle
            seed = parts.seed if seed is None else seed
        self._is_used_up = self._finds_dispatcher = False
        """Whether to look up the group's sample dispatcher, if there is one."""
        if group is None:
            group = find_group()
            if group.membership.reading is None:
                group.membership.loaders.add(self)
            group, split = group.membership.reading or (group, split)
            self._finds_dispatcher = True
        self._membership, self._split = group.membership, split
        if dispatcher is not None and (num_epochs is not None or num_steps is not None):
            raise SettingsError("num_epochs and num_steps must be left out with a dispatcher, which ends the loop")
        opened = open_dataset(
            dataset,
            collate_fn,
            seed=seed,
            order=order,
            shuffle=shuffle,
            drop_last=drop_last,
            join_epochs=join_epochs,
            num_epochs=num_epochs,
            num_processes=num_processes,
            grows=grows,
            dispatcher=dispatcher,
        )
        super().__init__(
            opened,
            group,
            global_batch=global_batch,
            changes=changes,
            shares=shares,
            num_epochs=num_epochs,
            num_steps=num_steps,
            num_micro_batches=num_micro_batches,
            num_virtual_workers=num_virtual_workers,
            adds_micro_batches=adds_micro_batches,
            bad_samples=bad_samples or BadSamples(),
            settings=ReadSettings(prefetch, num_processes, num_threads, read_ahead_bytes),
            augment=augment,
            group_by_length=group_by_length,
            lengths=lengths,
        )
        self._dispatcher = dispatcher

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

    @property
    def begun(self) -> int:
        """Position after the current batch of a loop, which counts as used only once the next one is asked for."""
        if self.in_hand is None or self._dispatcher is not None:
            return self.position
        return max(self.position, self.in_hand.interval.stop)

    def ack(self, batch: Batch) -> None:
        """Note that the step of `batch` is done, so that a checkpoint written now does not repeat it."""
        self.in_hand = None
        if self._dispatcher is not None:
            self._dispatcher.ack(batch.interval)
        elif batch.interval.start >= self._ledger.low_water:
            self._ledger.ack(batch.interval)

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
            **self.order.state(),
            **content_state(self._dataset.source),
            **self._ledger.state_dict(),
            **stream,
            "shares": self._shares.state(self.position),
            "batches": self._batches.state(self.position),
            "save_every": self._membership.save_every,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, on any number of workers, with this loader's own shares and batches.

        Raises:
            DataError: The state is of other data or another seed, for which "the rest of the epoch" means nothing.
        """
        self._dataset.check_state(state)
        check_content(state, self._dataset.source)
        self._ledger, self._is_used_up = Ledger.from_state(state), False
        self._membership.save_every = state.get("save_every")
        if self._stream is not None:
            self._stream = self._stream.resume(state["stream"], self.position)
        if "batches" in state:
            self._batches.resume(state["batches"][0][0], self.position)
        if self._dataset.grows:
            self._grow()

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
        source = self._dataset.source
        if source is None:
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
            next_step = FAR
            yield from self._iterate()
            if (lost := dispatcher.lost) is not None:
                raise lost
            self.set_used([(0, self._group.gather_documents(self.position, name="position")[0])])
            membership.boundary_step = self.step
            membership.is_stopping |= dispatcher.is_stopping
            self.in_hand = None
            assert source is not None
            here = Interval(self.position, self.position)
            borrowed = source.read(self.order.samples_at(Interval(here.start, here.start + 1)))
            yield self._give(Batch(borrowed, 0, here).to(self._group.device))
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
        mine = self._reading = ReadAhead(
            partial(self._reader.read, self._ledger, self._stream, self._dispatcher, self._clock),
            self._reader.settings.prefetch,
            self._clock,
            after_first=self._reader.warn_of_clumps,
        )
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
