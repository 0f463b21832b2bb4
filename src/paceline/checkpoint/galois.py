"""Linear combinations of bytes over the field GF(256), for erasure codes, compiled by numba.

The field is that of RAID 6: polynomials over two elements modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d), of which 2
generates all others. Addition is XOR. To multiply many bytes by known factors, eight at a time in a word, the sum is
made bit by bit of the factors, from the highest: double what there is, and add each input whose factor has the bit.
That needs no table, only XORs and shifts that the processor does on whole vectors, and a factor of 1 costs one XOR.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[Any]

WORD_BYTES = 8
_TILE = 1024
"""Words of a tile: what is summed stays in the first cache."""
_HIGH = np.uint64(0x8080808080808080)
_REDUCE = np.uint64(0x1D1D1D1D1D1D1D1D)
_ONE, _SEVEN = np.uint64(1), np.uint64(7)


def combine(matrix_MK: Bytes, data_KN: Bytes, out_MN: Bytes) -> None:
    """Fill ``out`` with the product of `matrix` and `data` over the field.

    Args:
        matrix_MK: Factors.
        data_KN: Inputs; contiguous rows, of a multiple of 8 bytes.
        out_MN: Results, in other memory.
    """
    assert data_KN.shape[1] % WORD_BYTES == 0
    _combine(matrix_MK, data_KN.view(np.uint64), out_MN.view(np.uint64))


@njit(nogil=True, cache=True)
def _combine(matrix: Bytes, data: _Words, out: _Words) -> None:
    num_rows, num_inputs = matrix.shape
    num_words = data.shape[1]
    total = np.empty(_TILE, np.uint64)
    for first in range(0, num_words, _TILE):
        count = min(_TILE, num_words - first)
        for row in range(num_rows):
            total[:count] = 0
            is_begun = False
            for bit in range(7, -1, -1):
                if is_begun:
                    _double(total, count)
                for source in range(num_inputs):
                    if matrix[row, source] >> bit & 1:
                        _add(total, data[source, first : first + count])
                        is_begun = True
            out[row, first : first + count] = total[:count]


@njit(nogil=True, cache=True)
def _double(total: _Words, count: int) -> None:
    for place in range(count):
        word = total[place]
        high = word & _HIGH
        total[place] = ((word ^ high) << _ONE) ^ (((high << _ONE) - (high >> _SEVEN)) & _REDUCE)


@njit(nogil=True, cache=True)
def _add(total: _Words, data: _Words) -> None:
    for place in range(len(data)):
        total[place] ^= data[place]


def _make_tables() -> tuple[Bytes, list[int]]:
    powers, logarithms, value = np.zeros(510, np.uint8), [0] * 256, 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logarithms[value] = exponent
        value = value << 1 ^ (0x11D if value & 0x80 else 0)
    return powers, logarithms


_POWERS, _LOGARITHMS = _make_tables()


def multiply(a: int, b: int) -> int:
    """Return the product of two elements."""
    return int(_POWERS[_LOGARITHMS[a] + _LOGARITHMS[b]]) if a and b else 0


def invert(a: int) -> int:
    """Return the inverse of an element that is not 0."""
    assert a, "0 has no inverse"
    return int(_POWERS[255 - _LOGARITHMS[a]])


def power(exponent: int) -> int:
    """Return a power of 2, the generator."""
    return int(_POWERS[exponent % 255])


def invert_matrix(matrix: Bytes) -> Bytes:
    """Return the inverse of a square matrix that has one, by Gauss and Jordan."""
    size = len(matrix)
    rows = [[*map(int, row), *(int(place == column) for column in range(size))] for place, row in enumerate(matrix)]
    for column in range(size):
        pivot = next(place for place in range(column, size) if rows[place][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = invert(rows[column][column])
        rows[column] = [multiply(scale, value) for value in rows[column]]
        for place in range(size):
            if place != column and (factor := rows[place][column]):
                rows[place] = [
                    value ^ multiply(factor, other) for value, other in zip(rows[place], rows[column], strict=True)
                ]
    return np.array([row[size:] for row in rows], np.uint8)
