"""Base classes of data: samples under an index, read a batch at a time."""

import contextlib
import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.data.batch import map_tensors
from paceline.data.orders import Arrangement, Indices, SampleOrder
from paceline.data.storage.base import Upcoming
from paceline.errors import BadSample, DataError, SettingsError
from paceline.registry import Family


@dataclass(frozen=True)
class Spec:
    """Sizes of the data that a model is built for."""

    num_classes: int = 0
    """Number of classes, or vocabulary size of a language model; 0 if unknown."""
    input_shape: tuple[int, ...] = ()
    """Shape of one sample's input, without the batch dim."""
    classes: tuple[str, ...] = field(default=(), compare=False)
    """Names of the classes, in the order of their numbers; empty if unknown."""


class Source(torch.utils.data.Dataset[Any]):
    """Samples under indices 0..len-1, read a batch at a time by a background thread, or by loader processes.

    A sample must depend on its index alone: a draw from a global random generator would also change the model's
    dropout, and could not be repeated on resume. Only a source that makes samples with the model itself, which `watch`
    gives it, depends on that too.
    """

    spec: Spec = Spec()
    """Sizes for models that are built from settings."""
    is_thread_safe: bool = False
    """Whether several threads may read at once; else only processes do."""
    decodes_samples: bool = False
    """Whether `decode` returns a list of samples, which `collate` makes a batch of."""
    stacks: bool = True
    """Whether `collate` stacks samples, so that a batch has the same leaves as a sample."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Function that makes a batch from a list of samples, if the source was given one."""
    grows: bool = False
    """Whether shards may be added behind those that it has: see `list_shards`."""
    steps_ahead: int | None = None
    """Steps that may be read before the training asks for them, which a source that makes samples with the model limits
    to that lag; 0 for samples of its newest parameters, None for as many as a loader likes."""

    @property
    def fingerprint(self) -> str:
        """Identifier of the content, which all workers must have alike, and a resumed run too; empty if unknown."""
        return ""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @property
    def shard_sizes(self) -> Sequence[int]:
        """Number of samples of each shard, such as a file, that is read as one; samples are numbered through them."""
        return [len(self)]

    def arrange(self, order: SampleOrder, seed: int) -> Arrangement:
        """Return the arrangement of each epoch's samples in an `order`."""
        return order.arrange(self.shard_sizes, seed)

    @abstractmethod
    def read(self, indices: Indices) -> Any:
        """Return the samples at `indices`, in that order: see `Batch.data`."""

    def fetch(self, indices: Indices) -> Any:
        """Return what `decode` needs to read the samples at `indices`, such as the bytes of files; here the indices."""
        return indices

    def decode(self, fetched: Any, seeds: Sequence[int] | None = None) -> Any:
        """Return the samples that were fetched: a batch, or if `decodes_samples` a list of samples.

        Args:
            fetched: Result of `fetch`.
            seeds: Seed of the global random generators for each sample, in a process that only reads; unused here,
                where samples do not depend on it.
        """
        return self.read(fetched)

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch of a list of samples, if `decodes_samples`."""
        raise NotImplementedError(f"{type(self).__name__} decodes batches")

    def with_collate(self, collate_fn: Callable[[list[Any]], Any]) -> "Source":
        """Return the source with another function that makes a batch from a list of samples.

        Raises:
            SettingsError: The source makes batches itself.
        """
        raise SettingsError(
            f"padding must be left out where the data makes batches itself, but got it with {type(self).__name__}; "
            "change what its `read` returns"
        )

    def expect(self, upcoming: Upcoming) -> None:
        """Take note of the samples that a loader will read; unused here.

        A source of files passes it to its storage, with the function that returns where samples lie: see
        `Storage.expect`.
        """

    def recognises(self, fingerprint: str) -> bool:
        """Return whether its content is that of a fingerprint, or has grown from there."""
        return fingerprint == self.fingerprint

    def list_shards(self, *, looks: bool) -> list[Any]:
        """Return, as JSON, what identifies each shard, in order; only for a source that grows.

        Args:
            looks: Whether to look for new ones; else those that are known already.

        Raises:
            DataError: A shard that was there is missing, has changed, or is not behind those before.
        """
        raise NotImplementedError(f"{type(self).__name__} does not grow")

    def take_shards(self, num_shards: int) -> None:
        """Have the samples of the first shards of `list_shards`; only for a source that grows."""
        raise NotImplementedError(f"{type(self).__name__} does not grow")

    def watch(self, module: nn.Module) -> None:
        """Take note of the module that is trained, or evaluated, on the samples; unused here.

        A source that makes samples with it reads its parameters.
        """

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        return map_tensors(lambda tensor: tensor[0], self.read(np.array([index], dtype=np.int64)))

    def read_first(self) -> Any:
        """Return a batch of the first sample, or of the next if it is bad.

        Raises:
            BadSample: The first hundred samples cannot be read.
        """
        for index in range(min(len(self), 100) - 1):
            with contextlib.suppress(BadSample):  # whether that is fatal, a loader says when it meets the sample
                return self.read(np.array([index]))
        return self.read(np.array([min(len(self), 100) - 1]))


class IterableSource(torch.utils.data.IterableDataset[Any]):
    """Samples that can only be read one after another.

    Args:
        dataset: Data set, iterated anew for each pass.
        collate: Function that makes a batch from a list of samples.
        spec: Sizes for models that are built from settings.
    """

    def __init__(
        self,
        dataset: torch.utils.data.IterableDataset[Any],
        collate: Callable[[list[Any]], Any],
        spec: Spec | None = None,
    ) -> None:
        self.dataset, self.collate, self.spec = dataset, collate, spec or Spec()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def with_collate(self, collate_fn: Callable[[list[Any]], Any]) -> "IterableSource":
        """Return the samples with another function that makes a batch from a list of them."""
        return IterableSource(self.dataset, collate_fn, self.spec)

    def read_first(self) -> Any:
        """Return a batch of the first sample.

        Raises:
            DataError: The data set is empty.
        """
        samples = [sample for sample, _ in zip(self, range(1), strict=False)]
        if not samples:
            raise DataError(f"a data set must have samples, but {type(self.dataset).__name__} yields none")
        return self.collate(samples)


@dataclass(frozen=True)
class Splits:
    """Training data, and held-out data for evaluation or None; they share no sample."""

    train: Source | IterableSource
    held_out: Source | IterableSource | None = None
    drop_last: bool = False
    """Whether an epoch's last samples are dropped if they are too few for a full global batch."""
    shuffle: bool | None = None
    """Whether each epoch has its own random order; true by default, unless `train` is iterable."""
    num_processes: int = 0
    """Number of processes with which a worker reads, if the run asks for none."""
    batch_size: int | None = None
    """Batch size of the DataLoader that `train` came from; the run's global batch counts."""

    def with_collate(self, collate_fn: Callable[[list[Any]], Any]) -> "Splits":
        """Return the data with another function that makes a batch from a list of samples.

        Raises:
            SettingsError: The data makes batches itself.
        """
        held_out = None if self.held_out is None else self.held_out.with_collate(collate_fn)
        return dataclasses.replace(self, train=self.train.with_collate(collate_fn), held_out=held_out)


class Data(Family):
    """Settings of the training data: its place, and the way it becomes samples."""

    family = "data"

    @abstractmethod
    def open(self) -> Splits:
        """Open the data.

        Raises:
            DataError: The data is missing, empty, damaged or of the wrong type.
        """
