"""Images with a rectangle of another, and labels in proportion."""

import numpy as np
from pydantic import Field
from torch import Tensor

from paceline.data.augment.draws import Draws, Numbers
from paceline.data.augment.mixup import Mixing
from paceline.registry import register


@register("cutmix")
class CutMix(Mixing):
    """Images with a rectangle from their partner, at the same place; labels by its area (Yun et al. 2019).

    The rectangle has the image's proportions, and a centre that is uniform over the image; beyond its edge it is cut
    off, and the label follows what is left.
    """

    alpha: float = Field(1.0, gt=0)
    """Concentration of the Beta distribution of a sample's own part, before rectangles are cut off at the edge."""

    def mix(self, images: Tensor, others: Tensor, own_B: Numbers, draws: Draws) -> tuple[Tensor, Numbers]:
        """Return the images, and the part that is their own."""
        mixed, size = images.clone(), np.array(images.shape[-2:])
        side_B2 = (size * np.sqrt(1 - own_B)[:, None]).astype(np.int64)
        centre_B2 = np.stack([draws.integers(np.full(len(own_B), length)) for length in size], axis=1)
        begin_B2 = np.clip(centre_B2 - side_B2 // 2, 0, size)
        end_B2 = np.clip(centre_B2 - side_B2 // 2 + side_B2, 0, size)
        for row, ((top, left), (bottom, right)) in enumerate(zip(begin_B2, end_B2, strict=True)):
            mixed[row, ..., top:bottom, left:right] = others[row, ..., top:bottom, left:right]
        return mixed, 1 - (end_B2 - begin_B2).prod(axis=1) / size.prod()
