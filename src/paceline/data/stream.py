"""Iterable data sets: samples that can only be read one after another."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import IterableDataset

from paceline.data.batch import Batch
from paceline.data.first_samples import sketch_sample
from paceline.data.map_source import CollateFn, collate
from paceline.data.order import GlobalOrder, Interval, Ledger
from paceline.data.randomness import capture_generators
from paceline.data.read_steps import StepReads
from paceline.errors import DataError, SettingsError


class DifferentStreamsWarning(UserWarning):
    """An iterable data set yields other samples on some workers, of which each worker then takes only a part."""


@runtime_checkable
class HasEpochs(Protocol):
    """A data set that is told the number of each epoch, to shuffle each differently (as in the datasets library)."""

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch."""


class Stream:
    """The samples of an iterable data set, epoch after epoch, joined.

    Every worker reads all of them and keeps those of its share, so that the samples of a step depend neither on the
    number of workers nor on their shares, provided that the data set yields the same samples everywhere and each time
    (in an epoch of the same number, if it has a method ``set_epoch``). Resuming reads again all samples that the epoch
    had before the checkpoint. A map-style data set has neither cost.

    Args:
        dataset: Data set, iterated once per epoch.
        num_epochs: Epochs after which the stream ends; None for no end.
    """

    def __init__(self, dataset: IterableDataset[Any], num_epochs: int | None) -> None:
        self._dataset, self._num_epochs = dataset, num_epochs
        self._epoch_starts = [0]
        """First position of each epoch that has begun."""
        self._first_epoch = 0
        self._position = 0
        self._samples: Iterator[Any] | None = None
        self._last_samples: Iterator[Any] | None = None
        self._has_read = False
        self.sketch: list[float] | None = None
        """Some numbers of the first sample that was read here; None if reading it has drawn random numbers."""

    def take(self, num_samples: int) -> list[Any]:
        """Return the next samples; fewer, or none, at the end.

        Raises:
            DataError: The data set yields nothing, or less than it did before a checkpoint.
        """
        taken: list[Any] = []
        while len(taken) < num_samples and not self._is_over:
            if self._samples is None:
                self._samples = self._begin()
            before = capture_generators() if not self._has_read else None
            new = list(itertools.islice(self._samples, num_samples - len(taken)))
            if not self._has_read and new:
                self._has_read = True
                self.sketch = sketch_sample(new[0]) if capture_generators() == before else None
            taken += new
            self._position += len(new)
            if len(taken) < num_samples:
                if self._position == self._epoch_starts[-1]:
                    raise DataError(
                        f"an iterable data set must yield samples each time that it is iterated, but {self._name} "
                        f"yields none in epoch {self._epoch}; let __iter__ begin anew, or give Loader num_epochs=1"
                    )
                self._samples = None
                self._epoch_starts.append(self._position)
        return taken

    def state(self, position: int) -> dict[str, int]:
        """Return the epoch of the sample before `position`, and that epoch's first position, as JSON."""
        # The sample before, since the next epoch may have begun already, depending on how far was read ahead.
        index = max(index for index, start in enumerate(self._epoch_starts) if start < position or not index)
        return {"epoch": self._first_epoch + index, "epoch_start": self._epoch_starts[index]}

    def resume(self, state: dict[str, int], position: int) -> "Stream":
        """Return a stream that continues at `position`, given the `state` of that position; it reads nothing yet."""
        resumed = Stream(self._dataset, self._num_epochs)
        resumed._first_epoch, resumed._epoch_starts = state["epoch"], [state["epoch_start"]]
        resumed._position = position
        resumed._last_samples = self._last_samples
        return resumed

    def _begin(self) -> Iterator[Any]:
        """Iterate the data set anew, up to the position."""
        if isinstance(self._dataset, HasEpochs):
            self._dataset.set_epoch(self._epoch)
        samples = iter(self._dataset)
        num_used = self._position - self._epoch_starts[-1]
        if num_used and samples is self._last_samples:
            raise DataError(
                f"an iterable data set must begin anew each time that it is iterated, but {self._name} continues where "
                "it was left; let __iter__ make a new iterator, or loop over the Loader once"
            )
        self._last_samples = samples
        num_skipped = sum(1 for _ in itertools.islice(samples, num_used))
        if num_skipped < num_used:
            raise DataError(
                f"an iterable data set must yield what it yielded before, but {self._name} has {num_skipped} samples "
                f"in epoch {self._epoch}, of which {num_used} were used; resume with the same data"
            )
        return samples

    @property
    def _epoch(self) -> int:
        return self._first_epoch + len(self._epoch_starts) - 1

    @property
    def _is_over(self) -> bool:
        return self._num_epochs is not None and self._epoch >= self._num_epochs

    @property
    def _name(self) -> str:
        return type(self._dataset).__name__


def refuse_for_stream(*, shuffle: bool, drop_last: bool, num_processes: int, dispatcher: object) -> None:
    """Refuse settings that need samples under an index.

    Raises:
        SettingsError: A setting needs them; the message names it.
    """
    what = "for an iterable data set"
    if shuffle:
        raise SettingsError(
            f"shuffle must be false {what}, which is read in its own order, but got true; shuffle in the data set "
            "itself, the same on every worker"
        )
    if drop_last:
        raise SettingsError(
            f"drop_last must be false {what}, but got true; leave it out: the last samples of a pass share a batch "
            "with the first of the next, so that no batch is short"
        )
    if num_processes:
        raise SettingsError(
            f"num_processes must be 0 {what}, whose samples come one after another, but got {num_processes}; leave it "
            "out"
        )
    if dispatcher is not None:
        raise SettingsError(
            f"the rule must be synchronous {what}, since workers that run at their own pace take any samples; take "
            "every_step or diloco, for instance"
        )


def read_stream(
    stream: Stream,
    ledger: Ledger,
    order: GlobalOrder,
    batch_at: Callable[[int], int],
    is_over: Callable[[int], bool],
    cut: Callable[[Interval], StepReads],
    collate_fn: CollateFn | None,
    device: torch.device,
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step, until the data or the training is over.

    Args:
        stream: Samples.
        ledger: Positions that were claimed.
        order: Order of the positions.
        batch_at: Function that returns the global batch at a position.
        is_over: Function that returns whether the training ends before a position.
        cut: Function that divides a step.
        collate_fn: Function that makes a batch from a list of samples; None to stack them.
        device: Device of the batches.
    """
    while not is_over(start := ledger.next_claim):
        samples = stream.take(batch_at(start))
        if not samples:
            return
        step = cut(ledger.claim(order, len(samples)))
        read = [collate(samples[a - start : b - start], collate_fn) for a, b in step.parts]
        yield step.make_batches(read, device)
