"""Rectangles of images that are overwritten.

Shapes: B samples; C channels, H and W pixels of an image.
"""

from functools import partial
from typing import Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from paceline.data.augment.base import ImageAugmentation, Samples, map_rows
from paceline.data.augment.crop import check_range, draw_boxes, list_sizes
from paceline.data.augment.draws import Draws, Integers
from paceline.registry import register


@register("erase")
class Erase(ImageAugmentation):
    """A rectangle of some images, overwritten (random erasing, Zhong et al. 2020; cutout, DeVries and Taylor 2017).

    The area of the rectangle is uniform over `scale`, the logarithm of the ratio of its sides over `ratio`. An image
    into which ten of them do not fit stays as it is.
    """

    probability: float = Field(0.5, ge=0, le=1)
    """Probability that an image is changed."""
    scale: tuple[float, float] = (0.02, 0.33)
    """Least and largest area of the rectangle, as a fraction of the image."""
    ratio: tuple[float, float] = (0.3, 3.3)
    """Least and largest ratio of its width to its height."""
    fill: float | Literal["noise"] = 0.0
    """Value of its pixels; or noise, which is uniform over `value_range`."""
    value_range: tuple[float, float] = (-1.0, 1.0)
    """Values of black and white in images of floats, for noise; those of bytes are 0 and 255."""

    @field_validator("scale", "ratio")
    @classmethod
    def _check_range(cls, between: tuple[float, float]) -> tuple[float, float]:
        return check_range(between)

    def apply(self, samples: Samples, draws: Draws) -> Samples:
        """Return the samples with rectangles of some images overwritten."""
        is_chosen, noise = draws.chance(self.probability), draws.branch()
        for path in self.find_leaves(samples):
            leaf = samples.get(path)
            sizes_B2 = list_sizes(leaf)
            boxes_B4 = draw_boxes(draws.take(np.arange(len(samples))), sizes_B2, self.scale, self.ratio)
            rows = np.flatnonzero(is_chosen & (boxes_B4[:, 2:] != sizes_B2).any(axis=1))
            samples = samples.set(path, map_rows(partial(self._erase, boxes_B4, noise), leaf, rows))
        return samples

    def _erase(self, boxes_B4: Integers, noise: Draws, images: Tensor, rows: Integers) -> Tensor:
        images = images.clone()
        for image, row in zip(images, rows, strict=True):
            top, left, height, width = boxes_B4[row].tolist()
            part = image[..., top : top + height, left : left + width]
            part.copy_(self._fill(part, noise.take(np.array([row]))))
        return images

    def _fill(self, part: Tensor, noise: Draws) -> Tensor:
        if self.fill != "noise":
            return torch.full_like(part, self.fill)
        low, high = (0.0, 256.0) if part.dtype == torch.uint8 else self.value_range
        return torch.from_numpy(low + (high - low) * noise.grid(part.numel())).reshape(part.shape).to(part.dtype)
