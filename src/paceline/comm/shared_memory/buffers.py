"""Buffers in shared memory: what was handed out, and where everybody's part of it is."""

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
    """Of the segment. Only tensors keep it: when this rank's own has died, the mapping goes."""
    part_bytes: int


class Buffers:
    """The segments of which this rank holds a tensor."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._num_made = 0
        self._shared: dict[int, _Shared] = {}

    def num_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        """Return the size of a segment with a buffer for each rank; each has pages of its own."""
        return self._size * round_to_pages(num_elements * dtype.itemsize)

    def map(self, descriptor: int, num_bytes: int) -> Segment:
        """Reserve this rank's part of a segment and map all parts; see there for errors."""
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
        """Return where a tensor is, as other ranks can read it."""
        start = flat.untyped_storage().data_ptr()
        entry = self._shared.get(start)
        return PLACE.pack(entry.number, flat.data_ptr() - start) if entry is not None else NOWHERE

    def find_parts(self, flat: Tensor, places: list[bytes]) -> list[Tensor] | None:
        """Return all ranks' tensors like `flat`, given their places; None if they are not all in one segment.

        It is the same on every rank: where all name one segment, each has it, as its own tensor keeps it.
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
    if shared.get(start) is entry:  # the address may belong to a newer one by now
        del shared[start]
