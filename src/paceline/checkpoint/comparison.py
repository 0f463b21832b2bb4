"""The differences between two checkpoints, bit for bit: which tensors, by how much, and what their documents say."""

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
    """Elements whose bits differ: also 0.0 and -0.0, and NaN of different bits."""
    share: float = 0.0
    """Share of all elements that differ."""
    largest: float = 0.0
    """Largest absolute difference; NaN where one is NaN."""
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
    """Yield path, first and second value of whatever differs in two documents, in its type too: true is not 1.

    What is missing is None; where the other one is null, the path says which document has it.
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in [*first, *(key for key in second if key not in first)]:
            place = f"{path}.{key}" if path else str(key)
            if (key in first) != (key in second) and first.get(key) is second.get(key) is None:
                yield f"{place} (only in the {'first' if key in first else 'second'})", None, None
            else:
                yield from compare_documents(first.get(key), second.get(key), place)
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for number, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from compare_documents(one, other, f"{path}[{number}]")
    elif repr(first) != repr(second):  # that of a plain value tells its type, its sign and all its digits
        yield path, first, second


def _compare(name: str, first: Tensor, second: Tensor) -> TensorDifference:
    a, b = first.reshape(-1), second.reshape(-1)
    size = a.element_size()
    differs = (a.view(torch.uint8).view(-1, size) != b.view(torch.uint8).view(-1, size)).any(1)
    number = int(differs.sum())
    if not number:
        return TensorDifference(name, "values")
    wide = a.to(torch.complex128 if a.is_complex() else torch.float64)
    change = _subtract(a[differs], b[differs])
    distance, norm = float(change.square().sum().sqrt()), float(wide[wide.isfinite()].abs().square().sum().sqrt())
    relative = distance / norm if norm else (math.inf if distance else 0.0)
    largest = float(change.max()) if not change.isnan().any() else math.nan
    return TensorDifference(name, "values", number, number / a.numel(), largest, relative)


def _subtract(a: Tensor, b: Tensor) -> Tensor:
    """Return absolute differences in float64, those of integers beyond 2**53 too."""
    if a.is_complex():
        return (a.to(torch.complex128) - b.to(torch.complex128)).abs()
    if a.is_floating_point():
        return (a.double() - b.double()).abs()
    if a.dtype == torch.uint64:  # the same order and distances in int64
        a, b = (one.view(torch.int64) ^ torch.iinfo(torch.int64).min for one in (a, b))
    a, b = a.long(), b.long()
    change = torch.maximum(a, b) - torch.minimum(a, b)  # modulo 2**64
    return change.double() + torch.where(change < 0, 2.0**64, 0.0)
