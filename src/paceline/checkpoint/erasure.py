"""Erasure codes: `num_parity` parity blocks for `num_data` blocks, of which any `num_data` restore all.

Reed and Solomon, "Polynomial Codes over Certain Finite Fields", 1960, in the systematic form: data stay as they are.
Parity is a matrix times the data over GF(256). One row of ones is plain XOR (RAID 5); the second row, powers of 2, is
that of RAID 6 (Anvin, "The mathematics of RAID-6"); from three rows on the matrix is Cauchy's, scaled so that its first
row is of ones (Blömer et al., "An XOR-Based Erasure-Resilient Coding Scheme", 1995). With one data block each parity
block is a copy of it.

Blocks of any length are coded byte by byte, so that they can be cut anywhere and coded as they arrive.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from paceline.checkpoint.galois import Bytes, combine, invert, invert_matrix, multiply, power
from paceline.errors import CheckpointError, SettingsError

MAX_BLOCKS = 256
"""Largest number of blocks of one code, data and parity together."""


class ErasureCode:
    """A code of `num_data` data blocks, numbered from 0, and `num_parity` parity blocks, numbered after them.

    Raises:
        SettingsError: The numbers are too small, or together more than 256.
    """

    def __init__(self, num_data: int, num_parity: int) -> None:
        if num_data < 1 or num_parity < 1 or num_data + num_parity > MAX_BLOCKS:
            raise SettingsError(
                f"an erasure code must have at least 1 data and 1 parity block, and at most {MAX_BLOCKS} together, but "
                f"got {num_data} + {num_parity}; choose others"
            )
        self.num_data = num_data
        self.num_parity = num_parity

    @cached_property
    def parity_matrix(self) -> Bytes:
        """Factors of the data in each parity block."""
        k, m = self.num_data, self.num_parity
        if m <= 2 or k == 1:
            return np.array([[power(row * column) for column in range(k)] for row in range(m)], np.uint8)
        cauchy = [[invert((k + row) ^ column) for column in range(k)] for row in range(m)]
        return np.array([[multiply(row[c], invert(cauchy[0][c])) for c in range(k)] for row in cauchy], np.uint8)

    def encode(self, data_KN: Bytes, parity_MN: Bytes | None = None) -> Bytes:
        """Return the parity blocks of data blocks, whose length is a multiple of 8.

        Args:
            data_KN: Data blocks; contiguous rows.
            parity_MN: Memory for the result; new memory by default.
        """
        assert data_KN.shape[0] == self.num_data
        if parity_MN is None:
            parity_MN = np.empty((self.num_parity, data_KN.shape[1]), np.uint8)
        combine(self.parity_matrix, data_KN, parity_MN)
        return parity_MN

    def decode(self, blocks: Mapping[int, Bytes]) -> dict[int, Bytes]:
        """Return the data blocks that are missing among `blocks`, by number.

        Args:
            blocks: Blocks that are there, by number; of more than needed the data blocks and first parity blocks count.

        Raises:
            CheckpointError: Fewer blocks are there than data blocks.
        """
        missing = [number for number in range(self.num_data) if number not in blocks]
        if not missing:
            return {}
        if len(blocks) < self.num_data:
            raise CheckpointError(
                f"{self.num_data} of {self.num_data + self.num_parity} blocks must be left to restore the others, but "
                f"got {len(blocks)}; load an older checkpoint"
            )
        used = sorted(blocks)[: self.num_data]
        found = np.empty((len(missing), len(blocks[used[0]])), np.uint8)
        combine(self.restoring_rows(used, missing), np.stack([blocks[number] for number in used]), found)
        return dict(zip(missing, found, strict=True))

    def restoring_rows(self, used: Sequence[int], missing: Sequence[int]) -> Bytes:
        """Return the factors by which the blocks in `used`, as many as data blocks, make the data blocks `missing`."""
        generator = np.concatenate([np.eye(self.num_data, dtype=np.uint8), self.parity_matrix])
        return invert_matrix(generator[list(used)])[list(missing)]
