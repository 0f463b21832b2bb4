"""A model's parameters in fragments of about the same size, which are exchanged in turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.errors import SettingsError

_TOLERANCE = 1.1
"""Ratio of the largest fragment's bytes to the mean."""


@dataclass(frozen=True)
class _Block:
    name: str
    begin: int
    end: int
    row_bytes: float

    @property
    def num_bytes(self) -> float:
        return (self.end - self.begin) * self.row_bytes

    def halves(self) -> "tuple[_Block, _Block]":
        middle = (self.begin + self.end) // 2
        return (
            _Block(self.name, self.begin, middle, self.row_bytes),
            _Block(self.name, middle, self.end, self.row_bytes),
        )


def cut_into_fragments(tensors: Mapping[str, Tensor], num_fragments: int) -> list[dict[str, Tensor]]:
    """Return views of `tensors`, each element in exactly one fragment, none of over 1.1 times the mean size.

    The largest go first, each into the smallest fragment so far, so that fragments have layers of all depths (the
    strided pattern of Streaming DiLoCo). Tensors are split, by rows and as ``name[begin:end]``, only if the bound
    requires it; only single rows that are too large exceed it.

    Args:
        tensors: Tensors by name; the same names and shapes lead to the same fragments.
        num_fragments: Number of fragments, at least 1.

    Raises:
        SettingsError: Some fragment would be empty.
    """
    blocks = []
    for name, tensor in tensors.items():
        num_rows = len(tensor) if tensor.dim() else 1
        blocks.append(_Block(name, 0, num_rows, tensor.nbytes / max(num_rows, 1)))
    mean = sum(block.num_bytes for block in blocks) / num_fragments
    bound = max(_TOLERANCE * mean, max((block.row_bytes for block in blocks), default=0.0))
    fragments = _deal(blocks, num_fragments)
    while not all(fragments) or _num_bytes(max(fragments, key=_num_bytes)) > bound:
        crowd = max(fragments, key=_num_bytes) if all(fragments) else blocks
        divisible = [block for block in crowd if block.end - block.begin > 1]
        if not divisible:
            break
        place = blocks.index(max(divisible, key=lambda block: block.num_bytes))
        blocks[place : place + 1] = blocks[place].halves()
        fragments = _deal(blocks, num_fragments)
    if not all(fragments):
        num_rows = sum(block.end - block.begin for block in blocks)
        raise SettingsError(
            f"num_fragments must be at most {num_rows}, the rows of all parameters, but got {num_fragments}"
        )
    return [dict(_view(block, tensors[block.name]) for block in fragment) for fragment in fragments]


def _deal(blocks: Sequence[_Block], num_fragments: int) -> list[list[_Block]]:
    fragments: list[list[_Block]] = [[] for _ in range(num_fragments)]
    sizes = [0.0] * num_fragments
    for block in sorted(blocks, key=lambda block: -block.num_bytes):  # stable: equal ones stay in the model's order
        smallest = sizes.index(min(sizes))
        fragments[smallest].append(block)
        sizes[smallest] += block.num_bytes
    return fragments


def _num_bytes(fragment: Sequence[_Block]) -> float:
    return sum(block.num_bytes for block in fragment)


def _view(block: _Block, tensor: Tensor) -> tuple[str, Tensor]:
    if not tensor.dim() or (block.begin, block.end) == (0, len(tensor)):
        return block.name, tensor
    return f"{block.name}[{block.begin}:{block.end}]", tensor[block.begin : block.end]
