"""A loss that carries its weight."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from paceline.parallel.tensor import full_tensor


@dataclass(frozen=True)
class Loss:
    """A mean and its weight, so that means of uneven parts can be combined exactly."""

    mean: Tensor
    """Mean loss, 0-dim; backward runs from it."""
    weight: float
    """Number of samples, or tokens, in the mean: `Batch.count`. 0 for a batch that must not count."""
    totals: Mapping[str, Tensor] = field(default_factory=dict)
    """Other sums over the same weight, by name (correct answers, for instance); 0-dim, detached."""

    @property
    def whole_mean(self) -> Tensor:
        """The mean as a plain tensor, also where it is computed from parts that ranks share."""
        return full_tensor(self.mean)
