"""Top-k: each worker sends its largest elements and their indices."""

import math
from collections.abc import Generator
from dataclasses import dataclass
from statistics import NormalDist

import torch
from pydantic import Field
from torch import Size, Tensor

from paceline.compression.codec import (
    Algebra,
    AllGather,
    Codec,
    CodecContext,
    Exchange,
    Exchanged,
    Flag,
    Request,
    State,
    dense_payloads,
    exchange_dense,
)
from paceline.compression.kernels import find_kernels
from paceline.registry import register

INT64_ELEMENTS = 2**31
"""Blocks of this size or more have indices of 8 bytes."""


@register("top_k")
class TopK(Codec):
    """The largest elements of value and residual, by magnitude (Aji and Heafield 2017; Stich et al. 2018).

    Of d elements a worker sends exactly k = ceil(`density` * d), at least 1, unrounded; of equal magnitudes the
    first. The unsent elements are its residual, to the bit. The error of one block is at most (1 - k/d) of its
    squared norm. Density 1 is the exact sum.

    On the wire: one all-gather of k values and k indices, 8 bytes for each sent element (12 in blocks of 2**31
    elements or more). Workers choose different elements, so the received bytes grow with their number: from
    1 / `density` workers on, a dense all-reduce is cheaper.
    """

    algebra = Algebra.GATHER
    suits_steps = True

    density: float = Field(default=0.01, gt=0, le=1)
    """Share of the elements that are sent."""
    error_feedback: bool = True
    """Whether unsent elements are added to the next step's value."""

    def exchange(self, value: Tensor, state: State, context: CodecContext) -> Exchange:
        """Gather the largest elements of all workers; each worker adds them up, by rank."""
        if self.is_dense(value.shape):
            return (yield from exchange_dense(value))
        num_kept = count_kept(value.shape, self.density)
        sent = yield from exchange_largest(value, state.get("worker"), num_kept)
        kept = {"worker": sent.remainder} if self.error_feedback else {}
        return Exchanged(sent.total, kept, sent.is_finite)

    def contraction(self, shape: Size) -> float:
        """Return the share of the squared norm in the largest elements: more than their share of the elements."""
        if self.is_dense(shape):
            return 1.0
        share = count_kept(shape, self.density) / shape.numel()
        normal = NormalDist()
        least = normal.inv_cdf(1 - share / 2) if share < 1 else 0.0
        return share + 2 * least * normal.pdf(least)

    def payloads(self, shape: Size, num_workers: int) -> list[tuple[type[Request], int]]:
        """One round; the same number of elements, whatever the values."""
        if self.is_dense(shape):
            return dense_payloads(shape)
        return [(AllGather, largest_bytes(shape, count_kept(shape, self.density)))]


@dataclass(frozen=True)
class Largest:
    """Result of exchanging the largest elements.

    Args:
        total: Sum of all workers' payloads, in the shape of the value.
        remainder: Elements that this worker did not send, in the shape of the value.
        indices: Indices in the flat value of the elements that this worker sent.
        is_finite: Whether value and residual were finite.
    """

    total: Tensor
    remainder: Tensor
    indices: Tensor
    is_finite: Flag


def exchange_largest(value: Tensor, residual: Tensor | None, num_kept: int) -> Generator[Request, Tensor, Largest]:
    """Exchange the `num_kept` largest elements of ``value + residual``."""
    indices = torch.empty(num_kept, dtype=_index_dtype(value.shape), device=value.device)
    values = torch.empty(num_kept, dtype=torch.float32, device=value.device)
    remainder = torch.empty_like(value)
    is_finite = find_kernels("top_k", value.device).select(
        value.view(-1), None if residual is None else residual.view(-1), num_kept, remainder.view(-1), indices, values
    )
    gathered = yield AllGather(torch.cat([indices.view(torch.uint8), values.view(torch.uint8)]), is_finite)
    return Largest(_sum_largest(gathered, value, num_kept), remainder, indices, is_finite)


def count_kept(shape: Size, density: float) -> int:
    """Return the number of elements of a block that are sent."""
    # Rounded first: 0.07 * 100 is 7.000000000000001, and 8 would be kept.
    return max(math.ceil(round(density * shape.numel(), 6)), 1)


def largest_bytes(shape: Size, num_kept: int) -> int:
    """Return the size of a worker's payload."""
    return num_kept * (_index_dtype(shape).itemsize + 4)


def _index_dtype(shape: Size) -> torch.dtype:
    return torch.int64 if shape.numel() >= INT64_ELEMENTS else torch.int32


def _sum_largest(gathered: Tensor, value: Tensor, num_kept: int) -> Tensor:
    """Return the sum of all payloads: by rank, so that it is bitwise equal on all workers."""
    dtype = _index_dtype(value.shape)
    parts = gathered.split([num_kept * dtype.itemsize, num_kept * 4], dim=1)
    indices, values = (
        part.contiguous().view(number) for part, number in zip(parts, (dtype, torch.float32), strict=True)
    )
    total = torch.zeros_like(value)
    for row in range(len(gathered)):
        total.view(-1).index_add_(0, indices[row], values[row])
    return total
