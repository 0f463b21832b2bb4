"""When each block is used next, from an order that is known in advance."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paceline.data.storage.base import Upcoming

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]

NEVER = 2**60
"""Position of a next use that is not known, or that does not come."""
HORIZON = 2**20
"""Largest number of positions ahead that are looked at; blocks used only after them count as never used."""
_NUM_EPOCHS = 3
"""Number of epochs ahead that are looked at: the next use of a sample comes in less than two, from any position."""
_CHUNK = 2**13
_SPAN = 2**40


class _Chunk(NamedTuple):
    """Uses of blocks at the positions from `start` to `stop`."""

    start: int
    stop: int
    positions: Numbers
    """Position of each use, ascending."""
    blocks: Numbers
    """Block of each use."""
    keys: Numbers
    """Block and position of each use as one number, sorted."""

    def find(self, blocks: Numbers, position: int) -> Numbers:
        """Return the first use of each block from `position` on, or `NEVER`."""
        wanted = blocks * _SPAN + max(0, position - self.start)
        places = np.searchsorted(self.keys, wanted)
        found = self.keys[np.minimum(places, len(self.keys) - 1)] if len(self.keys) else np.full(len(blocks), -1)
        is_found = (places < len(self.keys)) & (found // _SPAN == blocks)
        return np.where(is_found, found % _SPAN + self.start, NEVER)


class NextUse:
    """Next use of every block (Belady 1966: what is used farthest in the future is kept least).

    Memory: 24 bytes for each use within three epochs or `HORIZON` positions, and 8 for each block. One thread at a time
    uses it.
    """

    def __init__(self) -> None:
        self.table: Numbers = np.zeros(0, dtype=np.int64)
        """Position of each block's next use, by its number."""
        self.position = 0
        self._upcoming: Upcoming | None = None
        self._chunks: deque[_Chunk] = deque()

    def grow(self, num_blocks: int) -> None:
        """Make room for more blocks, of which no use is known yet."""
        if num_blocks > len(self.table):
            more = np.full(max(num_blocks, 2 * len(self.table)) - len(self.table), NEVER, dtype=np.int64)
            self.table = np.concatenate([self.table, more])

    def follow(self, upcoming: Upcoming) -> None:
        """Begin anew with other samples, of whose blocks `add` tells."""
        self._upcoming, self.position = upcoming, upcoming.position
        self._chunks.clear()
        self.table[:] = NEVER

    @property
    def end(self) -> int:
        """Position up to which uses are known."""
        return self._chunks[-1].stop if self._chunks else self.position

    def next_chunk(self) -> tuple[int, int] | None:
        """Return the positions that `add` would take next; None if enough is known."""
        if self._upcoming is None:
            return None
        start = self.end
        horizon = self.position + min(HORIZON, max(2 * _CHUNK, _NUM_EPOCHS * self._upcoming.epoch_samples))
        stop = min(start + _CHUNK, horizon, NEVER if self._upcoming.stop is None else self._upcoming.stop)
        is_enough = stop <= start or (stop - start < _CHUNK and stop == horizon)
        return None if is_enough else (start, stop)

    def add(self, start: int, stop: int, positions: Numbers, blocks: Numbers) -> None:
        """Take note of the uses at the next positions."""
        keys = np.sort(blocks * _SPAN + (positions - start))
        chunk = _Chunk(start, stop, positions, blocks, keys)
        self._chunks.append(chunk)
        used = np.unique(blocks)
        fresh = used[self.table[used] == NEVER] if len(used) else used
        self.table[fresh] = chunk.find(fresh, max(start, self.position))

    def move_to(self, position: int) -> None:
        """Forget the uses before `position`."""
        if position <= self.position:
            return
        passed = [blocks for _, blocks in self._between(self.position, position)]
        self.position = position
        while self._chunks and self._chunks[0].stop <= position:
            self._chunks.popleft()
        if not passed:
            return
        blocks = np.unique(np.concatenate(passed))
        self.table[blocks] = NEVER
        for chunk in self._chunks:
            left = blocks[self.table[blocks] == NEVER]
            if not len(left):
                break
            self.table[left] = chunk.find(left, position)

    def after(self, block: int, position: int) -> int:
        """Return the first known use of a block from `position` on, or `NEVER`."""
        wanted = np.array([block])
        for chunk in self._chunks:
            if chunk.stop > position and (found := int(chunk.find(wanted, position)[0])) != NEVER:
                return found
        return NEVER

    def uses_from(self, position: int) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield positions and blocks of the known uses from `position` on, in order, chunk by chunk."""
        return self._between(position, NEVER)

    def _between(self, start: int, stop: int) -> Iterator[tuple[Numbers, Numbers]]:
        for chunk in list(self._chunks):
            if chunk.stop > start and chunk.start < stop:
                first, last = np.searchsorted(chunk.positions, [start, stop])
                yield chunk.positions[first:last], chunk.blocks[first:last]
