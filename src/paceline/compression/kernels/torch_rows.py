"""Common parts of the reference kernels of `Int8` and `OneBit`: tiles, and the rows that hold their codes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.compression.rows import RowLayout


def cut_tiles(wanted: Tensor, tile: int) -> Tensor:
    """Return flat elements as ``(num_tiles, tile)``, the last tile padded with zeros."""
    num_tiles = -(-len(wanted) // tile)
    return F.pad(wanted, (0, num_tiles * tile - len(wanted))).view(num_tiles, tile)


def fill_rows(payload: Tensor, rows: RowLayout, scales: Tensor, codes: Tensor) -> None:
    """Write the scales of tiles, and the bytes of their codes, to the rows of a payload."""
    tile_bytes = rows.tile * rows.bits // 8
    for row in range(len(payload)):
        first, end = row * rows.tiles_per_row, (row + 1) * rows.tiles_per_row
        row_scales = scales[first:end].view(torch.uint8)
        row_codes = codes[first * tile_bytes : end * tile_bytes]
        payload[row, : len(row_scales)] = row_scales
        payload[row, rows.codes_begin : rows.codes_begin + len(row_codes)] = row_codes


def decode(payload: Tensor, rows: RowLayout, output: Tensor, *, add: bool = False) -> None:
    """Fill `output`, flat, with the decoded rows of `payload`, or add them to it."""
    length = rows.tiles_per_row * rows.tile
    for row in range(len(payload)):
        part = output[row * length : (row + 1) * length]
        codes = payload[row, rows.codes_begin :]
        factors = _unpack_signs(codes) if rows.bits == 1 else codes.view(torch.int8).float()
        scales = payload[row, : rows.codes_begin].clone().view(torch.float32).repeat_interleave(rows.tile)
        decoded = factors[: len(part)] * scales[: len(part)]
        part.copy_(part + decoded if add else decoded)


def _unpack_signs(codes: Tensor) -> Tensor:
    """Return 1 or -1 for each bit, the lowest of a byte first."""
    bits = (codes.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=codes.device)) & 1
    return bits.flatten().float() * 2 - 1
