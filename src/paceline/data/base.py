"""What every source of data is: samples under an index, read a batch at a time."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.data.batch import map_tensors
from paceline.data.order import Indices
from paceline.errors import DataError
from paceline.registry import Family


@dataclass(frozen=True)
class Spec:
    """What a model must know of its data to be built."""

    num_classes: int = 0
    """Classes of a classification, or the vocabulary of a language model; 0 if not known."""
    input_shape: tuple[int, ...] = ()
    """Shape of one sample's input, without the batch dim."""


class Source(torch.utils.data.Dataset[Any]):
    """Samples under indices 0..len-1, read a batch at a time by a background thread, or by loader processes.

    What is read must depend on the index alone: a draw from a global random generator would also change what the
    model's dropout draws, and could not be repeated on resume.
    """

    spec: Spec = Spec()
    """What a model that is built from settings must know of the data."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(self, indices: Indices) -> Any:
        """Return the samples at `indices`, in that order: see `Batch.data`."""

    def read_seeded(self, indices: Indices, seeds: Sequence[int]) -> Any:
        """Return the samples at `indices`, in a process that does nothing else.

        Args:
            indices: As in `read`.
            seeds: For each sample, the seed of the global random generators while it is made; needed only where it
                depends on them, which those of this class do not.
        """
        return self.read(indices)

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        return map_tensors(lambda tensor: tensor[0], self.read(np.array([index], dtype=np.int64)))

    def read_first(self) -> Any:
        """Return a batch of the first sample."""
        return self.read(np.arange(1))


class IterableSource(torch.utils.data.IterableDataset[Any]):
    """Samples that can only be read one after another.

    Args:
        dataset: Iterated anew for each pass.
        collate: Makes a batch of a list of samples.
        spec: What a model that is built from settings must know of the data.
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
            DataError: There is none.
        """
        samples = [sample for sample, _ in zip(self, range(1), strict=False)]
        if not samples:
            raise DataError(f"a data set must have samples, but {type(self.dataset).__name__} yields none")
        return self.collate(samples)


@dataclass(frozen=True)
class Splits:
    """Data to train on, and data held out to judge by, which share no sample, or None where nothing is."""

    train: Source | IterableSource
    held_out: Source | IterableSource | None = None
    drop_last: bool = False
    """Whether an epoch's last samples are left out where they are too few for a whole global batch."""
    shuffle: bool | None = None
    """Whether each epoch has an order of its own; by default, unless `train` is iterable."""
    num_processes: int = 0
    """Processes that a worker reads with, where the run asks for none."""


class Data(Family):
    """Settings that say which data to train on and how to turn it into samples."""

    family = "data"

    @abstractmethod
    def open(self) -> Splits:
        """Open the data.

        Raises:
            DataError: It is missing, empty, damaged or of the wrong type.
        """
