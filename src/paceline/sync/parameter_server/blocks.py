"""Splitting parameters into blocks, assigning blocks to servers, and the layout of blocks in a message."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Size, Tensor

_ALIGNMENT = 64
"""Alignment of tensors in a buffer, in bytes: a cache line, and more than any dtype needs."""


@dataclass(frozen=True)
class ParameterBlock:
    """A parameter, or some of its rows.

    Args:
        parameter: Name of the parameter.
        start: First row.
        stop: End of the rows; 0 for a whole parameter, which may have no rows at all.
        shape: Shape of the block.
        dtype: Dtype of the parameter.
    """

    parameter: str
    start: int
    stop: int
    shape: Size
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The parameter's name, with the rows if the block has only some."""
        return f"{self.parameter}[{self.start}:{self.stop}]" if self.stop else self.parameter

    @property
    def num_bytes(self) -> int:
        """Size of its elements."""
        return self.shape.numel() * self.dtype.itemsize

    def of(self, parameter: Tensor) -> Tensor:
        """Return the block's part of a tensor of the parameter's shape, as a view."""
        return parameter[self.start : self.stop] if self.stop else parameter


def partition_parameters(
    parameters: Mapping[str, Tensor], num_servers: int, *, may_cut: bool
) -> list[list[ParameterBlock]]:
    """Return each server's blocks, balanced by bytes.

    Parameters stay whole, except those that are larger than a server's even part: they are split between rows.

    Args:
        parameters: Parameters by name.
        num_servers: Number of servers.
        may_cut: Whether a parameter's rows may be split; not if an update needs the whole tensor.
    """
    even = -(-sum(parameter.nbytes for parameter in parameters.values()) // num_servers)
    blocks: list[ParameterBlock] = []
    for name, parameter in parameters.items():
        num_parts = -(-parameter.nbytes // even) if even and may_cut and parameter.dim() else 1
        blocks += _cut(name, parameter, min(num_parts, len(parameter) if parameter.dim() else 1))
    shared: list[list[ParameterBlock]] = [[] for _ in range(num_servers)]
    loads = [0] * num_servers
    for block in sorted(blocks, key=lambda block: -block.num_bytes):
        server = loads.index(min(loads))
        shared[server].append(block)
        loads[server] += block.num_bytes
    order = {block: number for number, block in enumerate(blocks)}
    return [sorted(mine, key=order.__getitem__) for mine in shared]


class PackedTensors:
    """A byte buffer, and the tensors in it: one for each block, and additional numbers.

    Args:
        blocks: Blocks of the tensors.
        num_numbers: Number of float64 numbers at its end.
        body: The buffer; by default a new one.
    """

    def __init__(self, blocks: Sequence[ParameterBlock], num_numbers: int = 0, body: Tensor | None = None) -> None:
        offsets = _offsets(blocks)
        self.bytes = torch.zeros(offsets[-1] + 8 * num_numbers, dtype=torch.uint8) if body is None else body
        self.tensors = [
            self.bytes[offset : offset + block.num_bytes].view(block.dtype).view(block.shape)
            for offset, block in zip(offsets, blocks, strict=False)
        ]
        self.numbers = self.bytes[offsets[-1] :].view(torch.float64)

    @staticmethod
    def size_of(blocks: Sequence[ParameterBlock], num_numbers: int = 0) -> int:
        """Return the size of such a buffer in bytes."""
        return _offsets(blocks)[-1] + 8 * num_numbers


def _offsets(blocks: Sequence[ParameterBlock]) -> list[int]:
    """Return the offset of each block, and the end of the last."""
    offsets = [0]
    for block in blocks:
        offsets.append(-(-(offsets[-1] + block.num_bytes) // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _cut(name: str, parameter: Tensor, num_parts: int) -> list[ParameterBlock]:
    if num_parts <= 1:
        return [ParameterBlock(name, 0, 0, parameter.shape, parameter.dtype)]
    bounds = [len(parameter) * part // num_parts for part in range(num_parts + 1)]
    return [
        ParameterBlock(name, start, stop, parameter[start:stop].shape, parameter.dtype)
        for start, stop in pairwise(bounds)
    ]
