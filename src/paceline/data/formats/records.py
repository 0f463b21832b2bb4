"""The table of records: where each begins and how long it is, in a file of which only the needed rows are read."""

import os
import tempfile
import weakref
from collections.abc import Iterable
from typing import BinaryIO

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from paceline.data.orders import Indices

ROW_BYTES = 16
_CHUNK_BYTES = 1 << 22


class RecordTable:
    """Rows (first byte, number of bytes) of 16 bytes, read when needed.

    A table of ten million samples takes 160 MB of disk and no memory: processes that map it would count its pages as
    theirs.

    Args:
        file: File that holds the rows; processes that are forked share it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        weakref.finalize(self, file.close)
        self.num_rows = os.fstat(file.fileno()).st_size // ROW_BYTES

    @classmethod
    def from_parts(cls, parts: Iterable[bytes]) -> "RecordTable":
        """Return a table in a file that has no name and goes with the process."""
        file = tempfile.TemporaryFile(prefix="paceline-records-")  # noqa: SIM115  # open as long as the table
        for part in parts:
            file.write(part)
        file.flush()
        return cls(file)

    def look_up(self, rows: Indices) -> NDArray[np.int64]:
        """Return rows, [number of rows, 2]."""
        descriptor = self._file.fileno()
        read = os.pread
        joined = b"".join([read(descriptor, ROW_BYTES, ROW_BYTES * row) for row in rows.tolist()])
        return np.frombuffer(joined, dtype="<i8").reshape(-1, 2)

    def digest(self) -> str:
        """Return the blake3 digest of the table."""
        hasher, position = blake3(), 0
        while part := os.pread(self._file.fileno(), _CHUNK_BYTES, position):
            hasher.update(part)
            position += len(part)
        return hasher.hexdigest()


def pack_rows(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> bytes:
    """Return rows of a table."""
    return np.stack([starts, sizes], axis=1).astype("<i8").tobytes()
