"""Kernels of `OneBit` for GPUs: one pass over memory, one program per tile."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.compression.kernels.triton_rows import decode
from paceline.compression.rows import RowLayout

__all__ = ["decode", "encode"]


def encode(
    value: Tensor, residual: Tensor | None, rows: RowLayout, payload: Tensor, new_residual: Tensor | None
) -> Tensor:
    """See the reference, `torch_one_bit.encode`."""
    assert (residual is None) == (new_residual is None)
    is_finite = torch.ones(1, dtype=torch.int32, device=value.device)
    if len(value):
        _encode[(-(-len(value) // rows.tile),)](
            value,
            value if residual is None else residual,
            value if new_residual is None else new_residual,
            payload,
            payload.view(torch.float32),
            is_finite,
            len(value),
            rows.tiles_per_row,
            rows.row_bytes,
            rows.tile,
            new_residual is not None,
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
    size,
    tiles_per_row,
    row_bytes,
    tile: tl.constexpr,
    has_feedback: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    offsets = index * tile + tl.arange(0, tile)
    is_inside = offsets < size
    wanted = tl.load(value_ptr + offsets, mask=is_inside, other=0.0)
    if has_feedback:
        wanted += tl.load(residual_ptr + offsets, mask=is_inside, other=0.0)
    count = tl.minimum(size - index * tile, tile)
    scale = (tl.sum(tl.abs(wanted).to(tl.float64)) / count.to(tl.float64)).to(tl.float32)
    tl.store(is_finite_ptr, 0, mask=~(tl.abs(scale) < float("inf")))  # NaN is not less than anything
    row = index // tiles_per_row
    place = index % tiles_per_row
    tl.store(scales_ptr + row * (row_bytes // 4) + place, scale)
    is_positive = (wanted >= 0) & is_inside
    bits = tl.reshape(is_positive.to(tl.int32), (tile // 8, 8)) << tl.arange(0, 8)[None, :]
    bytes_of_tile = tl.arange(0, tile // 8)
    begin = row * row_bytes + 4 * tiles_per_row + place * (tile // 8)
    is_used = bytes_of_tile * 8 < count
    tl.store(payload_ptr + begin + bytes_of_tile, tl.sum(bits, 1).to(tl.uint8), mask=is_used)
    if has_feedback:
        tl.store(new_residual_ptr + offsets, wanted - tl.where(is_positive, scale, -scale), mask=is_inside)
