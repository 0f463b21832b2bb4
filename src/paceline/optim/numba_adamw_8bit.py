"""The step of `AdamW8bit` on CPUs: one pass over memory, a block at a time in the cache."""

import functools

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from paceline.optim.eight_bits import BLOCK_SIZE

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_TINY = np.float32(2.0**-126)
_MAGNITUDE = np.int32(0x7FFFFFFF)
"""Mask of a float's bits but the sign."""
_SHIFT = np.int32(13)
"""Bits of a float that are left out where its code is looked up: cells are as wide as half floats are apart."""
_FIRST, _LAST = np.int32(0x33800000 >> 13), np.int32((0x3F800000 - 0x33800000) >> 13)
"""Cell of 2**-24, below which all have one code, and the number of cells up to 1."""
_NEGATIVE = _LAST + np.int32(1)
"""Place of the first negative number."""


def step(
    weights: Tensor,
    gradient: Tensor,
    first: tuple[Tensor, Tensor],
    root: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    numbers: tuple[float, ...],
) -> None:
    """Update flat float32 `weights` and both moments, as the loop of `AdamW8bitRule` does.

    Args:
        weights: Weights, changed in place.
        gradient: Gradients, float32.
        first: Codes and scales of the first moment.
        root: Codes and scales of the root of the second moment.
        tables: Values by code, ascending, of signed and of unsigned numbers.
        numbers: beta1, beta2, rate, correction, epsilon and the factor that decays weights.
    """
    (first_codes, first_scales), (root_codes, root_scales) = first, root
    signed, unsigned = tables
    beta1, beta2, rate, correction, epsilon, decay = map(np.float32, numbers)
    _step(
        weights.numpy(),
        gradient.numpy(),
        first_codes.numpy(),
        first_scales.numpy(),
        root_codes.numpy(),
        root_scales.numpy(),
        signed.numpy(),
        _number_cells(signed),
        unsigned.numpy(),
        _number_cells(unsigned),
        beta1,
        beta2,
        rate,
        correction,
        epsilon,
        decay,
    )


@functools.cache
def _number_cells(table: Tensor) -> Bytes:
    """Return the code nearest to the middle of each cell of floats from 0 to 1, then of those from 0 to -1."""
    values = table.numpy()
    middles = (((np.arange(_NEGATIVE) + _FIRST) << _SHIFT) + (1 << _SHIFT) // 2).astype(np.int32).view(np.float32)
    bounds = (values[1:] + values[:-1]) / 2
    return np.searchsorted(bounds, np.concatenate([middles, -middles])).astype(np.uint8)


@njit(nogil=True, cache=True, error_model="numpy")
def _step(
    weights: Floats,
    gradient: Floats,
    first_codes: Bytes,
    first_scales: Floats,
    root_codes: Bytes,
    root_scales: Floats,
    signed: Floats,
    to_signed: Bytes,
    unsigned: Floats,
    to_unsigned: Bytes,
    beta1: np.float32,
    beta2: np.float32,
    rate: np.float32,
    correction: np.float32,
    epsilon: np.float32,
    decay: np.float32,
) -> None:
    firsts, roots = np.empty(BLOCK_SIZE, np.float32), np.empty(BLOCK_SIZE, np.float32)
    places = np.empty(BLOCK_SIZE, np.uint16)
    for block in range(first_scales.size):
        begin = block * BLOCK_SIZE
        size = min(BLOCK_SIZE, weights.size - begin)
        ends = slice(begin, begin + size)
        _decode(first_codes[ends], first_scales[block], signed, firsts)
        _decode(root_codes[ends], root_scales[block], unsigned, roots)
        _move(weights[ends], gradient[ends], firsts, roots, beta1, beta2, rate, correction, epsilon, decay)
        first_scales[block] = _encode(firsts, size, to_signed, first_codes[ends], places)
        root_scales[block] = _encode(roots, size, to_unsigned, root_codes[ends], places)


@njit(nogil=True, cache=True)
def _decode(codes: Bytes, scale: np.float32, table: Floats, values: Floats) -> None:
    for i in range(codes.size):
        values[i] = table[codes[i]] * scale


@njit(nogil=True, cache=True, error_model="numpy")
def _move(
    weights: Floats,
    gradient: Floats,
    firsts: Floats,
    roots: Floats,
    beta1: np.float32,
    beta2: np.float32,
    rate: np.float32,
    correction: np.float32,
    epsilon: np.float32,
    decay: np.float32,
) -> None:
    one = np.float32(1)
    scaled_rate, scaled_epsilon = rate * correction, epsilon * correction
    for i in range(weights.size):
        g = gradient[i]
        first = firsts[i] + (one - beta1) * (g - firsts[i])
        root = np.sqrt(roots[i] * roots[i] * beta2 + (one - beta2) * g * g)
        weights[i] = weights[i] * decay - scaled_rate * first / (root + scaled_epsilon)
        firsts[i] = first
        roots[i] = root


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(values: Floats, size: int, table: Bytes, codes: Bytes, places: NDArray[np.uint16]) -> np.float32:
    """Write the codes of `values`, looked up by the half floats of their quotients, and return their scale."""
    bits = values.view(np.int32)
    scale = _largest(bits[:size])
    inverse = np.float32(1) / max(scale, _TINY)
    for i in range(size):
        values[i] *= inverse
    for i in range(size):
        cell = min(max(((bits[i] & _MAGNITUDE) >> _SHIFT) - _FIRST, np.int32(0)), _LAST)
        places[i] = np.uint16(cell + (_NEGATIVE if bits[i] < 0 else np.int32(0)))
    for i in range(size):
        codes[i] = table[places[i]]
    return scale


@njit(nogil=True, cache=True)
def _largest(bits: NDArray[np.int32]) -> np.float32:
    """Return the largest magnitude of floats given by their bits; NaN is the largest of all."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
    return np.int32(largest).view(np.float32)
