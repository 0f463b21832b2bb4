"""The differences between two checkpoints: which tensors, by how much, and what their documents say."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class TensorDifference:
    """One tensor of two checkpoints that is not the same in both."""

    name: str
    reason: str
    """Kind of the difference: values, shape, dtype, or the one of both in which it is missing."""
    num_elements: int = 0
    """Elements that differ."""
    share: float = 0.0
    """Share of all elements that differ."""
    largest: float = 0.0
    """Largest absolute difference; NaN where a number meets none."""
    relative: float = 0.0
    """Norm of the difference by the norm of the first's values."""


def compare_tensors(first: Checkpoint, second: Checkpoint) -> Iterator[TensorDifference]:
    """Yield the tensors that differ, in the order of names. Tensors with the same digests are not read."""
    theirs, others = first.list_tensors(), second.list_tensors()
    for name in sorted(theirs.keys() | others.keys()):
        if name not in theirs or name not in others:
            yield TensorDifference(name, "only in the second" if name not in theirs else "only in the first")
        elif theirs[name] != others[name]:
            (shape, dtype), (other_shape, other_dtype) = theirs[name], others[name]
            yield TensorDifference(name, f"{tuple(shape)} {dtype} and {tuple(other_shape)} {other_dtype}")
        elif first.digests(name) != second.digests(name):
            found = _compare(name, first.read(name), second.read(name))
            if found.num_elements:
                yield found


def compare_documents(first: Any, second: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield path, first and second value of whatever differs in two documents; what is missing is None."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in [*first, *(key for key in second if key not in first)]:
            yield from compare_documents(first.get(key), second.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for place, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from compare_documents(one, other, f"{path}[{place}]")
    elif first != second and not (_is_nan(first) and _is_nan(second)):
        yield path, first, second


def _compare(name: str, first: Tensor, second: Tensor) -> TensorDifference:
    wide = torch.complex128 if first.is_complex() else torch.float64
    a, b = first.to(wide), second.to(wide)
    differs = (a != b) & ~(a.isnan() & b.isnan())
    number = int(differs.sum())
    if not number:
        return TensorDifference(name, "values")
    change = (a - b)[differs].abs()
    norm = float(a[a.isfinite()].abs().square().sum().sqrt())
    relative = float(change.square().sum().sqrt()) / norm if norm else math.inf
    largest = float(change.max()) if not change.isnan().any() else math.nan
    return TensorDifference(name, "values", number, number / first.numel(), largest, relative)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
