"""Position of a block's elements in a payload that has one row per worker."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowLayout:
    """How a block is split into tiles, and its tiles into as many equal rows as there are workers.

    A row belongs to the worker that owns its elements, and holds fp32 scales, one a tile, then the codes of the
    elements. Tiles begin at multiples of `tile` in the block, so the owners do not affect any tile's encoding.

    Args:
        num_elements: Number of elements of the block; at least 1.
        num_rows: Number of workers.
        tile: Number of elements that share a scale; a multiple of 32.
        bits: Bits of one code.
    """

    num_elements: int
    num_rows: int
    tile: int
    bits: int

    @property
    def tiles_per_row(self) -> int:
        """Number of tiles that a row can hold; the last rows may hold fewer, or none."""
        return -(-self.num_elements // (self.tile * self.num_rows))

    @property
    def codes_begin(self) -> int:
        """Offset of the codes in a row, in bytes."""
        return 4 * self.tiles_per_row

    @property
    def row_bytes(self) -> int:
        """Size of a row; a multiple of 4, so that scales can be read in place."""
        most_elements = min(self.tiles_per_row * self.tile, self.num_elements)
        return self.codes_begin + -(-most_elements * self.bits // 32) * 4

    def part(self, row: int) -> slice:
        """Return the elements in a row."""
        length = self.tiles_per_row * self.tile
        return slice(min(row * length, self.num_elements), min((row + 1) * length, self.num_elements))

    def new_payload(self, device: torch.device, num_rows: int | None = None) -> Tensor:
        """Return a payload to encode into, of all rows by default; bytes that no code fills are zero."""
        num_rows = self.num_rows if num_rows is None else num_rows
        payload = torch.empty(num_rows, self.row_bytes, dtype=torch.uint8, device=device)
        num_full = self.num_elements // (self.tiles_per_row * self.tile) if num_rows == self.num_rows else 0
        payload[num_full:] = 0
        return payload
