"""Reference kernels of top-k, in plain torch."""

import torch
from torch import Tensor

from paceline.compression.codec import Flag, flag_of


def select(
    value: Tensor, residual: Tensor | None, num_kept: int, remainder: Tensor, indices: Tensor, values: Tensor
) -> Flag:
    """Split ``value + residual`` into its `num_kept` largest magnitudes and the rest.

    Args:
        value: Elements: fp32, shape ``(d,)``.
        residual: Residual, like `value`; None for zeros.
        num_kept: Number of elements to select, in [1, d]. Of equal magnitudes the first are selected.
        remainder: Output, like `value`: the sum with zeros where an element was selected.
        indices: Output: int32 or int64, shape ``(num_kept,)``; positions of the selected elements, ascending.
        values: Output: fp32, shape ``(num_kept,)``; the selected elements.

    Returns:
        Whether the sum is finite everywhere.
    """
    if residual is None:
        remainder.copy_(value)
    else:
        torch.add(value, residual, out=remainder)
    # As integers, the bits without the sign are ordered like the magnitudes; NaN comes above infinity. Subtracting the
    # place makes all different, so that no number of results is unknown, which the host would have to wait for.
    magnitudes = (remainder.view(torch.int32) & 0x7FFFFFFF).long() << 32
    magnitudes -= torch.arange(len(magnitudes), device=value.device)
    places = magnitudes.topk(num_kept, sorted=False).indices.sort().values
    indices.copy_(places)
    values.copy_(remainder[places])
    remainder[places] = 0
    return flag_of(values.isfinite().all())
