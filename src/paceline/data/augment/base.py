"""Base class of augmentation: an operation on samples, with random numbers of their own.

Shapes: B samples; C channels, H and W pixels of an image.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.data.augment.draws import Draws, Integers
from paceline.data.augment.leaves import as_tensor, find_images, get_leaf, set_leaf
from paceline.data.base import Spec
from paceline.registry import Family


@dataclass(frozen=True)
class Samples:
    """Some samples: a batch, or a list of those that have other sizes than one another."""

    tree: Any
    """Batch; or list of samples."""
    partners_B: Integers
    """Row of the sample that each one is mixed with."""
    spec: Spec
    """Sizes of the data."""
    is_batch: bool = True

    def __len__(self) -> int:
        return len(self.partners_B)

    @property
    def first(self) -> Any:
        """The batch, or the first sample."""
        return self.tree if self.is_batch else self.tree[0]

    def get(self, path: str) -> Tensor | list[Tensor]:
        """Return a leaf: a tensor of all samples, or one of each."""
        if self.is_batch:
            return as_tensor(get_leaf(self.tree, path), path)
        return [as_tensor(get_leaf(sample, path), path) for sample in self.tree]

    def set(self, path: str, leaf: Any) -> "Samples":
        """Return the samples with another leaf."""
        if self.is_batch:
            return self._with(set_leaf(self.tree, path, leaf))
        return self._with([set_leaf(sample, path, one) for sample, one in zip(self.tree, leaf, strict=True)])

    def _with(self, tree: Any) -> "Samples":
        return Samples(tree, self.partners_B, self.spec, self.is_batch)


class Augmentation(Family):
    """Settings of an operation that changes samples at random, in training only."""

    family = "augmentation"
    setting = "augment"
    mixes: ClassVar[bool] = False
    """Whether the operation mixes each sample with a partner."""

    @property
    def keeps_values(self) -> bool:
        """Whether it only leaves out and moves values, so that it may come before samples are collated.

        Then it works on what the source decodes, such as the bytes of images that are not yet floats.
        """
        return False

    @property
    def draws_globally(self) -> bool:
        """Whether it may draw from the global random generators, so that a process must read."""
        return False

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may apply it at once."""
        return True

    @property
    def changes_held_out(self) -> bool:
        """Whether the operation changes held-out samples, by `apply_held_out`."""
        return False

    def apply_held_out(self, samples: Samples) -> Samples:
        """Return held-out samples, made comparable with the changed ones; here unchanged."""
        return samples

    @abstractmethod
    def apply(self, samples: Samples, draws: Draws) -> Samples:
        """Return the samples, changed; tensors are never changed in place.

        Args:
            samples: Samples.
            draws: Random numbers, which depend on seed, epoch, sample and operation alone.

        Raises:
            DataError: The samples are of another kind.
        """


class ImageAugmentation(Augmentation):
    """An operation on images, whose last three dims are channels, height and width.

    Values are floats, or bytes from 0 to 255.
    """

    leaves: tuple[str, ...] = ()
    """Paths of the leaves of a sample that it changes, such as image or 0 for the first of a pair; all alike, as an
    image and its mask. By default the only one with three dims."""

    def find_leaves(self, samples: Samples) -> Sequence[str]:
        """Return the paths of the leaves."""
        return self.leaves or (find_images(samples.first, is_batch=samples.is_batch),)


def map_rows(
    change: Callable[[Tensor, Integers], Tensor], leaf: Tensor | list[Tensor], rows: Integers
) -> Tensor | list[Tensor]:
    """Return a leaf with some of its rows changed by a function of several rows of equal size and their numbers."""
    if isinstance(leaf, Tensor):
        if len(rows) == len(leaf):
            return change(leaf, rows)
        changed = leaf.clone()
        if len(rows):
            where = torch.from_numpy(rows)
            changed[where] = change(leaf[where], rows)
        return changed
    parts = list(leaf)
    for row in rows:
        parts[row] = change(leaf[row][None], rows[rows == row])[0]
    return parts


def make_rows(
    make: Callable[[Tensor, int], Tensor], leaf: Tensor | list[Tensor], *, is_batch: bool
) -> Tensor | list[Tensor]:
    """Return a leaf made anew from each row and its number, all of one size if it is a batch."""
    made = [make(image, row) for row, image in enumerate(leaf)]
    return torch.stack(made) if is_batch else made
