"""The reference of `Int8`'s kernels: code times scale, the largest of a tile being 127 scales."""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.compression.rows import Rows

SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal
"""Tiles with a smaller scale are sent as zeros: its reciprocal might overflow."""
PART = 1 / 127
"""A multiplication gives the same bits on any device; a division by 127 might not."""
_GOLDEN = 0x9E3779B9
_MASK = 0xFFFFFFFF


def encode(
    value: Tensor,
    residual: Tensor | None,
    rows: Rows,
    payload: Tensor,
    new_residual: Tensor | None,
    *,
    first_tile: int = 0,
    key: int | None = None,
) -> bool:
    """Encode ``value + residual`` into `payload`, and what that left out into `new_residual`.

    Args:
        value: fp32, flat: what lies in the rows of `payload`, from its first on.
        residual: Like `value`.
        rows: How it lies there.
        payload: ``rows.new_payload``; filled.
        new_residual: Like `value`; filled. None with `residual`.
        first_tile: Number, in the block, of the tile that `value` begins with.
        key: Seeds stochastic rounding, in [0, 2**32); None rounds to nearest.

    Returns:
        Whether all that was encoded is finite.
    """
    assert (residual is None) == (new_residual is None)
    wanted = value if residual is None else value + residual
    num_elements = len(wanted)
    tiles = F.pad(wanted, (0, -num_elements % rows.tile)).view(-(-num_elements // rows.tile), rows.tile)
    scales = tiles.abs().amax(1) * PART
    finite = scales.isfinite()
    inverses = torch.where(finite & (scales >= SMALLEST_SCALE), 1 / scales, torch.zeros_like(scales))
    scaled = torch.where(finite.unsqueeze(1), tiles * inverses.unsqueeze(1), 0.0)
    if key is None:
        rounded = scaled.round()
    else:
        clamped = scaled.clamp(-127, 127)
        below = clamped.floor()
        rounded = below + (_uniform(len(tiles), rows.tile, first_tile, key, value.device) < clamped - below)
    if new_residual is not None:
        torch.sub(wanted, (rounded * scales.unsqueeze(1)).view(-1)[:num_elements], out=new_residual)
    codes = rounded.to(torch.int8).view(torch.uint8).view(-1)[:num_elements]
    for row in range(len(payload)):
        first, end = row * rows.tiles_per_row, (row + 1) * rows.tiles_per_row
        row_scales = scales[first:end].view(torch.uint8)
        row_codes = codes[first * rows.tile : end * rows.tile]
        payload[row, : len(row_scales)] = row_scales
        payload[row, rows.codes_begin : rows.codes_begin + len(row_codes)] = row_codes
    return bool(finite.all())


def decode(payload: Tensor, rows: Rows, output: Tensor, *, add: bool = False) -> None:
    """Fill `output`, flat, with what the rows of `payload` hold, or add that to it."""
    length = rows.tiles_per_row * rows.tile
    for row in range(len(payload)):
        part = output[row * length : (row + 1) * length]
        codes = payload[row, rows.codes_begin :][: len(part)].view(torch.int8)
        scales = payload[row, : rows.codes_begin].clone().view(torch.float32)
        decoded = codes.float() * scales.repeat_interleave(rows.tile)[: len(part)]
        part.copy_(part + decoded if add else decoded)


def _uniform(num_tiles: int, tile: int, first_tile: int, key: int, device: torch.device) -> Tensor:
    """Return numbers in [0, 1) that depend on key, tile and place in the tile alone: counters, mixed twice."""
    tiles = torch.arange(first_tile, first_tile + num_tiles, device=device)
    places = torch.arange(tile, device=device)
    starts = _mix((key + tiles * _GOLDEN) & _MASK).unsqueeze(1)
    return (_mix((starts + places * _GOLDEN) & _MASK) >> 8).float() * 2.0**-24


def _mix(number: Tensor) -> Tensor:
    """Mix the bits of 32-bit numbers, held as int64: the finaliser of MurmurHash3 (Appleby)."""
    number = number ^ (number >> 16)
    number = (number * 0x85EBCA6B) & _MASK
    number = number ^ (number >> 13)
    number = (number * 0xC2B2AE35) & _MASK
    return number ^ (number >> 16)
