"""Held-out samples as a training's augmentation leaves them: with the centre of an image in place of a random part."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.data.augment.augmenter import open_operation
from paceline.data.augment.base import Augmentation, Samples
from paceline.data.base import Source
from paceline.data.orders import Indices


class HeldOutSource(Source):
    """Held-out samples of one size with those that a model is trained on.

    Args:
        source: Held-out samples.
        operations: Operations of the training that change held-out samples.
    """

    def __init__(self, source: Source, operations: Sequence[Augmentation]) -> None:
        self.source, self.spec = source, source.spec
        self._operations = operations

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.source)

    @property
    def fingerprint(self) -> str:
        """Identifier of the content."""
        return self.source.fingerprint

    @property
    def shard_sizes(self) -> Sequence[int]:
        """Number of samples of each shard."""
        return self.source.shard_sizes

    def read(self, indices: Indices) -> Any:
        """Return samples, each with the centre of its image."""
        if not self.source.decodes_samples:
            return self._change(self.source.read(indices), len(indices), is_batch=True)
        samples = self.source.decode(self.source.fetch(indices))
        return self.source.collate(self._change(samples, len(indices), is_batch=False))

    def _change(self, tree: Any, num_samples: int, *, is_batch: bool) -> Any:
        samples = Samples(tree, np.arange(num_samples), self.spec, is_batch)
        for operation in self._operations:
            samples = operation.apply_held_out(samples)
        return samples.tree


def open_held_out(source: Source, augment: Sequence[Any]) -> Source:
    """Return held-out samples as augmentation leaves them: unchanged where it does not change their sizes."""
    operations = [open_operation(each) for each in augment]
    changing = [each for each in operations if isinstance(each, Augmentation) and each.changes_held_out]
    return HeldOutSource(source, changing) if changing else source
