"""What torch's operators do that their schemas do not say: tensors that they write to, and values that they check."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

REPLACING = {torch.ops.aten.resize_, torch.ops.aten.resize_as_}
"""Operators that may give a storage other memory."""
_STATISTICS = "running_"
"""Names of what every operator for normalization and quantization may write to, although few schemas say so."""
_CHECKS_INDICES = frozenset(
    f"{name}{ending}"
    for ending in ("", "_")
    for name in (
        *("embedding", "_embedding_bag", "_embedding_bag_forward_only", "embedding_renorm", "gather", "index"),
        *("index_add", "index_copy", "index_fill", "index_put", "_index_put_impl", "index_reduce", "index_select"),
        *("_unsafe_index", "_unsafe_index_put", "masked_scatter", "put", "take", "scatter", "scatter_add"),
        *("scatter_reduce", "nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss", "_ctc_loss"),
        *("multilabel_margin_loss_forward", "max_unpool2d", "max_unpool3d", "segment_reduce"),
        *("floor_divide", "remainder", "fmod"),
    )
)
"""Operators that raise for integers which are no place of their other arguments, or are a divisor of 0."""
_CHECKS_VALUES = frozenset({"binary_cross_entropy", "histc", "cholesky", "lu_unpack", "_assert_scalar"})
_ALWAYS_WORKS = frozenset(
    f"linalg_{name}" for name in ("cross", "householder_product", "matrix_exp", "qr", "vector_norm")
)
"""Operators of linear algebra that raise for no values of valid shapes."""
_ASKS = frozenset({"_linalg_check_errors", "_assert_async", "equal"})
_WITHOUT_VECTORS = frozenset(
    f"{start}{name}"
    for start in ("", "linalg_")
    for name in ("norm", "matrix_norm", "nuclear_norm", "svdvals", "eigvalsh", "cond", "matrix_rank")
)
"""Functions that torch computes by another algorithm, without singular or eigenvectors, unless a mode looks on."""


def computes_otherwise(func: Any, function: str) -> bool:
    """Whether an operator has other last digits in a recording, given the function that calls it."""
    name = _name(func)
    return name == "linalg_lstsq" or (name in ("_linalg_svd", "_linalg_eigh") and function in _WITHOUT_VECTORS)


def list_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to, or may write to."""
    for place, argument in enumerate(func._schema.arguments):
        is_announced = argument.alias_info is not None and argument.alias_info.is_write
        if is_announced or argument.name.startswith(_STATISTICS):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def is_known(func: Any) -> bool:
    """Whether an operator is torch's own, so that what it writes to is known."""
    return func.namespace in ("aten", "prim", "prims")


def is_view(func: Any) -> bool:
    """Whether an operator only describes the memory of its arguments otherwise, and so works without any."""
    if func.overloadpacket in (torch.ops.aten.set_, torch.ops.aten.is_set_to):
        return True
    is_same = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
    return is_same or torch.Tag.inplace_view in func.tags


def asks_for_values(func: Any) -> bool:
    """Whether an operator returns no tensor, but what depends on values, or only raises by them."""
    return torch.Tag.data_dependent_output in func.tags or _name(func) in _ASKS


def has_size_by_values(func: Any, leaves: Iterable[Any]) -> bool:
    """Whether the shape of an operation's result depends on values."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    return _name(func) != "index" or any(_is(leaf, torch.bool, torch.uint8) for leaf in leaves)


def checks_values(func: Any) -> bool:
    """Whether an operator raises for some values of its arguments."""
    name = _name(func)
    is_linear_algebra = name.startswith(("linalg_", "_linalg_")) and name not in _ALWAYS_WORKS
    return is_linear_algebra or name in _CHECKS_VALUES


def checks_indices(func: Any, leaves: Iterable[Any]) -> bool:
    """Whether an operation raises for some values of its arguments that are whole numbers."""
    is_checked = _name(func) in _CHECKS_INDICES or (_name(func) in ("div", "div_") and "mode" in func._overloadname)
    return is_checked and any(map(is_integer, leaves))


def is_lazy_view(func: Any, leaves: Iterable[Any]) -> bool:
    """Whether an operation makes or takes a tensor that is conjugated or negated only when it is read."""
    are_marked = (leaf.is_conj() or leaf.is_neg() for leaf in leaves if isinstance(leaf, Tensor))
    return _name(func) in ("_conj", "_neg_view") or any(are_marked)


def is_integer(leaf: Any) -> bool:
    """Whether an argument is a tensor of whole numbers or truth values."""
    return isinstance(leaf, Tensor) and not leaf.is_floating_point() and not leaf.is_complex()


def _is(leaf: Any, *dtypes: torch.dtype) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in dtypes


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def makes_in_memory(device: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether an operation makes tensors elsewhere than on the meta device."""
    if device is not None:
        return torch.device(device).type != "meta"
    return not tensors or not all(tensor.is_meta for tensor in tensors)
