"""Parts of images.

Shapes: B samples; C channels, H and W pixels of an image, S pixels of a side.
"""

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor

from paceline.data.augment.base import ImageAugmentation, Samples, make_rows
from paceline.data.augment.draws import Draws, Integers
from paceline.errors import DataError
from paceline.registry import register

_HELD_OUT_SCALE = 8 / 7
"""Shorter side of a held-out image, as a multiple of the part in its centre."""
_BOX_ATTEMPTS = 10
"""Attempts at a part that fits into the image, as in the usual implementations."""


@register("crop")
class Crop(ImageAugmentation):
    """A square part of each image at a random place, after padding (Krizhevsky 2009)."""

    size: int | None = Field(None, ge=1)
    """Height and width of the part in pixels; by default those of the image, which padding then moves."""
    padding: int = Field(4, ge=0)
    """Pixels that are added on each side."""
    fill: float = 0.0
    """Value of added pixels: 0 is the middle of images from -1 to 1, and black in bytes."""

    @property
    def keeps_values(self) -> bool:
        """Whether nothing is added to the values."""
        return not self.padding

    def apply(self, samples: Samples, draws: Draws) -> Samples:
        """Return the samples with parts of their images.

        Raises:
            DataError: An image is smaller than the part.
        """
        paths = self.find_leaves(samples)
        sizes_B2 = list_sizes(samples.get(paths[0]))
        target_B2 = sizes_B2 if self.size is None else np.full_like(sizes_B2, self.size)
        room_B2 = sizes_B2 + 2 * self.padding - target_B2
        if (room_B2 < 0).any():
            height, width = sizes_B2[(room_B2 < 0).any(axis=1)][0]
            raise DataError(
                f"an image must be at least as large as its crop with padding {self.padding}, {self.size} pixels, but "
                f"got {height} x {width}; choose a smaller size, or random_resized_crop"
            )
        top_B, left_B = draws.integers(room_B2[:, 0] + 1), draws.integers(room_B2[:, 1] + 1)

        def cut(image: Tensor, row: int) -> Tensor:
            height, width = target_B2[row]
            image = F.pad(image, (self.padding,) * 4, value=self.fill) if self.padding else image
            return image[..., top_B[row] : top_B[row] + height, left_B[row] : left_B[row] + width]

        for path in paths:
            samples = samples.set(path, make_rows(cut, samples.get(path), is_batch=samples.is_batch))
        return samples

    @property
    def changes_held_out(self) -> bool:
        """Whether images get another size."""
        return self.size is not None

    def apply_held_out(self, samples: Samples) -> Samples:
        """Return the samples with the centre of their images, of the same size as in training.

        Raises:
            DataError: An image is smaller than the part.
        """
        size = self.size
        assert size is not None

        def cut(image: Tensor, _: int) -> Tensor:
            height, width = image.shape[-2:]
            if min(height, width) + 2 * self.padding < size:
                raise DataError(
                    f"an image must be at least as large as its crop with padding {self.padding}, {size} pixels, but "
                    f"got {height} x {width}; choose a smaller size, or random_resized_crop"
                )
            return cut_centre(F.pad(image, (self.padding,) * 4, value=self.fill) if self.padding else image, size)

        for path in self.find_leaves(samples):
            samples = samples.set(path, make_rows(cut, samples.get(path), is_batch=samples.is_batch))
        return samples


@register("random_resized_crop")
class RandomResizedCrop(ImageAugmentation):
    """A part of random area and shape at a random place, resized to a square (Szegedy et al. 2015).

    The area is uniform over `scale`, the logarithm of the ratio of width to height over `ratio`. After ten parts that
    do not fit into the image, all of it is taken. Floats and bytes are resized bilinearly, with averaging where it gets
    smaller; other whole numbers, such as masks of classes, take the nearest pixel's.
    """

    size: int | None = Field(None, ge=1)
    """Height and width of the result in pixels; by default those of the image."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Least and largest area of the part, as a fraction of the image."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and largest ratio of its width to its height."""

    @field_validator("scale", "ratio")
    @classmethod
    def _check_range(cls, between: tuple[float, float]) -> tuple[float, float]:
        return check_range(between)

    def apply(self, samples: Samples, draws: Draws) -> Samples:
        """Return the samples with resized parts of their images."""
        paths = self.find_leaves(samples)
        sizes_B2 = list_sizes(samples.get(paths[0]))
        boxes_B4 = draw_boxes(draws, sizes_B2, self.scale, self.ratio)

        def cut(image: Tensor, row: int) -> Tensor:
            top, left, height, width = boxes_B4[row].tolist()
            target = tuple(sizes_B2[row].tolist()) if self.size is None else (self.size, self.size)
            return resize(image[..., top : top + height, left : left + width], target)

        for path in paths:
            samples = samples.set(path, make_rows(cut, samples.get(path), is_batch=samples.is_batch))
        return samples

    @property
    def changes_held_out(self) -> bool:
        """Whether images get another size."""
        return self.size is not None

    def apply_held_out(self, samples: Samples) -> Samples:
        """Return the samples with the centre of their images, resized to the same size as in training.

        The shorter side is resized to 8/7 of the size, as in the usual evaluation (256 for 224).
        """
        size = self.size
        assert size is not None

        def cut(image: Tensor, _: int) -> Tensor:
            scale = size * _HELD_OUT_SCALE / min(image.shape[-2:])
            target = tuple(max(size, round(side * scale)) for side in image.shape[-2:])
            return cut_centre(resize(image, target), size)

        for path in self.find_leaves(samples):
            samples = samples.set(path, make_rows(cut, samples.get(path), is_batch=samples.is_batch))
        return samples


def cut_centre(image: Tensor, size: int) -> Tensor:
    """Return the square in the middle of an image that is as large at least."""
    top, left = ((side - size) // 2 for side in image.shape[-2:])
    return image[..., top : top + size, left : left + size]


def draw_boxes(draws: Draws, sizes_B2: Integers, scale: tuple[float, float], ratio: tuple[float, float]) -> Integers:
    """Return top, left, height and width of a part of each image; all of it where no attempt fits."""
    boxes_B4 = np.concatenate([np.zeros_like(sizes_B2), sizes_B2], axis=1)
    is_open = np.ones(len(sizes_B2), dtype=bool)
    for _ in range(_BOX_ATTEMPTS):  # all of them for each sample, or its numbers would depend on the others
        area_B = draws.uniform(*scale) * sizes_B2.prod(axis=1)
        ratio_B = np.exp(draws.uniform(*np.log(ratio)))
        part_B2 = np.stack([np.sqrt(area_B / ratio_B), np.sqrt(area_B * ratio_B)], axis=1).round().astype(np.int64)
        fits = is_open & (part_B2 >= 1).all(axis=1) & (part_B2 <= sizes_B2).all(axis=1)
        place_B2 = np.stack([draws.integers(np.maximum(sizes_B2 - part_B2, 0)[:, i] + 1) for i in range(2)], axis=1)
        boxes_B4[fits] = np.concatenate([place_B2, part_B2], axis=1)[fits]
        is_open &= ~fits
    return boxes_B4


def resize(image: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return an image of another height and width, of the same type."""
    if image.shape[-2:] == size:
        return image
    planes = image.reshape(1, -1, *image.shape[-2:])
    if image.dtype.is_floating_point:
        resized = F.interpolate(planes, size, mode="bilinear", antialias=True)
    elif image.dtype == torch.uint8:
        resized = F.interpolate(planes.float(), size, mode="bilinear", antialias=True).round().to(torch.uint8)
    else:
        resized = F.interpolate(planes.double(), size, mode="nearest").to(image.dtype)
    return resized.reshape(*image.shape[:-2], *size)


def check_range(between: tuple[float, float]) -> tuple[float, float]:
    """Refuse a range that is empty, or holds numbers that are not positive."""
    if not 0 < between[0] <= between[1]:
        raise ValueError(
            f"a range must be of positive numbers, the smaller one first, but got {between}; exchange them"
        )
    return between


def list_sizes(leaf: Tensor | list[Tensor]) -> Integers:
    """Return height and width of each image, as an array (B, 2)."""
    return np.array([image.shape[-2:] for image in leaf], dtype=np.int64).reshape(-1, 2)
