"""Kernels of `OneBit` for CPUs: one pass over memory, a tile at a time in the cache."""

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from paceline.compression.rows import RowLayout

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def encode(
    value: Tensor, residual: Tensor | None, rows: RowLayout, payload: Tensor, new_residual: Tensor | None
) -> bool:
    """See the reference, `torch_one_bit.encode`."""
    assert (residual is None) == (new_residual is None)
    old = None if residual is None else residual.numpy()
    new = None if new_residual is None else new_residual.numpy()
    flat = payload.view(-1).numpy()
    places = flat, flat.view(np.float32), rows.row_bytes, rows.tiles_per_row, rows.tile
    return bool(_encode(value.numpy(), old, *places, new))


def decode(payload: Tensor, rows: RowLayout, output: Tensor, *, add: bool = False) -> None:
    """See the reference, `torch_rows.decode`."""
    flat = payload.view(-1).numpy()
    _decode(flat, flat.view(np.float32), rows.row_bytes, rows.tiles_per_row, rows.tile, output.numpy(), add)


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
) -> bool:
    wanted = np.empty(tile, np.float32)
    signs = np.zeros(tile, np.uint8)
    finite = True
    for index in range((value.size + tile - 1) // tile):
        begin = index * tile
        size = min(tile, value.size - begin)
        if residual is None:
            total = _load(value[begin : begin + size], wanted)
        else:
            total = _load_sum(value[begin : begin + size], residual[begin : begin + size], wanted)
        scale = np.float32(total / size)
        if not np.isfinite(scale):
            finite = False
        row, place = index // tiles_per_row, index % tiles_per_row
        scales[(row * row_bytes) // 4 + place] = scale
        if new_residual is None:
            for i in range(size):
                signs[i] = wanted[i] >= np.float32(0)
        else:
            kept = new_residual[begin : begin + size]
            for i in range(size):
                is_positive = wanted[i] >= np.float32(0)
                signs[i] = is_positive
                kept[i] = wanted[i] - (scale if is_positive else -scale)
        for i in range(size, (size + 7) // 8 * 8):
            signs[i] = 0
        _pack(signs, payload[row * row_bytes + 4 * tiles_per_row + place * (tile // 8) :][: (size + 7) // 8])
    return finite


# Sums may be reordered, so that they are vectorised; NaN and infinity are still respected.
@njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def _load_sum(value: Floats, residual: Floats, wanted: Floats) -> float:
    total = 0.0
    for i in range(value.size):
        element = value[i] + residual[i]
        wanted[i] = element
        total += abs(np.float64(element))
    return total


@njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def _load(value: Floats, wanted: Floats) -> float:
    total = 0.0
    for i in range(value.size):
        wanted[i] = value[i]
        total += abs(np.float64(value[i]))
    return total


@njit(nogil=True, cache=True)
def _pack(flags: Bytes, packed: Bytes) -> None:
    """Pack 8 flags of 0 or 1 into each byte: the product brings bit 0 of byte i to bit 56 + i."""
    words = flags.view(np.uint64)
    for i in range(packed.size):
        packed[i] = np.uint8((words[i] * np.uint64(0x0102040810204080)) >> np.uint64(56))


@njit(nogil=True, cache=True)
def _decode(
    payload: Bytes,
    scales: Floats,
    row_bytes: int,
    tiles_per_row: int,
    tile: int,
    output: Floats,
    add: bool,
) -> None:
    lut = np.empty((256, 8), np.float32)
    for byte in range(256):
        for bit in range(8):
            lut[byte, bit] = np.float32(1) if (byte >> bit) & 1 else np.float32(-1)
    for index in range((output.size + tile - 1) // tile):
        row, place = index // tiles_per_row, index % tiles_per_row
        scale = scales[(row * row_bytes) // 4 + place]
        out = output[index * tile : min((index + 1) * tile, output.size)]
        codes = payload[row * row_bytes + 4 * tiles_per_row + place * (tile // 8) :]
        whole = out.size // 8
        if add:
            for i in range(whole):
                for j in range(8):
                    out[8 * i + j] += lut[codes[i], j] * scale
        else:
            for i in range(whole):
                for j in range(8):
                    out[8 * i + j] = lut[codes[i], j] * scale
        for i in range(8 * whole, out.size):
            element = lut[codes[whole], i - 8 * whole] * scale
            out[i] = out[i] + element if add else element
