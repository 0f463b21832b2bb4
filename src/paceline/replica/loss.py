"""A loss that carries its weight."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """A mean and the weight it was taken over, so that means of uneven parts can be joined exactly."""

    mean: Tensor
    """0-dim; backward runs from it."""
    weight: float
    """Samples, or tokens, that it is the mean of: `Batch.count`. 0 for a batch that counts for nothing."""
    totals: Mapping[str, Tensor] = field(default_factory=dict)
    """Other sums over the same weight, by name (correct answers, for instance); 0-dim, detached."""
