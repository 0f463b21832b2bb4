"""Operators of torch that multiply matrices, as the products that they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from paceline.parallel.pipeline.costs import FLOPS

_aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """A product of matrices, (rows x depth) by (depth x columns), `batch` at once.

    Args:
        kind: Class of it: matrix, convolution, batched or fused.
        rows: Rows of the first matrix.
        columns: Columns of the second.
        depth: Length that is summed over.
        batch: Number of such products in one operator.
        flops: Flops, if they are not 2 x rows x columns x depth x batch.
        elements: Elements that it moves, if not those of the three matrices.
        context: Elements of keys and values, if it is attention.
    """

    kind: str
    rows: float
    columns: float
    depth: float
    batch: float = 1.0
    flops: float | None = None
    elements: float | None = None
    context: float = 0.0

    @property
    def all_flops(self) -> float:
        """Flops of it."""
        return 2 * self.batch * self.rows * self.columns * self.depth if self.flops is None else self.flops


def list_products(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, weights: set[int]) -> Any:
    """Return the products of a call of an operator; None if it has none, or none that is known.

    Args:
        func: The operator.
        args: Arguments of it.
        kwargs: Arguments by name.
        result: Result of it.
        weights: Identities of the storages of parameters.
    """
    packet = func._overloadpacket
    reader = _READERS.get(packet)
    if reader is not None:
        return reader(args, kwargs, weights)
    forward = _RECURRENT_BACKWARD.get(packet)
    formula = flop_registry.get(packet)
    if forward is not None:
        return _recurrent(2.0 * FLOPS[forward](args[0].shape, *[_shape(one) for one in args[1:]]), result)
    if packet in FLOPS:
        return _recurrent(float(FLOPS[packet](*[_shape(one) for one in args])), result)
    if formula is None:
        return None
    return _recurrent(float(formula(*args, **kwargs, out_val=result)), result)


def _shape(given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.shape
    return [_shape(one) for one in given] if isinstance(given, list | tuple) else given


def _recurrent(flops: float, result: Any) -> list[Product]:
    """Return an operator of which flops are known, and the shape of its result."""
    made = next(one for one in (result if isinstance(result, list | tuple) else [result]) if isinstance(one, Tensor))
    columns = float(made.shape[-1]) if made.dim() else 1.0
    rows = made.numel() / max(columns, 1.0)
    return [Product("matrix", rows, columns, flops / max(2 * rows * columns, 1.0), flops=flops)]


def _mm(args: Sequence[Any], kwargs: dict[str, Any], weights: set[int]) -> list[Product]:
    one, other = args[-2:]
    return [Product("matrix", one.shape[0], other.shape[1], one.shape[1])]


def _bmm(args: Sequence[Any], kwargs: dict[str, Any], weights: set[int]) -> list[Product]:
    one, other = args[-2:]
    number, rows, depth = one.shape
    has_weight = any(operand.untyped_storage()._cdata in weights for operand in (one, other))
    kind = "matrix" if has_weight or number == 1 else "batched"
    return [Product(kind, rows, other.shape[2], depth, number, context=2.0 * other.numel() if kind == "batched" else 0)]


def _convolution(args: Sequence[Any], kwargs: dict[str, Any], weights: set[int]) -> list[Product]:
    given, weight, is_transposed, groups = args[0], args[1], args[6], args[8]
    forward = _convolve(given, weight, _count_positions(given, weight, args[3:6], is_transposed), groups, is_transposed)
    return [forward]


def _convolution_backward(args: Sequence[Any], kwargs: dict[str, Any], weights: set[int]) -> list[Product]:
    grad, given, weight, is_transposed, groups, mask = args[0], args[1], args[2], args[7], args[9], args[10]
    positions = (given if is_transposed else grad).shape[2:]
    one = _convolve(given, weight, prod(positions), groups, is_transposed)
    products = []
    if mask[0]:
        products.append(Product(one.kind, one.rows, one.depth, one.columns, one.batch, elements=one.elements))
    if mask[1]:
        products.append(Product(one.kind, one.depth, one.columns, one.rows, one.batch, elements=one.elements))
    return products


def _convolve(given: Tensor, weight: Tensor, positions: int, groups: int, is_transposed: bool) -> Product:
    """Return the product that a convolution is: pixels by channels. They are read once, not unfolded."""
    window = prod(weight.shape[2:])
    outputs = weight.shape[1] * groups if is_transposed else weight.shape[0]
    inputs = given.shape[1]
    columns, depth = outputs / groups, inputs / groups
    columns, depth = (columns * window, depth) if is_transposed else (columns, depth * window)
    rows = given.shape[0] * positions
    return Product("convolution", rows, columns, depth, groups, elements=float(given.numel() + rows * outputs))


def _count_positions(given: Tensor, weight: Tensor, settings: Sequence[Any], is_transposed: bool) -> int:
    """Return the number of places at which a convolution's window is put."""
    if is_transposed:
        return prod(given.shape[2:])
    stride, padding, dilation = settings
    sizes = zip(given.shape[2:], weight.shape[2:], _each(stride), _each(padding), _each(dilation), strict=False)
    return prod((length + 2 * pad - dil * (window - 1) - 1) // step + 1 for length, window, step, pad, dil in sizes)


def _each(values: Any) -> Any:
    return list(values) * 3 if len(values) == 1 else values


def _attention(is_backward: bool) -> Callable[..., list[Product]]:
    def read(args: Sequence[Any], kwargs: dict[str, Any], weights: set[int]) -> list[Product]:
        query, key, value = args[1:4] if is_backward else args[:3]
        samples, heads, tokens, depth = query.shape
        is_causal = any(one is True for one in args) or bool(kwargs.get("is_causal"))
        flops = 2 * samples * heads * tokens * key.shape[-2] * (depth + value.shape[-1])
        flops *= (0.5 if is_causal else 1.0) * (2.5 if is_backward else 1.0)
        number = samples * heads
        moved = 0.0 if is_backward else float(key.numel() + value.numel())
        return [Product("fused", tokens, key.shape[-2], depth, number, flops=float(flops), elements=0.0, context=moved)]

    return read


_READERS: dict[Any, Callable[..., list[Product]]] = {
    _aten.mm: _mm,
    _aten.addmm: _mm,
    _aten.bmm: _bmm,
    _aten.baddbmm: _bmm,
    _aten.convolution: _convolution,
    _aten.convolution_backward: _convolution_backward,
    **{
        getattr(_aten, f"_scaled_dot_product_{kind}_attention{device}{suffix}"): _attention(bool(suffix))
        for kind, device in (("flash", ""), ("flash", "_for_cpu"), ("efficient", ""), ("cudnn", ""))
        for suffix in ("", "_backward")
        if hasattr(_aten, f"_scaled_dot_product_{kind}_attention{device}{suffix}")
    },
}
"""Readers of the operators whose shapes are known."""
_RECURRENT_BACKWARD = {
    packet: forward
    for name, forward in (
        ("mkldnn_rnn_layer_backward", _aten.mkldnn_rnn_layer),
        ("_cudnn_rnn_backward", _aten._cudnn_rnn),
    )
    if (packet := getattr(_aten, name, None)) is not None
}
"""Backward of kernels of whole recurrences: twice the flops of their forward."""
