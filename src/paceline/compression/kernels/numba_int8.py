"""Kernels of `Int8` for CPUs: one pass over memory, a tile at a time in the cache."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from paceline.compression.kernels.torch_int8 import PART, SMALLEST_SCALE
from paceline.compression.rows import RowLayout

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_PART = np.float32(PART)
_SMALLEST_SCALE = np.float32(SMALLEST_SCALE)
_NOT_FINITE = np.int32(0x7F800000)
"""Bits of infinity: those of NaN are larger, all others smaller."""
_ROUND = np.float32(1.5 * 2**23)
"""Adding and subtracting it rounds smaller numbers to nearest, ties to even."""


def encode(
    value: Tensor,
    residual: Tensor | None,
    rows: RowLayout,
    payload: Tensor,
    new_residual: Tensor | None,
    *,
    first_tile: int = 0,
    key: int | None = None,
) -> bool:
    """See the reference, `torch_int8.encode`."""
    assert (residual is None) == (new_residual is None)
    old = None if residual is None else residual.numpy()
    new = None if new_residual is None else new_residual.numpy()
    flat = payload.view(-1).numpy()
    places = flat, flat.view(np.float32), rows.row_bytes, rows.tiles_per_row, rows.tile
    return bool(_encode(value.numpy(), old, *places, new, key is not None, np.uint32(key or 0), first_tile))


def decode(payload: Tensor, rows: RowLayout, output: Tensor, *, add: bool = False) -> None:
    """See the reference, `torch_rows.decode`."""
    flat = payload.view(-1).numpy()
    scales = flat.view(np.float32)
    _decode(flat.view(np.int8), scales, rows.row_bytes, rows.tiles_per_row, rows.tile, output.numpy(), add)


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(
    value: Floats,
    residual: Floats | None,
    payload: Bytes,
    scales: Floats,
    row_bytes: int,
    tiles_per_row: int,
    tile: int,
    new_residual: Floats | None,
    is_stochastic: bool,
    key: np.uint32,
    first_tile: int,
) -> bool:
    wanted = np.empty(tile, np.float32)
    finite = True
    for index in range((value.size + tile - 1) // tile):
        begin = index * tile
        size = min(tile, value.size - begin)
        if residual is None:
            wanted[:size] = value[begin : begin + size]
        else:
            _add(value[begin : begin + size], residual[begin : begin + size], wanted)
        bits = np.int32(_bits_of_largest(wanted[:size]))
        is_finite = bits < _NOT_FINITE
        if not is_finite:
            finite = False
        scale = bits.view(np.float32) * _PART
        row, place = index // tiles_per_row, index % tiles_per_row
        scales[(row * row_bytes) // 4 + place] = scale
        codes = payload[row * row_bytes + 4 * tiles_per_row + place * tile :][:size]
        kept = wanted if new_residual is None else new_residual[begin : begin + size]
        if not is_finite or scale < _SMALLEST_SCALE:
            codes[:] = 0
            kept[:size] = wanted[:size]
        elif is_stochastic:
            _round_randomly(wanted, scale, key, first_tile + index, codes, kept)
        else:
            _round_to_nearest(wanted, scale, codes, kept)
    return finite


@njit(nogil=True, cache=True)
def _add(value: Floats, residual: Floats, wanted: Floats) -> None:
    for i in range(value.size):
        wanted[i] = value[i] + residual[i]


@njit(nogil=True, cache=True)
def _bits_of_largest(wanted: Floats) -> np.int32:
    """Return the largest magnitude as the integer of its bits; NaN is the largest of all."""
    bits = wanted.view(np.int32)
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return largest


@njit(nogil=True, cache=True, error_model="numpy")
def _round_to_nearest(wanted: Floats, scale: np.float32, codes: Bytes, kept: Floats) -> None:
    inverse = np.float32(1) / scale
    for i in range(codes.size):
        rounded = (wanted[i] * inverse + _ROUND) - _ROUND
        codes[i] = np.uint8(np.int32(rounded))
        kept[i] = wanted[i] - rounded * scale


@njit(nogil=True, cache=True, error_model="numpy")
def _round_randomly(wanted: Floats, scale: np.float32, key: np.uint32, tile: int, codes: Bytes, kept: Floats) -> None:
    inverse = np.float32(1) / scale
    start = _mix(key + np.uint32(np.uint32(tile) * np.uint32(0x9E3779B9)))
    for i in range(codes.size):
        scaled = min(max(wanted[i] * inverse, np.float32(-127)), np.float32(127))
        below = np.floor(scaled)
        number = _mix(start + np.uint32(np.uint32(i) * np.uint32(0x9E3779B9)))
        uniform = np.float32(number >> np.uint32(8)) * np.float32(2.0**-24)
        rounded = below + (np.float32(1) if uniform < scaled - below else np.float32(0))
        codes[i] = np.uint8(np.int32(rounded))
        kept[i] = wanted[i] - rounded * scale


@njit(nogil=True, cache=True)
def _mix(number: Any) -> Any:
    mixed = np.uint32(number)
    mixed = np.uint32(mixed ^ (mixed >> np.uint32(16)))
    mixed = np.uint32(mixed * np.uint32(0x85EBCA6B))
    mixed = np.uint32(mixed ^ (mixed >> np.uint32(13)))
    mixed = np.uint32(mixed * np.uint32(0xC2B2AE35))
    return np.uint32(mixed ^ (mixed >> np.uint32(16)))


@njit(nogil=True, cache=True)
def _decode(
    payload: NDArray[np.int8],
    scales: Floats,
    row_bytes: int,
    tiles_per_row: int,
    tile: int,
    output: Floats,
    add: bool,
) -> None:
    for index in range((output.size + tile - 1) // tile):
        row, place = index // tiles_per_row, index % tiles_per_row
        scale = scales[(row * row_bytes) // 4 + place]
        out = output[index * tile : min((index + 1) * tile, output.size)]
        codes = payload[row * row_bytes + 4 * tiles_per_row + place * tile :][: out.size]
        if add:
            for i in range(out.size):
                out[i] += np.float32(codes[i]) * scale
        else:
            for i in range(out.size):
                out[i] = np.float32(codes[i]) * scale
