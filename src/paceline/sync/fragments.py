"""A model's parameters in fragments of about the same size, which are exchanged in turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.errors import SettingsError

_TOLERANCE = 1.1
"""The largest fragment's bytes over those of the mean one."""


@dataclass(frozen=True)
class _Piece:
    name: str
    begin: int
    end: int
    row_bytes: float

    @property
    def num_bytes(self) -> float:
        return (self.end - self.begin) * self.row_bytes

    def halves(self) -> "tuple[_Piece, _Piece]":
        middle = (self.begin + self.end) // 2
        return (
            _Piece(self.name, self.begin, middle, self.row_bytes),
            _Piece(self.name, middle, self.end, self.row_bytes),
        )


def cut_into_fragments(tensors: Mapping[str, Tensor], num_fragments: int) -> list[dict[str, Tensor]]:
    """Return views of `tensors`, each element in exactly one fragment, none of over 1.1 times the mean size.

    The largest go first, each into the smallest fragment so far, so that fragments have layers of all depths (the
    strided pattern of Streaming DiLoCo). Tensors are cut, by rows and as ``name[begin:end]``, only where the bound is
    not kept otherwise; it is broken only by single rows that are too large.

    Args:
        tensors: By name; the same names and shapes lead to the same fragments.
        num_fragments: At least 1.

    Raises:
        SettingsError: Some fragment would be empty.
    """
    pieces = []
    for name, tensor in tensors.items():
        num_rows = len(tensor) if tensor.dim() else 1
        pieces.append(_Piece(name, 0, num_rows, tensor.nbytes / max(num_rows, 1)))
    mean = sum(piece.num_bytes for piece in pieces) / num_fragments
    bound = max(_TOLERANCE * mean, max((piece.row_bytes for piece in pieces), default=0.0))
    fragments = _deal(pieces, num_fragments)
    while not all(fragments) or _num_bytes(max(fragments, key=_num_bytes)) > bound:
        crowd = max(fragments, key=_num_bytes) if all(fragments) else pieces
        divisible = [piece for piece in crowd if piece.end - piece.begin > 1]
        if not divisible:
            break
        place = pieces.index(max(divisible, key=lambda piece: piece.num_bytes))
        pieces[place : place + 1] = pieces[place].halves()
        fragments = _deal(pieces, num_fragments)
    if not all(fragments):
        num_rows = sum(piece.end - piece.begin for piece in pieces)
        raise SettingsError(
            f"num_fragments must be at most {num_rows}, the rows of all parameters, but got {num_fragments}"
        )
    return [dict(_view(piece, tensors[piece.name]) for piece in fragment) for fragment in fragments]


def _deal(pieces: Sequence[_Piece], num_fragments: int) -> list[list[_Piece]]:
    fragments: list[list[_Piece]] = [[] for _ in range(num_fragments)]
    sizes = [0.0] * num_fragments
    for piece in sorted(pieces, key=lambda piece: -piece.num_bytes):  # stable: equal ones stay in the model's order
        smallest = sizes.index(min(sizes))
        fragments[smallest].append(piece)
        sizes[smallest] += piece.num_bytes
    return fragments


def _num_bytes(fragment: Sequence[_Piece]) -> float:
    return sum(piece.num_bytes for piece in fragment)


def _view(piece: _Piece, tensor: Tensor) -> tuple[str, Tensor]:
    if not tensor.dim() or (piece.begin, piece.end) == (0, len(tensor)):
        return piece.name, tensor
    return f"{piece.name}[{piece.begin}:{piece.end}]", tensor[piece.begin : piece.end]
