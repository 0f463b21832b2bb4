"""CRC-32C (Castagnoli), eight bytes at a time (Kounavis and Berry 2005), compiled."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8


def masked_crc32c(content: bytes) -> int:
    """Return the CRC-32C of bytes as TFRecord files hold it: rotated and shifted by a constant."""
    crc = int(_update(np.frombuffer(content, dtype=np.uint8), _TABLES))
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF


def _make_tables() -> NDArray[np.uint32]:
    tables = np.zeros((8, 256), dtype=np.uint32)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL * (crc & 1))
        tables[0, byte] = crc
    for number in range(1, 8):
        tables[number] = (tables[number - 1] >> 8) ^ tables[0, tables[number - 1] & 0xFF]
    return tables


_TABLES = _make_tables()


@njit(nogil=True, cache=True)
def _update(content: NDArray[np.uint8], tables: NDArray[np.uint32]) -> np.uint32:
    crc = np.uint32(0xFFFFFFFF)
    whole = content.size - content.size % 8
    for place in range(0, whole, 8):
        crc = (
            tables[7, content[place] ^ (crc & np.uint32(0xFF))]
            ^ tables[6, content[place + 1] ^ ((crc >> np.uint32(8)) & np.uint32(0xFF))]
            ^ tables[5, content[place + 2] ^ ((crc >> np.uint32(16)) & np.uint32(0xFF))]
            ^ tables[4, content[place + 3] ^ (crc >> np.uint32(24))]
            ^ tables[3, content[place + 4]]
            ^ tables[2, content[place + 5]]
            ^ tables[1, content[place + 6]]
            ^ tables[0, content[place + 7]]
        )
    for place in range(whole, content.size):
        crc = tables[0, (crc ^ np.uint32(content[place])) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    return np.uint32(crc ^ np.uint32(0xFFFFFFFF))
