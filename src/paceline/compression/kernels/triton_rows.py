"""Decoding of `Int8` and `OneBit` on GPUs: one pass over memory, one program per tile."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.compression.rows import RowLayout


def decode(payload: Tensor, rows: RowLayout, output: Tensor, *, add: bool = False) -> None:
    """See the reference, `torch_rows.decode`."""
    if len(output):
        _decode[(-(-len(output) // rows.tile),)](
            payload.view(torch.int8),
            payload.view(torch.float32),
            output,
            len(output),
            rows.tiles_per_row,
            rows.row_bytes,
            rows.tile,
            rows.bits,
            add,
            enable_fp_fusion=False,
        )


@triton.jit
def _decode(
    payload_ptr,
    scales_ptr,
    output_ptr,
    size,
    tiles_per_row,
    row_bytes,
    tile: tl.constexpr,
    bits: tl.constexpr,
    add: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, tile)
    offsets = index * tile + places
    is_inside = offsets < size
    row = index // tiles_per_row
    place = index % tiles_per_row
    scale = tl.load(scales_ptr + row * (row_bytes // 4) + place)
    begin = row * row_bytes + 4 * tiles_per_row + place * (tile * bits // 8)
    if bits == 1:
        codes = tl.load(payload_ptr + begin + places // 8, mask=is_inside, other=0).to(tl.int32)
        decoded = tl.where((codes >> (places % 8)) & 1 == 1, scale, -scale)
    else:
        decoded = tl.load(payload_ptr + begin + places, mask=is_inside, other=0).to(tl.float32) * scale
    if add:
        decoded += tl.load(output_ptr + offsets, mask=is_inside)
    tl.store(output_ptr + offsets, decoded, mask=is_inside)
