"""Two bytes an element: fp16 and bf16, added in that precision."""

import math
from typing import ClassVar

import torch
from torch import Size, Tensor

from paceline.compression.codec import (
    Algebra,
    AllReduce,
    Codec,
    CodecContext,
    Exchange,
    Exchanged,
    Flag,
    Request,
    State,
    all_of,
    dense_payloads,
    exchange_dense,
    is_finite,
)
from paceline.registry import register

_CHUNK_ELEMENTS = 1 << 17
"""Number of elements rounded at a time on a CPU, so that several passes over them stay in its cache."""


class _Half(Codec):
    """Rounds to nearest; the all-reduce adds the rounded values.

    On the wire: one all-reduce of 2 bytes an element. Error feedback keeps this worker's rounding errors; the rounding
    errors of the additions, one each, are lost. A sum cannot overflow: each worker sends at most its share of
    the range, the largest power of two of which `num_workers` add up, and with feedback keeps the rest for later.
    """

    algebra = Algebra.LINEAR
    bucket_bytes = 2**20  # measured at 100 Mbit/s, as is max_in_flight: much is still sent, so the wire must never idle
    max_in_flight = 4
    dtype: ClassVar[torch.dtype]

    error_feedback: bool = True
    """Whether the rounding error is added to the next gradient."""

    def exchange(self, value: Tensor, state: State, context: CodecContext) -> Exchange:
        """Round, sum, and widen again."""
        if self.is_dense(value.shape):
            return (yield from exchange_dense(value))
        payload = torch.empty(value.numel(), dtype=self.dtype, device=value.device)
        residual = torch.empty_like(value) if self.error_feedback else None
        limit = largest_payload(self.dtype, context.num_workers)
        finite = round_to_half(value, state.get("worker"), limit, payload, residual)
        total = yield AllReduce(payload, finite)
        return Exchanged(total.float().view(value.shape), {} if residual is None else {"worker": residual}, finite)

    def payloads(self, shape: Size, num_workers: int) -> list[tuple[type[Request], int]]:
        """One round."""
        return dense_payloads(shape) if self.is_dense(shape) else [(AllReduce, 2 * shape.numel())]


@register("fp16")
class FP16(_Half):
    """IEEE half precision: 11 bits of precision, from 6e-8 to 65,504; smaller gradients wait in the residual."""

    dtype = torch.float16


@register("bf16")
class BF16(_Half):
    """The upper half of fp32: its whole range, 8 bits of precision."""

    dtype = torch.bfloat16


def largest_payload(dtype: torch.dtype, num_workers: int) -> float:
    """Return the largest power of two of which `num_workers` add up without overflow, in any order."""
    # Multiples of a power of two are exact up to the dtype's precision, so partial sums do not round beyond the range.
    exponent = math.frexp(torch.finfo(dtype).max)[1] - 1
    return math.ldexp(1.0, exponent - (num_workers - 1).bit_length())


def round_to_half(
    value: Tensor, residual: Tensor | None, limit: float, payload: Tensor, new_residual: Tensor | None
) -> Flag:
    """Round ``value + residual`` to `payload`, and write the rounding error to `new_residual`.

    Args:
        value: Value to round: fp32.
        residual: Residual in the shape of `value`, or None for zero.
        limit: Largest magnitude; larger values are clipped to it.
        payload: Flat output of the rounded values.
        new_residual: Output of the rounding errors, in the shape of `value`; None to drop them.

    Returns:
        Whether all rounded values are finite.
    """
    size = _CHUNK_ELEMENTS if value.device.type == "cpu" else max(value.numel(), 1)
    finite: Flag = True
    for first in range(0, value.numel(), size):
        chunk = slice(first, first + size)
        wanted = value.view(-1)[chunk]
        if residual is not None:
            wanted = wanted + residual.view(-1)[chunk]
        finite = all_of([is_finite(wanted), finite])
        payload[chunk] = wanted.clamp(-limit, limit)
        if new_residual is not None:
            torch.sub(wanted, payload[chunk], out=new_residual.view(-1)[chunk])
    return finite
