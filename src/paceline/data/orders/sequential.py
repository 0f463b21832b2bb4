"""The order of the data itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.data.orders.base import Arrangement, Indices, SampleOrder
from paceline.data.permutation import Words
from paceline.registry import register


@register("sequential")
class Sequential(SampleOrder):
    """Every epoch has the data's own order: for data that was mixed when it was written, or must keep its order."""

    def arrange(self, shard_sizes: Sequence[int], seed: int) -> Arrangement:
        """Return the arrangement, which needs neither shards nor a seed."""
        return _SequentialArrangement(sum(shard_sizes))


class _SequentialArrangement(Arrangement):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def samples_at(self, epoch: int, places: Words) -> Indices:
        return places.astype(np.int64)

    def describe(self) -> dict[str, Any]:
        return {"name": Sequential.name}
