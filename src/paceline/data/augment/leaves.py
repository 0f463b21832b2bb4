"""Leaves of a tree: the tensors in a sample, or batch, under the names of the places that lead to them."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.data.batch import LABELS, describe, is_record
from paceline.errors import DataError

_IMAGE_DIMS = 3
"""Dims of an image: channels, height and width."""


def list_leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each leaf: keys, numbers of places and names of fields, joined by dots."""
    if isinstance(tree, Mapping):
        inside = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, tuple | list):
        names = getattr(tree, "_fields", None) or range(len(tree))
        inside = [(str(name), value) for name, value in zip(names, tree, strict=True)]
    elif is_record(tree):
        inside = [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree) if field.init]
    else:
        yield path, tree
        return
    for name, value in inside:
        yield from list_leaves(value, f"{path}.{name}" if path else name)


def get_leaf(tree: Any, path: str) -> Any:
    """Return the leaf at a path; an empty one is that of a tree that is one leaf.

    Raises:
        DataError: There is none; the message lists those that there are.
    """
    for found, value in list_leaves(tree):
        if found == path:
            return value
    known = ", ".join(found for found, _ in list_leaves(tree)) or "one tensor without a name"
    raise DataError(
        f"a leaf of an augmentation must be one of the samples', but got {path!r} with samples of {describe(tree)}; "
        f"known: {known}"
    )


def set_leaf(tree: Any, path: str, value: Any) -> Any:
    """Return a tree with another value at a path that exists."""
    if not path:
        return value
    name, _, rest = path.partition(".")
    if isinstance(tree, Mapping):
        key = next(key for key in tree if str(key) == name)
        if type(tree) is dict:
            return {**tree, key: set_leaf(tree[key], rest, value)}
        changed: Any = copy.copy(tree)  # such as a BatchEncoding of transformers, with its other attributes
        changed[key] = set_leaf(tree[key], rest, value)
        return changed
    if isinstance(tree, tuple | list):
        names = [str(each) for each in getattr(tree, "_fields", None) or range(len(tree))]
        items = [set_leaf(item, rest, value) if name == each else item for each, item in zip(names, tree, strict=True)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return dataclasses.replace(tree, **{name: set_leaf(getattr(tree, name), rest, value)})


def find_images(tree: Any, *, is_batch: bool) -> str:
    """Return the path of the only leaf that can be an image: three dims in a sample, four in a batch.

    Raises:
        DataError: None, or several, can be.
    """
    num_dims = _IMAGE_DIMS + is_batch
    found = [
        path for path, leaf in list_leaves(tree) if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim == num_dims
    ]
    if len(found) != 1:
        raise DataError(
            "the leaves of an augmentation must be named unless one tensor of a sample has three dims (channels, "
            f"height, width), but got {', '.join(found) or 'none'} in {describe(tree)}; give leaves, such as "
            '["image"]'
        )
    return found[0]


def find_labels(tree: Any) -> str:
    """Return the path of the labels of a batch: the second of a pair, or what has a name of labels.

    Raises:
        DataError: There are none.
    """
    if isinstance(tree, tuple | list) and len(tree) == 2:
        return str((getattr(tree, "_fields", None) or range(2))[1])
    paths = [path for path, _ in list_leaves(tree)]
    found = [path for path in paths if path.rpartition(".")[2] in LABELS]
    if len(found) != 1:
        raise DataError(
            "the labels of samples that are mixed must be the second of a pair or be named, but got "
            f"{describe(tree)}; give labels, such as label"
        )
    return found[0]


def as_tensor(leaf: Any, path: str) -> Tensor:
    """Return a leaf as a tensor of two dims at least.

    Raises:
        DataError: The leaf is no such tensor.
    """
    if isinstance(leaf, np.ndarray):
        leaf = torch.from_numpy(leaf)
    if not isinstance(leaf, Tensor) or leaf.dim() < _IMAGE_DIMS - 1:
        raise DataError(
            f"a leaf that is augmented must be a tensor whose last dims are height and width, but {path or 'it'} is "
            f"{describe(leaf)}; name another in leaves, or turn it into a tensor in the data set"
        )
    return leaf
