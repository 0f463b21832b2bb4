"""Contract of orders: settings that arrange the samples of each epoch, given the sizes of the data's shards."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.data.permutation import Words
from paceline.registry import Family

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


class Arrangement(ABC):
    """Arrangement of the samples of each epoch: a pure function, of which nothing needs to be saved."""

    num_samples: int
    """Number of samples of an epoch."""

    @abstractmethod
    def samples_at(self, epoch: int, places: Words) -> Indices:
        """Return the samples' indices in the data set.

        Args:
            epoch: Number of the epoch, from 0.
            places: Places in the epoch, uint64, from 0 to below `num_samples`.
        """

    def epochs_at(self, epoch: int, places: Words) -> Indices:
        """Return how often each sample at these places was used before in whole passes over its source."""
        return np.full(len(places), epoch, dtype=np.int64)

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint knows the arrangement by, as JSON, beside the number of samples and the seed."""


class SampleOrder(Family):
    """Settings of the order in which the samples of an epoch are used."""

    family = "order"
    setting = "order"

    @abstractmethod
    def arrange(self, shard_sizes: Sequence[int], seed: int) -> Arrangement:
        """Return the arrangement of data.

        Args:
            shard_sizes: Number of samples of each shard; samples are numbered through, shard after shard.
            seed: Random seed of all epochs.
        """
