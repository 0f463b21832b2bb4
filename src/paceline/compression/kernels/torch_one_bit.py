"""The reference of `OneBit`'s kernels: bit i of byte j says whether element 8 j + i is at least zero."""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.compression.rows import Rows


def encode(value: Tensor, residual: Tensor | None, rows: Rows, payload: Tensor, new_residual: Tensor | None) -> bool:
    """Encode ``value + residual`` into `payload`, and what that left out into `new_residual`.

    Args:
        value: fp32, flat: what lies in the rows of `payload`, from its first on.
        residual: Like `value`.
        rows: How it lies there.
        payload: ``rows.new_payload``; filled.
        new_residual: Like `value`; filled. None with `residual`.

    Returns:
        Whether all that was encoded is finite.
    """
    assert (residual is None) == (new_residual is None)
    wanted = value if residual is None else value + residual
    num_elements = len(wanted)
    tiles = F.pad(wanted, (0, -num_elements % rows.tile)).view(-(-num_elements // rows.tile), rows.tile)
    counts = (num_elements - torch.arange(0, num_elements, rows.tile, device=value.device)).clamp(max=rows.tile)
    scales = (tiles.abs().sum(1, dtype=torch.float64) / counts).float()
    signs = tiles >= 0
    signs.view(-1)[num_elements:] = False
    if new_residual is not None:
        scale = scales.unsqueeze(1)
        new_residual.copy_((tiles - torch.where(signs, scale, -scale)).view(-1)[:num_elements])
    # One byte of 8 flags, taken as a number: the product brings bit 0 of byte i to bit 56 + i.
    words = signs.view(torch.int64).view(-1)[: -(-num_elements // 8)]
    codes = ((words * 0x0102040810204080 >> 56) & 0xFF).to(torch.uint8)
    for row in range(len(payload)):
        first, end = row * rows.tiles_per_row, (row + 1) * rows.tiles_per_row
        row_scales = scales[first:end].view(torch.uint8)
        row_codes = codes[first * rows.tile // 8 : end * rows.tile // 8]
        payload[row, : len(row_scales)] = row_scales
        payload[row, rows.codes_begin : rows.codes_begin + len(row_codes)] = row_codes
    return bool(scales.isfinite().all())


def decode(payload: Tensor, rows: Rows, output: Tensor, *, add: bool = False) -> None:
    """Fill `output`, flat, with what the rows of `payload` hold, or add that to it."""
    shifts = torch.arange(8, dtype=torch.uint8, device=payload.device)
    length = rows.tiles_per_row * rows.tile
    for row in range(len(payload)):
        part = output[row * length : (row + 1) * length]
        codes = payload[row, rows.codes_begin :][: -(-len(part) // 8)]
        bits = ((codes.unsqueeze(1) >> shifts) & 1).flatten()[: len(part)]
        scales = payload[row, : rows.codes_begin].clone().view(torch.float32)
        scale = scales.repeat_interleave(rows.tile)[: len(part)]
        decoded = torch.where(bits.bool(), scale, -scale)
        part.copy_(part + decoded if add else decoded)
