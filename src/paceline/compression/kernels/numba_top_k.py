"""Kernels of top-k for CPUs, in numba: about one pass over the block, whatever the data.

A sample of the block gives a threshold that slightly more than k elements are expected to reach. One pass adds the
residual and collects those elements, and the exact k-th magnitude is then found among them. If the sample misled (fewer
than k, or far more), the exact threshold is found among all elements instead, in four more passes. The selection
is the same in both cases.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit
from torch import Tensor

Array = npt.NDArray[Any]

_TILE = 2048
_DEVIATIONS = 4  # of the sampled threshold; the sample misleads about once in 30,000 blocks
_MAGNITUDE = np.int32(0x7FFFFFFF)  # bits of a float without its sign: as an integer, ordered as the magnitudes are
_INFINITE = np.int32(0x7F800000)


def select(
    value: Tensor, residual: Tensor | None, num_kept: int, remainder: Tensor, indices: Tensor, values: Tensor
) -> bool:
    """See the reference, `torch_top_k.select`."""
    kept = None if residual is None else residual.numpy()
    return bool(_select(value.numpy(), kept, num_kept, remainder.numpy(), indices.numpy(), values.numpy()))


@njit(nogil=True, cache=True)
def _select(
    value: Array, residual: Array | None, num_kept: int, remainder: Array, indices: Array, values: Array
) -> bool:
    guess = _guess_threshold(value, residual, num_kept)
    capacity = min(value.size, 8 * num_kept + 8 * _TILE)
    places = np.empty(capacity + _TILE, np.int64)
    bits = np.empty(capacity + _TILE, np.int32)
    count = _add_and_collect(value, residual, guess, capacity, remainder, places, bits)
    if num_kept <= count <= capacity:
        threshold, num_equal = _find_threshold(bits, count, num_kept)
        return _take(places, bits, count, threshold, num_equal, remainder, indices, values)
    bits = remainder.view(np.int32)
    threshold, num_equal = _find_threshold(bits, bits.size, num_kept)
    return _take(None, bits, bits.size, threshold, num_equal, remainder, indices, values)


@njit(nogil=True, cache=True)
def _guess_threshold(value: Array, residual: Array | None, num_kept: int) -> np.float32:
    """Return a magnitude that slightly more than `num_kept` elements probably reach, from a sample of them."""
    sample = _sample(value, residual)
    share = num_kept / value.size
    expected = sample.size * share
    rank = int(expected + _DEVIATIONS * np.sqrt(expected * (1 - share))) + 2
    if rank > sample.size:
        return np.float32(0)
    bits = np.empty(1, np.int32)
    # At least the smallest positive number: in a sparse block zeros are not worth collecting. At most infinity: NaN is
    # above every threshold, but is no threshold itself.
    bits[0] = min(max(int(_find_threshold(sample.view(np.int32), sample.size, rank)[0]), 1), int(_INFINITE))
    threshold: np.float32 = bits.view(np.float32)[0]
    return threshold


@njit(nogil=True, cache=True)
def _sample(value: Array, residual: Array | None) -> Array:
    """Return every 32nd element, but at least 1,024 and at most 16,384, if there are that many."""
    num_sampled = min(max(value.size // 32, min(value.size, 1024)), 16384)
    stride = value.size // num_sampled
    sample = np.empty(num_sampled, np.float32)
    for i in range(num_sampled):
        # Scattered inside its stride, so that the sample does not run down one column of a matrix.
        place = i * stride + ((i * 2654435761) >> 16) % stride
        sample[i] = value[place] if residual is None else value[place] + residual[place]
    return sample


@njit(nogil=True, cache=True)
def _add_and_collect(
    value: Array,
    residual: Array | None,
    threshold: np.float32,
    capacity: int,
    remainder: Array,
    places: Array,
    bits: Array,
) -> int:
    """Add up, and collect elements that reach `threshold`; return their number, or any number above `capacity`."""
    marks = np.zeros(_TILE, np.uint8)
    words = marks.view(np.uint64)
    marked_words = np.empty(_TILE // 8, np.int64)
    count = 0
    # Several simple loops over slices, and stores without branches: the compiler makes these fast.
    for begin in range(0, value.size, _TILE):
        x = value[begin : begin + _TILE]
        y = remainder[begin : begin + _TILE]
        if residual is None:
            for i in range(x.size):
                y[i] = x[i]
                marks[i] = not abs(x[i]) < threshold
        else:
            r = residual[begin : begin + _TILE]
            for i in range(x.size):
                z = x[i] + r[i]
                y[i] = z
                marks[i] = not abs(z) < threshold  # so that NaN is marked
        if count > capacity:
            continue
        y_bits = y.view(np.int32)
        num_words = 0
        for word in range((x.size + 7) // 8):
            marked_words[num_words] = word
            num_words += words[word] != 0
        for word in marked_words[:num_words]:
            for i in range(8 * word, min(8 * word + 8, x.size)):
                places[count] = begin + i
                bits[count] = y_bits[i]
                count += marks[i]
    return count


@njit(nogil=True, cache=True)
def _find_threshold(bits: Array, count: int, rank: int) -> tuple[np.int32, int]:
    """Return the `rank`-th largest magnitude of the first `count`, and the number of its equals within the `rank`.

    Magnitudes are integers of 31 bits; they are found digit by digit (radix selection), in three passes.
    """
    threshold = np.int32(0)
    known = 31
    for width in (11, 10, 10):
        shift = known - width
        histogram = np.zeros(1 << width, np.int64)
        for i in range(count):
            magnitude = bits[i] & _MAGNITUDE
            if magnitude >> known == threshold >> known:
                histogram[(magnitude >> shift) & ((1 << width) - 1)] += 1
        digit = (1 << width) - 1
        while histogram[digit] < rank:
            rank -= histogram[digit]
            digit -= 1
        threshold |= np.int32(digit << shift)
        known = shift
    return threshold, rank


@njit(nogil=True, cache=True)
def _take(
    places: Array | None,
    bits: Array,
    count: int,
    threshold: np.int32,
    num_equal: int,
    remainder: Array,
    indices: Array,
    values: Array,
) -> bool:
    """Select those above `threshold`, and the first `num_equal` at it; return whether all are finite."""
    floats = bits.view(np.float32)
    num_taken = 0
    largest = np.int32(0)
    for i in range(count):
        magnitude = bits[i] & _MAGNITUDE
        if magnitude < threshold or (magnitude == threshold and num_equal == 0):
            continue
        num_equal -= magnitude == threshold
        largest = max(largest, magnitude)
        place = i
        if places is not None:
            place = places[i]
        indices[num_taken] = place
        values[num_taken] = floats[i]
        remainder[place] = 0
        num_taken += 1
    return bool(largest < _INFINITE)
