"""The field GF(256), and linear combinations of many bytes over it, for erasure codes.

The field is that of RAID 6: polynomials over two elements modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d), of which 2
generates all others. Addition is XOR.
"""

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
WORD_BYTES = 8


def combine(matrix_MK: Bytes, data_KN: Bytes, out_MN: Bytes) -> None:
    """Fill ``out`` with the product of `matrix` and `data` over the field.

    Args:
        matrix_MK: Factors.
        data_KN: Inputs; contiguous rows, of a multiple of 8 bytes.
        out_MN: Results, in other memory.
    """
    from paceline.checkpoint import numba_galois  # numba takes a while, and few runs need it

    assert data_KN.shape[1] % WORD_BYTES == 0
    numba_galois.combine(matrix_MK, data_KN.view(np.uint64), out_MN.view(np.uint64))


def compile_kernels() -> None:
    """Compile what `combine` runs, or read it from numba's cache; its first call would do so, and take seconds."""
    combine(np.ones((1, 1), np.uint8), np.zeros((1, WORD_BYTES), np.uint8), np.empty((1, WORD_BYTES), np.uint8))


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
