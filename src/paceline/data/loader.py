"""Batches of one worker, in the global order, read ahead of their use."""

import itertools
import queue
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from paceline.comm.group import Group
from paceline.data.base import Batch, Indices, Source, Spec
from paceline.data.order import Claims, GlobalOrder, Interval, Ledger, apportion
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

    Raises:
        SettingsError: `global_batch` is below the number of workers, or `shares` do not fit the group.
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
    ) -> None:
        self._rank, num_workers = (group.rank, group.size) if group else (0, 1)
        self._device = group.device if group else torch.device("cpu")
        self._shares = Shares(shares, num_workers)
        if global_batch < num_workers:
            raise SettingsError(
                f"global_batch must be at least the number of workers, but got {global_batch} for {num_workers} "
                "workers; raise global_batch or start fewer workers"
            )
        if num_micro_batches < 1:
            raise SettingsError(f"num_micro_batches must be at least 1, but got {num_micro_batches}")
        self._source = dataset if isinstance(dataset, Source) else MapSource(dataset)
        self.order = GlobalOrder(len(self._source), seed, shuffle)
        self.global_batch = global_batch
        self.num_micro_batches = num_micro_batches
        self._prefetch = prefetch
        self._claims = claims
        self._claim_size = max(1, round(global_batch / num_workers))
        self._num_processes = num_processes
        self._ledger = Ledger()
        self._num_iterators = 0

    @property
    def position(self) -> int:
        """Samples used since the start of training: the low-water mark."""
        return self._ledger.low_water

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
        start = self.position
        for _ in range(self._max_steps_ahead):
            start = self.order.next_batch(start, self.global_batch).stop
        assert self._ledger.next_claim <= start, f"{self._ledger.next_claim} is read ahead, and {start} the bound"
        self._shares.change(start, shares, position=self.position)
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
        """Return the position in the data, which fits any number of workers, and the shares, as JSON."""
        return {**asdict(self.order), **self._ledger.state_dict(), "shares": self._shares.state(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, at any number of workers, with this loader's own shares.

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

    def __iter__(self) -> Iterator[Batch]:
        """Yield micro-batch after micro-batch, from the low-water mark on, for ever."""
        if self._claims is None:
            self._ledger = Ledger.from_state(self._ledger.state_dict())
        self._num_iterators += 1
        mine = self._num_iterators
        with _ReadAhead(self._read_steps(), self._prefetch) as steps:
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

    @property
    def _prefetch_factor(self) -> int:
        """Micro-batches that each loader process reads ahead."""
        return max(1, self._prefetch * self.num_micro_batches // max(1, self._num_processes))

    @property
    def _max_steps_ahead(self) -> int:
        """Global batches that a worker may have claimed beyond its position."""
        num_waiting = max(1, self._prefetch) + 1  # those that are ready, and one in hand
        return num_waiting + -(-self._num_processes * self._prefetch_factor // self.num_micro_batches)

    def _plan_steps(self) -> Iterator["_Step"]:
        while self._claims is None:
            interval = self._ledger.claim(self.order, self.global_batch)
            shares = apportion(interval.num_samples, self._shares.at(interval.start))
            yield self._cut(interval, interval.start + sum(shares[: self._rank]), shares[self._rank])
        while (claimed := self._claims.claim(self._claim_size)) is not None:
            interval = Interval(*claimed)
            yield self._cut(interval, interval.start, interval.num_samples)

    def _cut(self, interval: Interval, start: int, share: int) -> "_Step":
        """Cut this worker's share of an interval into micro-batches."""
        parts, counts = [], []
        for count in apportion(share, [1.0] * self.num_micro_batches):
            # An empty share borrows the batch's first sample: see Batch.num_samples.
            place = Interval(start, start + count) if count else Interval(interval.start, interval.start + 1)
            parts.append(self.order.samples_at(place))
            counts.append(count)
            start += count
        return _Step(interval, parts, counts)

    def _read_steps(self) -> Iterator[list[Batch]]:
        if self._num_processes == 0:
            for step in self._plan_steps():
                yield step.make_batches([self._source.read(part) for part in step.parts], self._device)
            return
        planned: queue.SimpleQueue[_Step] = queue.SimpleQueue()

        def plan() -> Iterator[Indices]:
            for step in self._plan_steps():
                planned.put(step)
                yield from step.parts

        parts = iter(
            DataLoader(
                _Reader(self._source),
                sampler=plan(),
                batch_size=None,
                num_workers=self._num_processes,
                worker_init_fn=_ignore_signals,
                prefetch_factor=self._prefetch_factor,
            )
        )
        while read := list(itertools.islice(parts, self.num_micro_batches)):
            yield planned.get().make_batches(read, self._device)


@dataclass(frozen=True)
class _Step:
    """One step of one worker: which samples each micro-batch reads, and how many of them count."""

    interval: Interval
    parts: list[Indices]
    counts: list[int]

    def make_batches(self, read: Sequence[Sequence[Tensor]], device: torch.device) -> list[Batch]:
        last = len(read) - 1
        return [
            Batch(inputs, targets, count, self.interval, last=number == last).to(device)
            for number, ((inputs, targets), count) in enumerate(zip(read, self.counts, strict=True))
        ]


class MapSource(Source):
    """Any torch data set of (input, target) pairs, as a `Source`.

    Args:
        dataset: With a length, and samples that torch's default collation can stack.
        spec: What a model must know of it; only a `Run` needs it.
    """

    def __init__(self, dataset: Dataset[Any], spec: Spec | None = None) -> None:
        if spec is not None:
            self.spec = spec
        self._dataset = dataset
        self._num_samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset leaves __len__ out

    def __len__(self) -> int:
        """Return the data set's length."""
        return self._num_samples

    def read(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return the samples, collated as torch does it."""
        inputs, targets = default_collate([self._dataset[int(index)] for index in indices])
        return inputs, targets


class _Reader(Dataset[Any]):
    """A source whose keys are whole batches of indices, as a loader process reads them."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, indices: Indices) -> tuple[Tensor, Tensor]:
        return self._source.read(np.asarray(indices))


class _ReadAhead:
    """Runs an iterator in a background thread, at most `depth` items ahead; its errors surface in order."""

    def __init__(self, items: Iterator[list[Batch]], depth: int) -> None:
        self._items = items
        self._ready: queue.Queue[list[Batch] | BaseException | None] = queue.Queue(max(1, depth))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-loader", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        while not self._ready.empty():
            self._ready.get_nowait()
        self._thread.join(timeout=10)

    def __iter__(self) -> Iterator[list[Batch]]:
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
            self._put(None)
        except BaseException as error:  # handed on to the reader
            self._put(error)

    def _put(self, item: list[Batch] | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


def _ignore_signals(_: int) -> None:
    """Leave it to the worker, which a launcher signals too, to end this process after its last step."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
