"""Blends of two images, and of their labels.

Shapes: B samples; K classes.
"""

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from paceline.data.augment.base import ImageAugmentation, Samples
from paceline.data.augment.draws import Draws, Numbers
from paceline.data.augment.leaves import find_labels, get_leaf
from paceline.data.batch import describe
from paceline.errors import DataError
from paceline.registry import register


class Mixing(ImageAugmentation):
    """An operation that mixes each sample with a partner.

    Partners are the two samples beside each other in the epoch's order: each is mixed with the other, so that workers
    read one or two samples more for a micro-batch, whatever its size. An epoch's last sample may have no partner.
    Labels become probabilities of classes.
    """

    mixes: ClassVar[bool] = True

    alpha: float = Field(0.2, gt=0)
    """Concentration of the Beta distribution of a sample's own part: the smaller, the closer to 0 or 1."""
    probability: float = Field(1.0, ge=0, le=1)
    """Probability that a sample is mixed."""
    labels: str = ""
    """Path of the leaf of the labels; by default the second of a pair, or the one of that name."""
    num_classes: int = Field(0, ge=0)
    """Number of classes; 0 for that of the data."""

    def apply(self, samples: Samples, draws: Draws) -> Samples:
        """Return the samples, mixed.

        Raises:
            DataError: The labels are not classes, or their number is unknown.
        """
        own_B = np.where(draws.chance(self.probability), draws.beta(self.alpha), 1.0)
        own_B = np.where(samples.partners_B == np.arange(len(samples)), 1.0, own_B)
        partners_B = torch.from_numpy(samples.partners_B)
        paths = self.find_leaves(samples)
        path = self.labels or find_labels(samples.tree)
        labels_BK = self._open_labels(get_leaf(samples.tree, path), samples)
        part_B = own_B
        for leaf in paths:
            images = samples.get(leaf)
            assert isinstance(images, Tensor)
            same = draws.take(np.arange(len(samples)))  # all leaves alike
            mixed, part_B = self.mix(images, images[partners_B], own_B, same)
            samples = samples.set(leaf, mixed)
        own_B1 = torch.from_numpy(part_B).float()[:, None]
        return samples.set(path, own_B1 * labels_BK + (1 - own_B1) * labels_BK[partners_B])

    @abstractmethod
    def mix(self, images: Tensor, others: Tensor, own_B: Numbers, draws: Draws) -> tuple[Tensor, Numbers]:
        """Return images mixed with others, and the part of each that is its own."""

    def _open_labels(self, labels: object, samples: Samples) -> Tensor:
        """Return labels as probabilities of classes, float32."""
        if isinstance(labels, Tensor) and labels.is_floating_point() and labels.dim() == 2:
            return labels.float()
        num_classes = self.num_classes or samples.spec.num_classes
        if not num_classes:
            raise DataError(
                f"the number of classes must be known to {self.name}, but the data does not tell it; give num_classes"
            )
        if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
            raise DataError(
                f"the labels of samples that are mixed must be numbers of classes, but got {describe(labels)}; name "
                "the leaf that holds them in labels"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise DataError(
                f"labels must be from 0 to below {num_classes} for {self.name}, but got {int(labels.min())} to "
                f"{int(labels.max())}; give num_classes"
            )
        return F.one_hot(labels.long(), num_classes).float()


@register("mixup")
class Mixup(Mixing):
    """Blends of two samples: of all values, and of the labels alike (Zhang et al. 2018).

    Unlike in the paper, each sample of a batch has a part of its own.
    """

    def mix(self, images: Tensor, others: Tensor, own_B: Numbers, draws: Draws) -> tuple[Tensor, Numbers]:
        """Return the blends."""
        own = torch.from_numpy(own_B).float().reshape(-1, *[1] * (images.dim() - 1))
        blend = own * images.float() + (1 - own) * others.float()
        return (blend.round() if images.dtype == torch.uint8 else blend).to(images.dtype), own_B
