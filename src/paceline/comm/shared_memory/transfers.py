"""The collective operations as the data that each rank writes into its slot and reads from all slots."""

import ctypes
import functools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.comm.shared_memory.flight_recorder import Operation
from paceline.comm.shared_memory.ring import RingStep, SharedRing
from paceline.errors import SettingsError

# Tiles of all ranks fit the cache together, and a tile is below 32,768 elements, where torch begins to use threads.
TILE = 31 * 1024
_LINE_BYTES = 64


class Transfer(ABC):
    """One operation on this rank's tensors, which can be split into chunks.

    Attributes:
        num_bytes: Size of the data to split.
        copies: Bytes of a slot for each of them.
    """

    num_bytes: int
    copies: int = 1

    @abstractmethod
    def fill(self, ring: SharedRing, begin: int, end: int, slot: int) -> None:
        """Write this rank's chunk to its slot."""

    @abstractmethod
    def read(self, ring: SharedRing, begin: int, end: int, slot: int) -> None:
        """Read all ranks' chunks from their slots."""

    def post(self, ring: SharedRing, operation: Operation) -> RingStep:
        """Post the whole operation as one step."""
        return ring.post(
            operation, partial(self.fill, ring, 0, self.num_bytes), partial(self.read, ring, 0, self.num_bytes)
        )

    def run(self, ring: SharedRing, operation: Operation) -> None:
        """Run the whole operation in as many steps as needed; a chunk is written while others read the one before."""
        for begin, end in self.chunks(ring):
            step = ring.post(operation, partial(self.fill, ring, begin, end), partial(self.read, ring, begin, end))
        step.wait()

    def chunks(self, ring: SharedRing) -> list[tuple[int, int]]:
        """Return begin and end of chunks that fit a slot; at least one."""
        width = ring.slot_bytes // self.copies // _LINE_BYTES * _LINE_BYTES
        return [(begin, min(begin + width, self.num_bytes)) for begin in range(0, max(1, self.num_bytes), width)]


class SumTransfer(Transfer):
    """All-reduce: each rank sums all slots, in the order of ranks."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._pointer = flat.data_ptr()
        self.num_bytes = flat.nbytes

    def fill(self, ring: SharedRing, begin: int, end: int, slot: int) -> None:
        """Copy the chunk."""
        ctypes.memmove(ring.address(slot), self._pointer + begin, end - begin)

    def read(self, ring: SharedRing, begin: int, end: int, slot: int) -> None:
        """Sum the chunks."""
        width = self._flat.element_size()
        output = self._flat[begin // width : end // width]
        add_up([row[: len(output)] for row in ring.rows(slot, self._flat.dtype)], output)


class SlicedSumTransfer(SumTransfer):
    """All-reduce of large tensors: each rank sums one slice of a chunk, and all copy all slices."""

    def __init__(self, flat: Tensor, rank: int, size: int) -> None:
        super().__init__(flat)
        self._rank = rank
        self._size = size

    def run(self, ring: SharedRing, operation: Operation) -> None:
        """Take two steps per chunk; the next chunk is posted before this one is summed."""
        chunks = self.chunks(ring)
        steps = deque([self._show(ring, operation, chunks[0])])
        for number, (begin, end) in enumerate(chunks):
            if number + 1 < len(chunks):
                steps.append(self._show(ring, operation, chunks[number + 1]))
            shown = steps.popleft()
            shown.wait()
            fill = partial(self._sum_slice, ring, shown.slot, end - begin)
            summed = ring.post(operation, fill, partial(self.read, ring, begin, end))
        summed.wait()

    def read(self, ring: SharedRing, begin: int, end: int, slot: int) -> None:
        """Copy the slices of the sum from all ranks."""
        for rank in range(self._size):
            first, last = self._slice(end - begin, rank)
            ctypes.memmove(self._pointer + begin + first, ring.address(slot, rank) + first, last - first)

    def _show(self, ring: SharedRing, operation: Operation, chunk: tuple[int, int]) -> RingStep:
        return ring.post(operation, partial(self.fill, ring, *chunk), None)

    def _sum_slice(self, ring: SharedRing, shown: int, num_bytes: int, slot: int) -> None:
        """Sum this rank's slice of the slots `shown`, at most three steps ago, into its own `slot`."""
        dtype, width = self._flat.dtype, self._flat.element_size()
        first, last = (place // width for place in self._slice(num_bytes, self._rank))
        output = ring.rows(slot, dtype)[self._rank][first:last]
        parts = [row[first:last] for row in ring.rows(shown, dtype)]
        for tiles in zip(output.split(TILE), *(part.split(TILE) for part in parts), strict=True):
            add_up(tiles[1:], tiles[0])

    def _slice(self, num_bytes: int, rank: int) -> tuple[int, int]:
        return _slice_bounds(num_bytes, self._size, rank)


class BroadcastTransfer(Transfer):
    """Broadcast: all ranks read the source's slot."""

    def __init__(self, flat: Tensor, source: int, rank: int) -> None:
        self.flat = flat
        self.source = source
        self._is_source = rank == source
        self._pointer = flat.data_ptr()
        self.num_bytes = flat.nbytes

    def fill(self, ring: SharedRing, begin: int, end: int, slot: int) -> None:
        """Copy the chunk, at the source."""
        if self._is_source:
            ctypes.memmove(ring.address(slot), self._pointer + begin, end - begin)

    def read(self, ring: SharedRing, begin: int, end: int, slot: int) -> None:
        """Copy the chunk, everywhere else."""
        if not self._is_source:
            ctypes.memmove(self._pointer + begin, ring.address(slot, self.source), end - begin)


class AllGatherTransfer(Transfer):
    """All-gather: all ranks read all slots."""

    def __init__(self, output: Tensor, tensor: Tensor) -> None:
        self._tensors = output, tensor
        self._from, self._to = tensor.data_ptr(), output.data_ptr()
        self.num_bytes = tensor.nbytes
        self._size = len(output)

    def fill(self, ring: SharedRing, begin: int, end: int, slot: int) -> None:
        """Copy the chunk."""
        ctypes.memmove(ring.address(slot), self._from + begin, end - begin)

    def read(self, ring: SharedRing, begin: int, end: int, slot: int) -> None:
        """Copy all ranks' chunks to their rows."""
        for rank in range(self._size):
            ctypes.memmove(self._to + rank * self.num_bytes + begin, ring.address(slot, rank), end - begin)


class AllToAllTransfer(Transfer):
    """All-to-all: a slot holds the same columns of all rows, and each rank reads its row from all slots."""

    def __init__(self, output: Tensor, tensor: Tensor, rank: int) -> None:
        self._tensors = output, tensor
        self._from, self._to = tensor.data_ptr(), output.data_ptr()
        self._rank = rank
        self.copies = len(tensor)
        self.num_bytes = tensor.nbytes // self.copies

    def fill(self, ring: SharedRing, begin: int, end: int, slot: int) -> None:
        """Copy the columns of all rows, one row after another."""
        for row in range(self.copies):
            source = self._from + row * self.num_bytes + begin
            ctypes.memmove(ring.address(slot) + row * (end - begin), source, end - begin)

    def read(self, ring: SharedRing, begin: int, end: int, slot: int) -> None:
        """Copy this rank's row from all slots."""
        for rank in range(self.copies):
            source = ring.address(slot, rank) + self._rank * (end - begin)
            ctypes.memmove(self._to + rank * self.num_bytes + begin, source, end - begin)


def add_up(parts: Sequence[Tensor], output: Tensor) -> None:
    """Write the sum of `parts`, in their order, to `output`, which may be the first of them."""
    if len(parts) == 1:
        output.copy_(parts[0])
        return
    torch.add(parts[0], parts[1], out=output)
    for part in parts[2:]:
        output.add_(part)


def sum_in_place(parts: Sequence[Tensor], rank: int) -> None:
    """Sum this rank's slice of all flat buffers, and write the sum into all of them.

    This takes one pass: a tile is still in the cache when it is written. Each rank reads S and writes S bytes, where
    S is the size of a buffer.
    """
    width = parts[0].element_size()
    first, last = (place // width for place in _slice_bounds(parts[0].nbytes, len(parts), rank))
    for tiles in zip(*(part[first:last].split(TILE) for part in parts), strict=True):
        add_up(tiles, tiles[0])
        for tile in tiles[1:]:
            tile.copy_(tiles[0])


def copy_in_tiles(source: Tensor, output: Tensor) -> None:
    """Copy a flat tensor in this thread alone."""
    for part, tile in zip(source.split(TILE), output.split(TILE), strict=True):
        tile.copy_(part)


def flatten(tensor: Tensor, name: str) -> Tensor:
    """Return all elements of a dense tensor in memory order, as a view.

    Raises:
        SettingsError: The tensor is on another device, or has gaps.
    """
    check_tensor(tensor, name)
    detached = tensor.detach()
    if detached.is_contiguous():
        return detached.view(-1)
    if torch.empty_like(detached, device="meta").stride() != detached.stride():  # keeps strides of dense tensors only
        raise SettingsError(
            f"the tensor of {name!r} must be dense, but got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}; call contiguous() first"
        )
    return detached.as_strided((detached.numel(),), (1,))


@functools.cache
def check_sum(dtype: torch.dtype) -> None:
    """Raise `SettingsError` for a dtype that cannot be added."""
    try:
        torch.zeros(1, dtype=dtype) + torch.zeros(1, dtype=dtype)
    except RuntimeError as error:
        raise SettingsError(
            f"the dtype of a sum must be one that can be added, but got {dtype} ({error}); send another"
        ) from error


def check_tensor(tensor: Tensor, name: str) -> None:
    """Raise `SettingsError` for a tensor that shared memory cannot hold."""
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise SettingsError(
            f"the tensor of {name!r} must be a strided tensor on a CPU, but got {tensor.layout} on {tensor.device}; "
            "use join(transport='network')"
        )


def check_source(source: int, size: int) -> None:
    """Raise `SettingsError` if the source of a broadcast is not a rank."""
    if not 0 <= source < size:
        raise SettingsError(f"the source of a broadcast must be a rank of 0..{size - 1}, but got {source}")


def check_rows(tensor: Tensor, num_rows: int, row_bytes: int, name: str) -> None:
    """Raise `SettingsError` unless a tensor has one contiguous row per rank."""
    check_tensor(tensor, name)
    if len(tensor) != num_rows or tensor.nbytes != num_rows * row_bytes or not tensor.is_contiguous():
        raise SettingsError(
            f"the rows of {name!r} must be {num_rows} of {row_bytes} bytes, contiguous, but got shape "
            f"{tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()}"
        )


def _slice_bounds(num_bytes: int, num_slices: int, index: int) -> tuple[int, int]:
    """Return begin and end of a slice in bytes; no two slices share a cache line."""
    length = math.ceil(num_bytes / num_slices / _LINE_BYTES) * _LINE_BYTES
    return min(index * length, num_bytes), min((index + 1) * length, num_bytes)
