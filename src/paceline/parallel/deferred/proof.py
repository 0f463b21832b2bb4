"""Whether an operation does with values what it does without: makes the same tensors, and writes to no others."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from paceline.parallel.deferred.operators import list_written
from paceline.parallel.deferred.refusal import UndeferrableError

_TRUSTED = frozenset({"clone", "_to_copy", "cat", "stack", "copy_", "fill_", "zero_", "tril", "triu", "linalg_qr"})
"""Operators of most initialisations, which need no proof; it would take the memory of their arguments."""


class Prover:
    """Runs operators on values of no meaning, once for each shape of arguments, and refuses those that surprise."""

    def __init__(self) -> None:
        self._proved: set[tuple[Any, ...]] = set()

    def prove(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Mapping[int, Tensor]) -> None:
        """Raise `UndeferrableError` if an operation differs from what is recorded of it.

        Args:
            func: Operator, which draws no random numbers.
            args: Arguments, of whose tensors only shapes, strides and dtypes matter.
            kwargs: More of them.
            made: Tensors without memory that it has made, by their places among its results.
        """
        if torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in _TRUSTED:
            return
        leaves, structure = tree_flatten((args, kwargs))
        key = (func, str(structure), *map(_describe, leaves))
        if key in self._proved:
            return
        self._proved.add(key)
        given = [_stand_in(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(given, structure)
        written = {id(tensor) for tensor in list_written(func, args, kwargs)}
        unwritten = [(one, one.clone()) for one in given if isinstance(one, Tensor) and id(one) not in written]
        with torch.no_grad():
            results = tree_flatten(func(*args, **kwargs))[0]
        if any(_describe(results[place]) != _describe(tensor) for place, tensor in made.items()):
            raise UndeferrableError(f"the operator {func} makes a tensor that has another shape or order with values")
        if not all(torch.equal(one, before) for one, before in unwritten):
            raise UndeferrableError(f"the operator {func} writes to a tensor without announcing it")


def _describe(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)


def _stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, strides and dtype; whole numbers, which may be places, are 0."""
    span = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel():
        span = 0
    if tensor.is_floating_point() or tensor.is_complex():
        flat = torch.arange(span, device="cpu", dtype=torch.float32).remainder_(7).add_(1).div_(8).to(tensor.dtype)
    else:
        flat = torch.zeros(span, device="cpu", dtype=tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())
