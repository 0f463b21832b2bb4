"""Tensors in 8 bits an element: block-wise dynamic quantisation (Dettmers et al. 2022).

Each block of neighbouring elements is divided by its largest magnitude, and each quotient replaced by the number of the
nearest of some 255 values from -1 to 1, which are denser close to 0: seven decades of 1 to 64 values
on either side of it. The unsigned variant has twice as many above 0, and 0 itself only for a block of zeros, so that
no small value is rounded to 0. Unlike in the paper -1 is among the values, so that decoding and encoding again
changes nothing.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

BLOCK_SIZE = 256
"""Number of elements that share a scale."""
NUM_DECADES = 7
_MIDDLE = 2**15
_TINY = 2.0**-126
"""Smallest scale that is divided by: the smallest normal float32."""


@dataclass(frozen=True)
class Encoded:
    """A flat tensor in 8 bits an element and 32 a block.

    Args:
        codes: Codes: uint8, one for each element.
        scales: Scales: float32, one for each block; the last block may be shorter.
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def zeros(cls, num_elements: int, device: torch.device) -> "Encoded":
        """Return zeros; they decode to zeros of either kind."""
        codes = torch.zeros(num_elements, dtype=torch.uint8, device=device)
        return cls(codes, torch.zeros(-(-num_elements // BLOCK_SIZE), dtype=torch.float32, device=device))

    def narrow(self, start: int, stop: int) -> "Encoded":
        """Return the elements from `start`, where a block must begin, to `stop`: a view."""
        return Encoded(self.codes[start:stop], self.scales[start // BLOCK_SIZE : -(-stop // BLOCK_SIZE)])

    def encode(self, values: Tensor, *, is_signed: bool) -> None:
        """Encode flat float32 `values` into this tensor."""
        blocks = _pad(values)
        torch.amax(blocks.abs(), dim=1, out=self.scales)
        quotients = blocks * self.scales.clamp(min=_TINY).reciprocal()[:, None]
        # The 16 bits of the quotient as a half float look up the nearest value: many times faster than a
        # search, and as accurate, since half floats are at least seven times denser than the values.
        halves = quotients.half().view(torch.int16).flatten()[: len(values)]
        _, codes = _tables(values.device, is_signed)
        torch.index_select(codes, 0, halves.int() + _MIDDLE, out=self.codes)

    def decode(self, *, is_signed: bool) -> Tensor:
        """Return the values as float32."""
        table, _ = _tables(self.codes.device, is_signed)
        quotients = _pad(table.index_select(0, self.codes.int()))
        return (quotients * self.scales[:, None]).flatten()[: len(self.codes)]


def values_by_code(device: torch.device, *, is_signed: bool) -> Tensor:
    """Return the values of the codes, ascending: float32, shape ``(num_codes,)``."""
    return _tables(device, is_signed)[0]


def _pad(values: Tensor) -> Tensor:
    """Return flat values as rows of one block each, the last one padded with 0."""
    missing = -len(values) % BLOCK_SIZE
    return torch.nn.functional.pad(values, (0, missing)).view(-1, BLOCK_SIZE)


@cache
def _tables(device: torch.device, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Return the values by code, ascending, and the code of each half float by its bits, a number from -2**15 on."""
    with unset_fake_temporarily():  # a rehearsal of a step must not cache tables without contents
        return _make_tables(device, is_signed)


def _make_tables(device: torch.device, is_signed: bool) -> tuple[Tensor, Tensor]:
    values: list[float] = []
    for decade in range(NUM_DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not is_signed)) + 1, dtype=torch.float64)
        values += ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - NUM_DECADES + 1)).tolist()
    values[-1] = 1.0
    if is_signed:
        values = [*(-value for value in reversed(values)), 0.0, *values]
    table = torch.tensor(values, dtype=torch.float32)
    halves = torch.arange(-_MIDDLE, _MIDDLE, dtype=torch.int16).view(torch.float16).nan_to_num(1.0)
    codes = torch.bucketize(halves.float(), (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return table.to(device), codes.to(device)
