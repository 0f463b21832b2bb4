"""Normalisation by the mean and variance of all workers' samples, with the gradient through both.

Each worker's mean and squared deviations are merged in float64 (Chan et al. 1979), weighted by their numbers of
values, so that nothing cancels if a mean is large.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from paceline.comm.group import Group


class Statistics(NamedTuple):
    """Mean and variance of each channel over the samples of all workers, in float64."""

    mean: Tensor
    variance: Tensor
    num_values: Tensor
    """Number of values per channel; 0-dim."""
    num_own_values: int
    """Number of this worker's values per channel."""


@torch.no_grad()
def gather_statistics(input: Tensor, group: Group, name: str, *, counts: bool) -> Statistics:
    """Return the statistics of all workers' inputs, bitwise the same on each; NaN if there are no values.

    Args:
        input: Input of the layer, of shape (samples, channels, ...).
        group: The workers; each of them calls it.
        name: Name of the operation in errors.
        counts: Whether this worker's samples count.
    """
    num_features = input.shape[1]
    count = input.numel() // num_features if counts else 0
    mine = input.new_zeros(2 * num_features + 1, dtype=torch.float64)
    if count:
        # A GPU computes statistics of 16-bit inputs in 32 bits by itself.
        exact = input if input.is_cuda else input.to(statistics_dtype(input))
        mean, variance = torch.batch_norm_update_stats(exact, None, None, 0.0)
        mine = torch.cat([mean.double(), variance.double() * count, mine.new_full((1,), count)])
    everybody = mine.new_zeros(group.size, len(mine))
    with _disable_current_modes():  # selective recomputation must not see the group's tensor operations
        group.all_gather(everybody, mine, name=name).wait()
    means, squares, counted = everybody.split([num_features, num_features, 1], dim=1)
    total = counted.sum()
    mean = (counted * means).sum(0) / total
    variance = (squares + counted * (means - mean).square()).sum(0) / total
    return Statistics(mean, variance, total, count)


def statistics_dtype(input: Tensor) -> torch.dtype:
    """Return the dtype of an input's statistics."""
    return torch.promote_types(input.dtype, torch.float32)


class Normalise(torch.autograd.Function):
    """Normalises by given statistics; their gradient goes to the samples of all workers.

    Every worker runs backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Statistics,
        eps: float,
        group: Group,
        name: str,
    ) -> Tensor:
        """Return the normalised input; the arguments are as in `torch.nn.functional.batch_norm`."""
        dtype = weight.dtype if weight is not None else statistics_dtype(input)
        mean, variance = statistics.mean.to(dtype), statistics.variance.to(dtype)
        ctx.save_for_backward(input, weight, mean, variance, statistics.num_values)
        ctx.is_counted, ctx.eps, ctx.group, ctx.name = statistics.num_own_values > 0, eps, group, name
        return F.batch_norm(input, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        input, weight, mean, variance, num_values = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # As if the statistics were constants; this also computes both sums that the rest needs.
        of_input, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, input, weight, mean, variance, None, None, False, ctx.eps, [needs_input, True, True]
        )
        if needs_input:
            sums = torch.cat([of_bias, of_weight]).double()
            ctx.group.all_reduce(sums, name=ctx.name).wait()
            if ctx.is_counted:
                means = sums / num_values
                of_input = of_input - _through_statistics(input, weight, mean, variance, means, ctx.eps)
        return (
            of_input if needs_input else None,
            of_weight if needs_weight else None,
            of_bias if needs_bias else None,
            *[None] * 4,
        )


def _through_statistics(
    input: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, means: Tensor, eps: float
) -> Tensor:
    """Return the gradient of the input through mean and variance, negated.

    Args:
        input: Input of the layer.
        weight: Weight of the layer.
        mean: Mean of each channel.
        variance: Variance of each channel.
        means: Means, over all values, of the output's gradient and of its product with the normalised input.
        eps: Epsilon of the layer.
    """
    shape = [1, -1, *[1] * (input.dim() - 2)]
    of_gradient, of_product = means.chunk(2)
    deviation = (variance.double() + eps).sqrt()
    scale = (1.0 if weight is None else weight) / deviation
    slope = (scale * of_product / deviation).to(mean.dtype).view(shape)
    return (input - mean.view(shape)).mul_(slope).add_((scale * of_gradient).to(mean.dtype).view(shape))
