"""Numbers for contract checks: different by rank and place, so that a wrong sum shows."""

import math

import torch
from torch import Tensor

LARGE = {
    torch.float64: 2**50,
    torch.float32: 2**20,
    torch.float16: 0,
    torch.bfloat16: 0,
    torch.int64: 2**60,
    torch.int32: 2**28,
    torch.uint8: 0,
}
"""Number, by dtype, to which small ones can be added over a few ranks without rounding."""
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (3, 1, 5), (1031,))


def pattern(rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return small numbers, different by rank and place, on top of the dtype's large one."""
    places = torch.arange(math.prod(shape)).view(shape) % 5
    return (places + rank + LARGE.get(dtype, 0)).to(device, dtype)


def random_values(rank: int, num_elements: int, device: torch.device) -> Tensor:
    """Return values of very different sizes, whose sum depends on its order."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.rand(num_elements, generator=generator) * 16 - 8
    return (torch.randn(num_elements, generator=generator) * 10**exponents).to(device)


def expect_equal(actual: Tensor, expected: Tensor, what: str) -> None:
    """Raise `AssertionError`, with the first different place, unless `actual` is `expected` bit for bit."""
    if torch.equal(actual, expected):
        return
    assert actual.shape == expected.shape, f"{what} must have shape {tuple(expected.shape)}, not {tuple(actual.shape)}"
    place = int((actual != expected).flatten().nonzero()[0])
    wrong, right = actual.flatten()[place].item(), expected.flatten()[place].item()
    raise AssertionError(f"{what} must be {right} at place {place}, but is {wrong}")
