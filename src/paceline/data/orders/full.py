"""The order in which all samples of an epoch are mixed."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.data.orders.base import Arrangement, Indices, SampleOrder
from paceline.data.permutation import Words, derive_seed, permute
from paceline.registry import register


@register("full")
class Full(SampleOrder):
    """Each epoch is a random permutation of all samples.

    It is computed where it is read (a Feistel network over the index bits, walked until it lands inside the epoch:
    Black and Rogaway 2002): a data set of any size costs no memory. Neighbours in a batch come from any shards.
    """

    def arrange(self, shard_sizes: Sequence[int], seed: int) -> Arrangement:
        """Return the arrangement, which knows no shards."""
        return _FullArrangement(sum(shard_sizes), seed)


class _FullArrangement(Arrangement):
    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self._seed = num_samples, seed

    def samples_at(self, epoch: int, places: Words) -> Indices:
        return permute(places, self.num_samples, derive_seed(self._seed, epoch)).astype(np.int64)

    def describe(self) -> dict[str, Any]:
        return {"name": Full.name}
