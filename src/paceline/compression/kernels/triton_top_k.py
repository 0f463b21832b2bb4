"""Kernels of top-k for GPUs, in Triton: five passes, exact whatever the data.

The k-th magnitude, an integer of 31 bits, is found digit by digit (radix selection) from three histograms, the first
of which is counted while the residual is added. Two more passes count each program's selection, and select it.
The host does not wait for the GPU until the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


def select(
    value: Tensor, residual: Tensor | None, num_kept: int, remainder: Tensor, indices: Tensor, values: Tensor
) -> Tensor:
    """See the reference, `torch_top_k.select`."""
    size = value.numel()
    grid = (triton.cdiv(size, _BLOCK),)
    threshold = torch.zeros(1, dtype=torch.int32, device=value.device)
    rank = torch.full((1,), num_kept, dtype=torch.int64, device=value.device)
    given = (value, value if residual is None else residual)
    shift = 31
    for width in (11, 10, 10):
        shift -= width
        histogram = torch.zeros(2**width, dtype=torch.int32, device=value.device)
        added, has_residual = shift == 20, residual is not None
        _count_digits[grid](*given, remainder, histogram, threshold, size, shift, width, added, has_residual, _BLOCK)
        _descend(histogram, threshold, rank, shift)
    above, equal = torch.empty(2, *grid, dtype=torch.int64, device=value.device)
    _count_reached[grid](remainder, threshold, above, equal, size, _BLOCK)
    before = (above.cumsum(0) - above, equal.cumsum(0) - equal)
    _take[grid](remainder, threshold, rank, *before, indices, values, size, _BLOCK)
    return values.isfinite().all()


def _descend(histogram: Tensor, threshold: Tensor, rank: Tensor, shift: int) -> None:
    """Add the next digit of the `rank`-th largest magnitude to `threshold`; leave its rank below that in `rank`."""
    highest_first = histogram.flip(0)
    reached = highest_first.cumsum(0)
    num_above = (reached < rank).sum()
    threshold += (len(histogram) - 1 - num_above).int() << shift
    rank -= (reached - highest_first).index_select(0, num_above.view(1))


@triton.jit
def _count_digits(
    value_ptr,
    residual_ptr,
    total_ptr,
    histogram_ptr,
    threshold_ptr,
    size,
    shift: tl.constexpr,
    width: tl.constexpr,
    is_first: tl.constexpr,
    has_residual: tl.constexpr,
    block: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    counted = offsets < size
    if is_first:
        total = tl.load(value_ptr + offsets, mask=counted)
        if has_residual:
            total += tl.load(residual_ptr + offsets, mask=counted)
        tl.store(total_ptr + offsets, total, mask=counted)
    else:
        total = tl.load(total_ptr + offsets, mask=counted)
    magnitude = total.to(tl.int32, bitcast=True) & _MAGNITUDE
    if not is_first:
        counted &= (magnitude >> (shift + width)) == (tl.load(threshold_ptr) >> (shift + width))
    digit = (magnitude >> shift) & ((1 << width) - 1)
    counts = tl.histogram(digit, 1 << width, mask=counted)
    tl.atomic_add(histogram_ptr + tl.arange(0, 1 << width), counts, mask=counts > 0)


@triton.jit
def _count_reached(total_ptr, threshold_ptr, above_ptr, equal_ptr, size, block: tl.constexpr):
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * block + tl.arange(0, block)
    is_inside = offsets < size
    magnitude = tl.load(total_ptr + offsets, mask=is_inside).to(tl.int32, bitcast=True) & _MAGNITUDE
    threshold = tl.load(threshold_ptr)
    tl.store(above_ptr + program, tl.sum((is_inside & (magnitude > threshold)).to(tl.int32)))
    tl.store(equal_ptr + program, tl.sum((is_inside & (magnitude == threshold)).to(tl.int32)))


@triton.jit
def _take(
    total_ptr,
    threshold_ptr,
    num_equal_ptr,
    above_before_ptr,
    equal_before_ptr,
    indices_ptr,
    values_ptr,
    size,
    block: tl.constexpr,
):
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * block + tl.arange(0, block)
    is_inside = offsets < size
    total = tl.load(total_ptr + offsets, mask=is_inside)
    magnitude = total.to(tl.int32, bitcast=True) & _MAGNITUDE
    threshold = tl.load(threshold_ptr)
    num_equal = tl.load(num_equal_ptr)
    equal_before = tl.load(equal_before_ptr + program)
    is_equal = is_inside & (magnitude == threshold)
    equal_rank = equal_before + tl.cumsum(is_equal.to(tl.int32), 0)
    is_taken = (is_inside & (magnitude > threshold)) | (is_equal & (equal_rank <= num_equal))
    taken_before = tl.load(above_before_ptr + program) + tl.minimum(equal_before, num_equal)
    place = taken_before + tl.cumsum(is_taken.to(tl.int32), 0) - 1
    tl.store(indices_ptr + place, offsets.to(indices_ptr.dtype.element_ty), mask=is_taken)
    tl.store(values_ptr + place, total, mask=is_taken)
    tl.store(total_ptr + offsets, tl.zeros_like(total), mask=is_taken)
