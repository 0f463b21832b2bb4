"""Kernels of `Int8` for GPUs: one pass over memory, one program per tile."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.compression.kernels.torch_int8 import PART, SMALLEST_SCALE
from paceline.compression.kernels.triton_rows import decode
from paceline.compression.rows import RowLayout

__all__ = ["decode", "encode"]

_PART = tl.constexpr(PART)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_NOT_FINITE = tl.constexpr(0x7F800000)  # bits of infinity: those of NaN are larger, all others smaller
_ROUND = tl.constexpr(1.5 * 2**23)  # adding and subtracting it rounds to nearest, ties to even


def encode(
    value: Tensor,
    residual: Tensor | None,
    rows: RowLayout,
    payload: Tensor,
    new_residual: Tensor | None,
    *,
    first_tile: int = 0,
    key: int | None = None,
) -> Tensor:
    """See the reference, `torch_int8.encode`."""
    assert (residual is None) == (new_residual is None)
    is_finite = torch.ones(1, dtype=torch.int32, device=value.device)
    keys = torch.full((1,), key or 0, dtype=torch.int64, device=value.device).to(torch.uint32)
    if len(value):
        _encode[(-(-len(value) // rows.tile),)](
            value,
            value if residual is None else residual,
            value if new_residual is None else new_residual,
            payload,
            payload.view(torch.float32),
            is_finite,
            keys,
            len(value),
            rows.tiles_per_row,
            rows.row_bytes,
            first_tile,
            rows.tile,
            new_residual is not None,
            key is not None,
            enable_fp_fusion=False,
        )
    return is_finite[0] > 0


@triton.jit
def _encode(
    value_ptr,
    residual_ptr,
    new_residual_ptr,
    payload_ptr,
    scales_ptr,
    is_finite_ptr,
    key_ptr,
    size,
    tiles_per_row,
    row_bytes,
    first_tile,
    tile: tl.constexpr,
    has_feedback: tl.constexpr,
    is_stochastic: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, tile)
    offsets = index * tile + places
    is_inside = offsets < size
    wanted = tl.load(value_ptr + offsets, mask=is_inside, other=0.0)
    if has_feedback:
        wanted += tl.load(residual_ptr + offsets, mask=is_inside, other=0.0)
    largest = tl.max(wanted.to(tl.int32, bitcast=True) & _MAGNITUDE)
    is_finite = largest < _NOT_FINITE
    tl.store(is_finite_ptr, 0, mask=~is_finite)
    scale = largest.to(tl.float32, bitcast=True) * _PART
    row = index // tiles_per_row
    place = index % tiles_per_row
    tl.store(scales_ptr + row * (row_bytes // 4) + place, scale)
    is_used = is_finite & (scale >= _SMALLEST_SCALE)
    scaled = tl.where(is_used, wanted * tl.math.div_rn(1.0, tl.where(is_used, scale, 1.0)), 0.0)
    if is_stochastic:
        scaled = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
        below = tl.floor(scaled)
        start = _mix(tl.load(key_ptr) + (first_tile + index).to(tl.uint32) * 0x9E3779B9)
        number = _mix(start + places.to(tl.uint32) * 0x9E3779B9)
        uniform = (number >> 8).to(tl.float32) * (2.0**-24)
        rounded = below + (uniform < scaled - below).to(tl.float32)
    else:
        rounded = (scaled + _ROUND) - _ROUND
    begin = row * row_bytes + 4 * tiles_per_row + place * tile
    tl.store(payload_ptr + begin + places, rounded.to(tl.int32).to(tl.uint8), mask=is_inside)
    if has_feedback:
        tl.store(new_residual_ptr + offsets, wanted - rounded * scale, mask=is_inside)


@triton.jit
def _mix(number):
    number = number ^ (number >> 16)
    number = number * 0x85EBCA6B
    number = number ^ (number >> 13)
    number = number * 0xC2B2AE35
    return number ^ (number >> 16)
