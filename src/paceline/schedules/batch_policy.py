"""Batch policies: the global batch where the number of workers changes, and the learning rate with it."""

from abc import abstractmethod
from typing import Literal

from pydantic import Field

from paceline.registry import Family, register


class BatchPolicy(Family):
    """Global batch for a number of workers, when a run starts or goes on."""

    family = "batch policy"

    scaling: Literal["none", "linear", "square_root"] = "none"
    """Rule by which learning rates follow the batch, if that is not `global_batch`."""

    @abstractmethod
    def batch_of(self, global_batch: int, num_workers: int) -> int:
        """Return the global batch of `num_workers` workers in a run with `global_batch`."""


@register("fixed")
class FixedBatch(BatchPolicy):
    """The run's `global_batch` on any number of workers: what is learnt does not depend on it."""

    scaling: Literal["none"] = "none"
    """No rule, since the batch stays."""

    def batch_of(self, global_batch: int, num_workers: int) -> int:
        """Return `global_batch`."""
        return global_batch


@register("per_worker")
class PerWorkerBatch(BatchPolicy):
    """A fixed number of samples per worker: more workers take larger steps.

    Learning rates are those of the run at `global_batch` samples, and k times (linear, for SGD: Goyal 2017) or the root
    of k times (square_root, for Adam: Hoffer 2017) as large at k times as many. With `global_batch` = samples *
    num_workers it is the fixed batch.
    """

    samples: int = Field(ge=1)
    """Samples per step of each worker."""
    scaling: Literal["none", "linear", "square_root"] = "linear"
    """Rule by which learning rates follow the batch."""

    def batch_of(self, global_batch: int, num_workers: int) -> int:
        """Return `samples` for each worker."""
        return self.samples * num_workers
