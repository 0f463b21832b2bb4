"""Padding of samples of unequal length to the longest of their batch.

Shapes: B samples of a batch, T their largest length.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from paceline.data.augment.leaves import get_leaf, list_leaves, set_leaf
from paceline.data.batch import LABELS, describe
from paceline.data.map_source import collate
from paceline.errors import DataError
from paceline.registry import Settings


class Padding(Settings):
    """A `collate_fn` that pads leaves along their first dim to the longest of the batch, then stacks as torch does."""

    leaves: tuple[str, ...] = ()
    """Paths of the leaves that are padded, such as ids, or 0 for the first of a pair; the first one's length is that of
    a sample, and all get one length. By default all tensors, arrays and lists of numbers, but for those that are
    equally long in all samples and not as long as the first one."""
    value: float = 0
    """Value of what is added."""
    label_value: float = -100
    """Value of what is added to labels, which no loss of ours counts: the second of a pair, or what a mapping has under
    labels, label, targets or target."""
    mask: str = ""
    """Key under which a mapping gets a mask x_BT, true for what is no padding, such as attention_mask. A pair, with any
    name here, gets it as one more input; none by default."""
    multiple_of: int = Field(1, ge=1)
    """Number of which padded lengths are multiples."""

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch of a list of samples.

        Raises:
            DataError: A leaf is missing or has no length, or samples cannot be stacked for another reason.
        """
        samples = [_make_rows(sample) for sample in samples]
        leaves = self._find_leaves(samples[0])
        lengths = [self.length_of(sample) for sample in samples] if self.mask else []
        columns = {path: [_as_tensor(get_leaf(sample, path), path) for sample in samples] for path in leaves}
        sizes = {path: [len(row) for row in rows] for path, rows in columns.items()}
        padded_leaves = [
            path for path in leaves if self.leaves or len(set(sizes[path])) > 1 or sizes[path] == sizes[leaves[0]]
        ]
        longest = max(max(sizes[path]) for path in padded_leaves)
        target = -(-longest // self.multiple_of) * self.multiple_of
        for path in padded_leaves:
            fill = self.label_value if _is_label(samples[0], path) else self.value
            padded = [_pad(row, target, fill) for row in columns[path]]
            samples = [set_leaf(sample, path, row) for sample, row in zip(samples, padded, strict=True)]
        batch = collate(samples, None)
        return self._with_mask(batch, lengths, target) if self.mask else batch

    def length_of(self, sample: Any) -> int:
        """Return the length of a sample: that of the first leaf that is padded.

        Raises:
            DataError: There is no such leaf, or it has no length.
        """
        sample = _make_rows(sample)
        path = self._find_leaves(sample)[0]
        return len(_as_tensor(get_leaf(sample, path), path))

    def _find_leaves(self, sample: Any) -> tuple[str, ...]:
        if self.leaves:
            return self.leaves
        found = [path for path, leaf in list_leaves(sample) if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim]
        if not found:
            raise DataError(
                "samples that are padded must hold a tensor or an array with a length, or a list of numbers, but got "
                f"{describe(sample)}; return such from the data set"
            )
        return tuple(found)

    def _with_mask(self, batch: Any, lengths: list[int], longest: int) -> Any:
        mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
        if isinstance(batch, Mapping):
            return {**batch, self.mask: mask}
        if isinstance(batch, tuple | list) and len(batch) == 2:
            inputs, targets = batch
            return (*(inputs if isinstance(inputs, tuple | list) else (inputs,)), mask), targets
        raise DataError(
            f"samples must be mappings, or pairs (inputs, targets), to get a mask, but got {describe(batch)}; return "
            "such from the data set, or leave padding.mask out"
        )


def _is_label(sample: Any, path: str) -> bool:
    """Return whether a leaf holds labels."""
    if isinstance(sample, tuple | list) and len(sample) == 2:
        return path.partition(".")[0] == str((getattr(sample, "_fields", None) or range(2))[1])
    return path.rpartition(".")[2] in LABELS


def _make_rows(tree: Any) -> Any:
    """Return a sample with its lists of numbers as tensors."""
    if isinstance(tree, list) and all(isinstance(one, int | float) for one in tree):
        return torch.tensor(tree, dtype=None if tree else torch.int64)
    if type(tree) is dict:
        return {name: _make_rows(value) for name, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_make_rows(value) for value in tree)
    return tree


def _as_tensor(leaf: Any, path: str) -> Tensor:
    tensor = torch.as_tensor(leaf) if isinstance(leaf, Tensor | np.ndarray) else torch.zeros(())
    if not tensor.dim():
        raise DataError(
            f"a leaf that is padded must be a tensor, an array or a list of numbers, but {path or 'it'} is "
            f"{describe(leaf)}; name others in padding.leaves"
        )
    return tensor


def _pad(row: Tensor, length: int, fill: float) -> Tensor:
    """Return a row of some length; as int64 if its type does not hold what is added, such as -100 in uint8."""
    if not (row.is_floating_point() or row.is_complex()):
        low, high = (0, 1) if row.dtype == torch.bool else (torch.iinfo(row.dtype).min, torch.iinfo(row.dtype).max)
        row = row if low <= fill <= high else row.long()
    if len(row) == length:
        return row
    padded = row.new_full((length, *row.shape[1:]), fill)
    padded[: len(row)] = row
    return padded
