"""Brightness, contrast, saturation and hue of images.

Shapes: B samples; C channels, H and W pixels of an image.
"""

import math

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from paceline.data.augment.base import ImageAugmentation, Samples, map_rows
from paceline.data.augment.draws import Draws, Numbers
from paceline.registry import register

_LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in brightness (ITU-R BT.601)."""
_NUM_COLOURS = 3


@register("colour")
class Colour(ImageAugmentation):
    """Brightness, contrast, saturation and hue, changed in this order by factors that are uniform around 1.

    Values are clipped to those of an image afterwards. Saturation and hue concern images of three channels only; hue
    turns colours around the axis of greys, which changes no brightness.
    """

    brightness: float = Field(0.4, ge=0, le=1)
    """Largest change of the factor of all values above black."""
    contrast: float = Field(0.4, ge=0, le=1)
    """Largest change of the factor of differences from the image's mean brightness."""
    saturation: float = Field(0.4, ge=0, le=1)
    """Largest change of the factor of differences from each pixel's brightness."""
    hue: float = Field(0.0, ge=0, le=0.5)
    """Largest turn of the hue, as a fraction of the circle of colours."""
    value_range: tuple[float, float] = (-1.0, 1.0)
    """Values of black and white in images of floats; those of bytes are 0 and 255."""

    def apply(self, samples: Samples, draws: Draws) -> Samples:
        """Return the samples with images of other colours."""
        spreads = (self.brightness, self.contrast, self.saturation)
        factors_B3 = np.stack([draws.uniform(1 - spread, 1 + spread) for spread in spreads], axis=1)
        turn_B = draws.uniform(-self.hue, self.hue) * (2 * math.pi)
        rows = np.arange(len(samples))
        for path in self.find_leaves(samples):
            changed = map_rows(
                lambda images, at: self._change(images, factors_B3[at], turn_B[at]), samples.get(path), rows
            )
            samples = samples.set(path, changed)
        return samples

    def _change(self, images: Tensor, factors_B3: Numbers, turn_B: Numbers) -> Tensor:
        is_bytes = images.dtype == torch.uint8
        black, white = (0.0, 255.0) if is_bytes else self.value_range
        x_BCHW = (images.float() - black) / (white - black)
        bright, contrast, saturation = torch.from_numpy(factors_B3).float().T[..., None, None, None]
        x_BCHW = (x_BCHW * bright).clamp(0, 1)
        mean_B111 = brightness_of(x_BCHW).mean(dim=(-2, -1), keepdim=True)
        x_BCHW = (mean_B111 + (x_BCHW - mean_B111) * contrast).clamp(0, 1)
        if x_BCHW.shape[-3] == _NUM_COLOURS:
            grey_B1HW = brightness_of(x_BCHW)
            x_BCHW = (grey_B1HW + (x_BCHW - grey_B1HW) * saturation).clamp(0, 1)
            if self.hue:
                x_BCHW = torch.einsum("bij,bjhw->bihw", turn_colours(torch.from_numpy(turn_B).float()), x_BCHW)
        x_BCHW = x_BCHW.clamp(0, 1) * (white - black) + black
        return x_BCHW.round().to(torch.uint8) if is_bytes else x_BCHW.to(images.dtype)


def brightness_of(x_BCHW: Tensor) -> Tensor:
    """Return the brightness of each pixel, as an image of one channel."""
    if x_BCHW.shape[-3] != _NUM_COLOURS:
        return x_BCHW.mean(dim=-3, keepdim=True)
    return (x_BCHW * x_BCHW.new_tensor(_LUMA)[:, None, None]).sum(dim=-3, keepdim=True)


def turn_colours(turn_B: Tensor) -> Tensor:
    """Return matrices (B, 3, 3) that turn red, green and blue around the axis of greys, in the space YIQ."""
    to_yiq = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
    turns = torch.eye(3).repeat(len(turn_B), 1, 1)
    turns[:, 1, 1] = turns[:, 2, 2] = turn_B.cos()
    turns[:, 1, 2], turns[:, 2, 1] = -turn_B.sin(), turn_B.sin()
    matrices: Tensor = torch.linalg.inv(to_yiq) @ turns @ to_yiq
    return matrices
