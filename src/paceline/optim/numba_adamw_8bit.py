"""The step of `AdamW8bit` on CPUs: one pass over memory, a block at a time in the cache.

Codes are computed, not looked up, so that the loops are vectorised. The values of a decade are equally far apart, so a
code is a linear function of the quotient there, a line that rises by the decade's number of values. From decade to
decade the number doubles and the slope falls to a fifth: the lowest of all lines is the right one. Lines are
raised so that each decade begins at the power of two that is its number of values.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from paceline.optim.eight_bits import BLOCK_SIZE, NUM_DECADES

Floats = NDArray[np.float32]
Integers = NDArray[np.int32]
Bytes = NDArray[np.uint8]
Numbers = tuple[np.float32, ...]

_ONE, _TINY = np.float32(1), np.float32(2.0**-126)
_MAGNITUDE, _EXPONENT = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
"""Masks of a float's bits: all but the sign, and those of its power of two."""


def _make_lines(num_first: int) -> tuple[Floats, Floats]:
    """Return slopes and offsets of the lines of all decades, of which the first has `num_first` values."""
    nums = num_first * 2.0 ** np.arange(NUM_DECADES)
    slopes = nums / 0.9 * 10.0 ** np.arange(NUM_DECADES - 1, -1, -1)
    offsets = nums * 8 / 9
    # The last value was moved up to 1 by half a distance, so the bound below it lies a quarter of one higher.
    num = nums[-1]
    slopes = np.append(slopes, num / 1.125)
    offsets = np.append(offsets, 2 * num - 1 - num / 1.125 * (1 - 0.675 / num))
    return slopes.astype(np.float32), offsets.astype(np.float32)


_SIGNED_SLOPES, _SIGNED_OFFSETS = _make_lines(1)
_UNSIGNED_SLOPES, _UNSIGNED_OFFSETS = _make_lines(2)
_ZERO = np.int32(2**NUM_DECADES - 1)
"""Code of 0 among signed values."""
_SMALLEST = np.int32(2)
"""Place of the smallest unsigned value, whose code is 0."""
_SIGNED_END, _UNSIGNED_END = np.float32(2**NUM_DECADES - 0.5), np.float32(2 ** (NUM_DECADES + 1) - 0.5)
"""Heights within the last places."""
_GAP = np.float32(0.2)
"""Length of a line's begin that is nearer to the last value of the decade below than to the line's first."""


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
    _step(
        weights.numpy(),
        gradient.numpy(),
        first_codes.numpy(),
        first_scales.numpy(),
        root_codes.numpy(),
        root_scales.numpy(),
        signed.numpy(),
        unsigned.numpy(),
        tuple(map(np.float32, numbers)),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def _step(
    weights: Floats,
    gradient: Floats,
    first_codes: Bytes,
    first_scales: Floats,
    root_codes: Bytes,
    root_scales: Floats,
    signed: Floats,
    unsigned: Floats,
    numbers: Numbers,
) -> None:
    firsts, roots = np.empty(BLOCK_SIZE, np.float32), np.empty(BLOCK_SIZE, np.float32)
    for block in range(first_scales.size):
        begin = block * BLOCK_SIZE
        size = min(BLOCK_SIZE, weights.size - begin)
        ends = slice(begin, begin + size)
        _decode(first_codes[ends], first_scales[block], signed, firsts)
        _decode(root_codes[ends], root_scales[block], unsigned, roots)
        _move(weights[ends], gradient[ends], firsts, roots, numbers)
        first_scales[block] = _largest(firsts.view(np.int32)[:size])
        root_scales[block] = _largest(roots.view(np.int32)[:size])
        _encode_signed(firsts, first_scales[block], first_codes[ends])
        _encode_unsigned(roots, root_scales[block], root_codes[ends])


@njit(nogil=True, cache=True)
def _decode(codes: Bytes, scale: np.float32, table: Floats, values: Floats) -> None:
    for i in range(codes.size):
        values[i] = table[codes[i]] * scale


@njit(nogil=True, cache=True, error_model="numpy")
def _move(weights: Floats, gradient: Floats, firsts: Floats, roots: Floats, numbers: Numbers) -> None:
    beta1, beta2, rate, correction, epsilon, decay = numbers
    scaled_rate, scaled_epsilon = rate * correction, epsilon * correction
    for i in range(weights.size):
        g = gradient[i]
        first = firsts[i] + (_ONE - beta1) * (g - firsts[i])
        root = np.sqrt(roots[i] * roots[i] * beta2 + (_ONE - beta2) * g * g)
        weights[i] = weights[i] * decay - scaled_rate * first / (root + scaled_epsilon)
        firsts[i] = first
        roots[i] = root


@njit(nogil=True, cache=True)
def _largest(bits: Integers) -> np.float32:
    """Return the largest magnitude of floats given by their bits; NaN is the largest of all."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
    return np.int32(largest).view(np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_signed(values: Floats, scale: np.float32, codes: Bytes) -> None:
    inverse = _ONE / max(scale, _TINY)
    for i in range(codes.size):
        place = _place(abs(values[i]) * inverse, _SIGNED_SLOPES, _SIGNED_OFFSETS, _SIGNED_END)
        codes[i] = np.uint8(_ZERO + (place if values[i] >= 0 else -place))


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_unsigned(values: Floats, scale: np.float32, codes: Bytes) -> None:
    inverse = _ONE / max(scale, _TINY)
    for i in range(codes.size):
        place = _place(values[i] * inverse, _UNSIGNED_SLOPES, _UNSIGNED_OFFSETS, _UNSIGNED_END)
        codes[i] = np.uint8(max(place, _SMALLEST) - _SMALLEST)


@njit(nogil=True, cache=True, error_model="numpy")
def _place(quotient: np.float32, slopes: Floats, offsets: Floats, end: np.float32) -> np.int32:
    """Return the place of the value nearest to `quotient`: that on the lowest line; NaN has the last."""
    height = end
    for line in range(NUM_DECADES + 1):
        other = quotient * slopes[line] + offsets[line]
        height = other if other < height else height
    is_below = height - _float_of(_exponent_of(height)) < _GAP
    return np.int32(height - _GAP if is_below else height)


@njit(nogil=True, cache=True)
def _exponent_of(number: np.float32) -> np.int32:
    return np.float32(number).view(np.int32) & _EXPONENT


@njit(nogil=True, cache=True)
def _float_of(bits: np.int32) -> np.float32:
    return np.int32(bits).view(np.float32)
