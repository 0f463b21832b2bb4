"""A few numbers of a data set's samples, by which ranks notice that each has data of its own."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset, TensorDataset

_NUM_VALUES = 8
"""Values that are taken of each tensor."""


def sketch_dataset(dataset: Any) -> list[float] | None:
    """Return some numbers of a data set of torch's that lies in memory; None for any other.

    Only what is there already is looked at. To read a sample of somebody else's class would cost time, disturb random
    numbers, or a file that a loader process reads, and what it returns may rightly differ: as augmentation does.
    """
    if not isinstance(dataset, list | tuple | Tensor | TensorDataset | Subset) or not len(dataset):
        return None
    places = {0, len(dataset) // 3, 2 * len(dataset) // 3, len(dataset) - 1}
    return [number for place in sorted(places) for number in sketch_sample(_look_up(dataset, place))] or None


def sketch_sample(sample: Any) -> list[float]:
    """Return some numbers of a sample: the first of each of its tensors, and those that are no tensors."""
    numbers: list[float] = []
    for leaf in tree_leaves(sample):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            numbers += leaf.reshape(-1)[:_NUM_VALUES].astype(float).tolist()
        elif isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_complex():
            numbers += leaf.detach().reshape(-1)[:_NUM_VALUES].double().tolist()
        elif isinstance(leaf, int | float):
            numbers.append(float(leaf))
    return [number if math.isfinite(number) else 0.0 for number in numbers]


def is_alike(mine: Sequence[float] | None, theirs: Sequence[float] | None) -> bool:
    """Return whether two sketches may be of the same data, computed on machines that round in different ways."""
    if mine is None or theirs is None:
        return True
    pairs = zip(mine, theirs, strict=False)
    return len(mine) == len(theirs) and all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5) for a, b in pairs)


def _look_up(dataset: Any, place: int) -> Any:
    """Return what `dataset` holds of a sample, as far as it is in memory."""
    if type(dataset) is TensorDataset:
        return [tensor[place] for tensor in dataset.tensors]
    if type(dataset) is Subset:
        inner = int(dataset.indices[place])
        return [inner, _look_up(dataset.dataset, inner)]
    return dataset[place] if type(dataset) in (list, tuple, Tensor) else None
