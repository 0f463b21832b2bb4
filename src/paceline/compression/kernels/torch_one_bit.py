"""Reference kernels of `OneBit`: bit i of byte j says whether element 8 j + i is at least zero."""

import torch
from torch import Tensor

from paceline.compression.codec import Flag, flag_of
from paceline.compression.kernels.torch_rows import cut_tiles, decode, fill_rows
from paceline.compression.rows import RowLayout

__all__ = ["decode", "encode"]


def encode(
    value: Tensor, residual: Tensor | None, rows: RowLayout, payload: Tensor, new_residual: Tensor | None
) -> Flag:
    """Encode ``value + residual`` into `payload`, and the encoding error into `new_residual`.

    Args:
        value: Flat fp32 elements of the rows of `payload`, from the first on.
        residual: Residual, like `value`; None for zero.
        rows: Layout of the payload's rows.
        payload: Output, from ``rows.new_payload``.
        new_residual: Output of the encoding error, like `value`; None if `residual` is None.

    Returns:
        Whether all encoded elements are finite.
    """
    assert (residual is None) == (new_residual is None)
    wanted = value if residual is None else value + residual
    num_elements = len(wanted)
    tiles = cut_tiles(wanted, rows.tile)
    counts = (num_elements - torch.arange(0, num_elements, rows.tile, device=value.device)).clamp(max=rows.tile)
    scales = (tiles.abs().sum(1, dtype=torch.float64) / counts).float()
    signs = tiles >= 0
    signs.view(-1)[num_elements:] = False
    if new_residual is not None:
        scale = scales.unsqueeze(1)
        new_residual.copy_((tiles - torch.where(signs, scale, -scale)).view(-1)[:num_elements])
    # Eight flags as one 64-bit number: the product brings bit 0 of byte i to bit 56 + i.
    words = signs.view(torch.int64).view(-1)[: -(-num_elements // 8)]
    fill_rows(payload, rows, scales, ((words * 0x0102040810204080 >> 56) & 0xFF).to(torch.uint8))
    return flag_of(scales.isfinite().all())
