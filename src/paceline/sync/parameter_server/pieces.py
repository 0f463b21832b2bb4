"""How parameters are cut and shared out among servers, and how they lie in the bytes of a message."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Size, Tensor

_ALIGNMENT = 64
"""Of tensors in a buffer, in bytes: a cache line, and more than any dtype needs."""


@dataclass(frozen=True)
class Piece:
    """A parameter, or some of its rows.

    Args:
        parameter: Its name.
        start: First row.
        stop: End of the rows; 0 for a whole parameter, which may have no rows at all.
        shape: Of the piece.
        dtype: Of the parameter.
    """

    parameter: str
    start: int
    stop: int
    shape: Size
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The parameter's name, with the rows if they are not all."""
        return f"{self.parameter}[{self.start}:{self.stop}]" if self.stop else self.parameter

    @property
    def num_bytes(self) -> int:
        """Size of its elements."""
        return self.shape.numel() * self.dtype.itemsize

    def of(self, parameter: Tensor) -> Tensor:
        """Return its part of a tensor of the parameter's shape: a view."""
        return parameter[self.start : self.stop] if self.stop else parameter


def share_out(parameters: Mapping[str, Tensor], num_servers: int, *, may_cut: bool) -> list[list[Piece]]:
    """Return each server's pieces, balanced by bytes.

    Parameters stay whole, but for those that are larger than a server's even part: they are cut between rows.

    Args:
        parameters: By name.
        num_servers: Over how many.
        may_cut: Whether rows of one parameter may be apart: not where an update needs the whole tensor.
    """
    even = -(-sum(parameter.nbytes for parameter in parameters.values()) // num_servers)
    pieces: list[Piece] = []
    for name, parameter in parameters.items():
        num_parts = -(-parameter.nbytes // even) if even and may_cut and parameter.dim() else 1
        pieces += _cut(name, parameter, min(num_parts, len(parameter) if parameter.dim() else 1))
    shared: list[list[Piece]] = [[] for _ in range(num_servers)]
    loads = [0] * num_servers
    for piece in sorted(pieces, key=lambda piece: -piece.num_bytes):
        server = loads.index(min(loads))
        shared[server].append(piece)
        loads[server] += piece.num_bytes
    order = {piece: number for number, piece in enumerate(pieces)}
    return [sorted(mine, key=order.__getitem__) for mine in shared]


class Pack:
    """A byte buffer, and the tensors in it: one for each piece, and numbers that go with them.

    Args:
        pieces: What it holds.
        num_numbers: float64 numbers at its end.
        body: The buffer; a new one without it.
    """

    def __init__(self, pieces: Sequence[Piece], num_numbers: int = 0, body: Tensor | None = None) -> None:
        offsets = _offsets(pieces)
        self.bytes = torch.zeros(offsets[-1] + 8 * num_numbers, dtype=torch.uint8) if body is None else body
        self.tensors = [
            self.bytes[offset : offset + piece.num_bytes].view(piece.dtype).view(piece.shape)
            for offset, piece in zip(offsets, pieces, strict=False)
        ]
        self.numbers = self.bytes[offsets[-1] :].view(torch.float64)

    @staticmethod
    def size_of(pieces: Sequence[Piece], num_numbers: int = 0) -> int:
        """Return the size of such a buffer in bytes."""
        return _offsets(pieces)[-1] + 8 * num_numbers


def _offsets(pieces: Sequence[Piece]) -> list[int]:
    """Return where each piece begins, and where the last ends."""
    offsets = [0]
    for piece in pieces:
        offsets.append(-(-(offsets[-1] + piece.num_bytes) // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _cut(name: str, parameter: Tensor, num_parts: int) -> list[Piece]:
    if num_parts <= 1:
        return [Piece(name, 0, 0, parameter.shape, parameter.dtype)]
    bounds = [len(parameter) * part // num_parts for part in range(num_parts + 1)]
    return [Piece(name, start, stop, parameter[start:stop].shape, parameter.dtype) for start, stop in pairwise(bounds)]
