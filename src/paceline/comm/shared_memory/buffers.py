"""Buffers in shared memory: the segments that exist, and where each rank's part of them is."""

import struct
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.shared_memory.segment import Segment, reserve, round_to_pages

PLACE = struct.Struct("<qq")
NOWHERE = PLACE.pack(-1, 0)


@dataclass(frozen=True)
class _Shared:
    number: int
    buffer: "weakref.ref[object]"
    """Buffer of the segment. Only tensors keep it alive: when this rank's last one is freed, so is the mapping."""
    part_bytes: int


class Buffers:
    """Segments of which this rank holds a tensor."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._num_made = 0
        self._shared: dict[int, _Shared] = {}

    def num_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        """Return the size of a segment with one buffer per rank; each buffer has its own pages."""
        return self._size * round_to_pages(num_elements * dtype.itemsize)

    def map(self, descriptor: int, num_bytes: int) -> Segment:
        """Reserve this rank's part of a segment and map all parts; raises the errors of `Segment`."""
        length = num_bytes // self._size
        own = self._rank * length, length
        reserve(descriptor, *own)
        return Segment(descriptor, num_bytes, own)

    def add(self, segment: Segment, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return this rank's part as a tensor; each rank adds the same segments in the same order."""
        self._num_made += 1
        part = len(segment.buffer) // self._size
        tensor = torch.frombuffer(segment.buffer, dtype=dtype, count=num_elements, offset=part * self._rank)
        entry = _Shared(self._num_made, weakref.ref(segment.buffer), part)
        self._shared[tensor.data_ptr()] = entry
        finalizer = weakref.finalize(segment.buffer, _forget, self._shared, tensor.data_ptr(), entry)
        finalizer.atexit = False
        return tensor

    def locate(self, flat: Tensor) -> bytes:
        """Return the position of a tensor in a form that other ranks can read."""
        start = flat.untyped_storage().data_ptr()
        entry = self._shared.get(start)
        return PLACE.pack(entry.number, flat.data_ptr() - start) if entry is not None else NOWHERE

    def find_parts(self, flat: Tensor, places: list[bytes]) -> list[Tensor] | None:
        """Return all ranks' tensors like `flat`, given their positions; None if they are not all in one segment.

        The result is the same on every rank: if all name one segment, each has it mapped, since its own tensor keeps
        it.
        """
        numbers = {PLACE.unpack(place)[0] for place in places}
        entry = self._shared.get(flat.untyped_storage().data_ptr())
        if len(numbers) > 1 or numbers == {-1} or entry is None:
            return None
        buffer = entry.buffer()
        assert buffer is not None
        starts = [rank * entry.part_bytes + PLACE.unpack(place)[1] for rank, place in enumerate(places)]
        return [torch.frombuffer(buffer, dtype=flat.dtype, count=len(flat), offset=start) for start in starts]


def _forget(shared: dict[int, _Shared], start: int, entry: _Shared) -> None:
    if shared.get(start) is entry:  # a newer segment may have the address by now
        del shared[start]
