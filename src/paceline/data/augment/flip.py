"""Mirror images."""

import numpy as np
from pydantic import Field
from torch import Tensor

from paceline.data.augment.base import ImageAugmentation, Samples, map_rows
from paceline.data.augment.draws import Draws, Integers
from paceline.registry import register


@register("flip")
class Flip(ImageAugmentation):
    """Mirror images: left and right, or top and bottom, are exchanged."""

    horizontal: float = Field(0.5, ge=0, le=1)
    """Probability that left and right are exchanged."""
    vertical: float = Field(0.0, ge=0, le=1)
    """Probability that top and bottom are exchanged."""

    @property
    def keeps_values(self) -> bool:
        """Whether values are only moved, which they are."""
        return True

    def apply(self, samples: Samples, draws: Draws) -> Samples:
        """Return the samples, some of them mirrored."""
        chosen = [(-1, draws.chance(self.horizontal)), (-2, draws.chance(self.vertical))]
        for path in self.find_leaves(samples):
            leaf = samples.get(path)
            for dim, is_flipped in chosen:

                def flip(images: Tensor, rows: Integers, dim: int = dim) -> Tensor:
                    return images.flip(dim)

                leaf = map_rows(flip, leaf, np.flatnonzero(is_flipped))
            samples = samples.set(path, leaf)
        return samples
