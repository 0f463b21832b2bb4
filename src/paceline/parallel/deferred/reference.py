"""Views of storages that have no memory, and the bytes that they concern."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """A view of a recorded storage."""

    storage: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the view of a storage that has values."""
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        return view.set_(storage, self.offset, self.shape, self.stride)

    def without_memory(self) -> Tensor:
        """Return a tensor like the view, on the meta device."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    @property
    def geometry(self) -> tuple[torch.Size, tuple[int, ...], int]:
        """Shape, strides and offset of the view."""
        return self.shape, self.stride, self.offset

    @property
    def num_elements(self) -> int:
        """Number of the view's elements."""
        return self.shape.numel()

    @property
    def span(self) -> tuple[int, int]:
        """First byte of the storage that the view may concern, and the end."""
        length = 1 + sum((length - 1) * stride for length, stride in zip(self.shape, self.stride, strict=True))
        end = self.offset + (length if self.num_elements else 0)
        return self.offset * self.dtype.itemsize, end * self.dtype.itemsize


def join_spans(references: Iterable[Reference]) -> dict[int, tuple[int, int]]:
    """Return the bytes of each storage that views of it concern."""
    spans: dict[int, tuple[int, int]] = {}
    for reference in references:
        begin, end = reference.span
        first, last = spans.get(reference.storage, (begin, end))
        spans[reference.storage] = min(first, begin), max(last, end)
    return spans


def is_contiguous(reference: Reference) -> bool:
    """Whether the elements of a view lie in their order, without gaps."""
    expected = 1
    for length, stride in zip(reversed(reference.shape), reversed(reference.stride), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
