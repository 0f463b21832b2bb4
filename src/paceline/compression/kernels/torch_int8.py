"""Reference kernels of `Int8`: code times scale, where the largest magnitude of a tile is 127 scales."""

import torch
from torch import Tensor

from paceline.compression.codec import Flag, flag_of
from paceline.compression.kernels.torch_rows import cut_tiles, decode, fill_rows
from paceline.compression.rows import RowLayout

__all__ = ["decode", "encode"]

SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal
"""Tiles with a smaller scale are sent as zeros: the reciprocal of the scale might overflow."""
PART = 1 / 127
"""Multiplication by it gives the same bits on any device; division by 127 might not."""
_GOLDEN = 0x9E3779B9
_MASK = 0xFFFFFFFF


def encode(
    value: Tensor,
    residual: Tensor | None,
    rows: RowLayout,
    payload: Tensor,
    new_residual: Tensor | None,
    *,
    first_tile: int = 0,
    key: int | None = None,
) -> Flag:
    """Encode ``value + residual`` into `payload`, and the encoding error into `new_residual`.

    Args:
        value: Flat fp32 elements of the rows of `payload`, from the first on.
        residual: Residual, like `value`; None for zero.
        rows: Layout of the payload's rows.
        payload: Output, from ``rows.new_payload``.
        new_residual: Output of the encoding error, like `value`; None if `residual` is None.
        first_tile: Number in the block of the first tile of `value`.
        key: Seed of stochastic rounding, in [0, 2**32); None rounds to nearest.

    Returns:
        Whether all encoded elements are finite.
    """
    assert (residual is None) == (new_residual is None)
    wanted = value if residual is None else value + residual
    tiles = cut_tiles(wanted, rows.tile)
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
        torch.sub(wanted, (rounded * scales.unsqueeze(1)).view(-1)[: len(wanted)], out=new_residual)
    fill_rows(payload, rows, scales, rounded.to(torch.int8).view(torch.uint8).view(-1)[: len(wanted)])
    return flag_of(finite.all())


def _uniform(num_tiles: int, tile: int, first_tile: int, key: int, device: torch.device) -> Tensor:
    """Return numbers in [0, 1) that depend on key, tile and position in the tile alone: counters, mixed twice."""
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
