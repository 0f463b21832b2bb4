"""Base classes of data: samples under an index, read a batch at a time."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.data.batch import map_tensors
from paceline.data.order import Indices
from paceline.data.storage.base import Upcoming
from paceline.errors import DataError
from paceline.registry import Family


@dataclass(frozen=True)
class Spec:
    """Sizes of the data that a model is built for."""

    num_classes: int = 0
    """Number of classes, or vocabulary size of a language model; 0 if unknown."""
    input_shape: tuple[int, ...] = ()
    """Shape of one sample's input, without the batch dim."""


class Source(torch.utils.data.Dataset[Any]):
    """Samples under indices 0..len-1, read a batch at a time by a background thread, or by loader processes.

    A sample must depend on its index alone: a draw from a global random generator would also change the model's
    dropout, and could not be repeated on resume.
    """

    spec: Spec = Spec()
    """Sizes for models that are built from settings."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(self, indices: Indices) -> Any:
        """Return the samples at `indices`, in that order: see `Batch.data`."""

    def read_seeded(self, indices: Indices, seeds: Sequence[int]) -> Any:
        """Return the samples at `indices`, in a process that only reads.

        Args:
            indices: Indices of the samples, as in `read`.
            seeds: Seed of the global random generators for each sample; unused here, where samples do not depend on it.
        """
        return self.read(indices)

    def expect(self, upcoming: Upcoming) -> None:
        """Take note of the samples that a loader will read; unused here.

        A source of files passes it to its storage, with the function that returns where samples lie: see
        `Storage.expect`.
        """

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        return map_tensors(lambda tensor: tensor[0], self.read(np.array([index], dtype=np.int64)))

    def read_first(self) -> Any:
        """Return a batch of the first sample."""
        return self.read(np.arange(1))


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


class Data(Family):
    """Settings of the training data: its place, and the way it becomes samples."""

    family = "data"

    @abstractmethod
    def open(self) -> Splits:
        """Open the data.

        Raises:
            DataError: The data is missing, empty, damaged or of the wrong type.
        """
