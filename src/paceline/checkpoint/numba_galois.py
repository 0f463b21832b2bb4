"""Linear combinations of bytes over GF(256), compiled by numba: see `galois`.

Eight bytes at a time are in a word. The sum is made bit by bit of the factors, from the highest: double what there is,
and add each input whose factor has the bit. That needs no table, only XORs and shifts, which processors do on whole
vectors, and a factor of 1 costs one XOR.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

_Array = npt.NDArray[Any]

_TILE = 1024
"""Words of a tile: what is summed stays in the first cache."""
_HIGH = np.uint64(0x8080808080808080)
_REDUCE = np.uint64(0x1D1D1D1D1D1D1D1D)
_ONE, _SEVEN = np.uint64(1), np.uint64(7)


@njit(nogil=True, cache=True)
def combine(matrix: _Array, data: _Array, out: _Array) -> None:
    """Fill `out` with the product of `matrix` and `data`, each word of which is eight elements of the field."""
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
def _double(total: _Array, count: int) -> None:
    for place in range(count):
        word = total[place]
        high = word & _HIGH
        total[place] = ((word ^ high) << _ONE) ^ (((high << _ONE) - (high >> _SEVEN)) & _REDUCE)


@njit(nogil=True, cache=True)
def _add(total: _Array, data: _Array) -> None:
    for place in range(len(data)):
        total[place] ^= data[place]
