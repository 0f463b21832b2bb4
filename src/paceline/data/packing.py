"""Packing of documents of unequal length into rows of equal length.

Lengths count pairs of a token and the next one: a document of n tokens has n - 1.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from paceline.data.orders import Indices

PackingMethod = Literal["concatenate", "best_fit"]


class Packing(NamedTuple):
    """Pieces of documents, row by row."""

    documents: Indices
    """Document of each piece."""
    starts: Indices
    """First pair of each piece in its document."""
    lengths: Indices
    """Number of pairs of each piece."""
    row_starts: Indices
    """First piece of each row; after the last row the number of pieces."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.row_starts) - 1

    def list_pieces(self, row: int) -> Iterator[tuple[int, int, int]]:
        """Yield document, first pair and number of pairs of each piece of a row."""
        for piece in range(self.row_starts[row], self.row_starts[row + 1]):
            yield int(self.documents[piece]), int(self.starts[piece]), int(self.lengths[piece])


def pack(lengths: Indices, row_length: int, method: PackingMethod) -> Packing:
    """Return documents packed into rows; no pair is lost or taken twice.

    Args:
        lengths: Number of pairs of each document; those without any are left out.
        row_length: Number of pairs of a row; shorter rows are padded.
        method: Way to pack: ``concatenate`` cuts the row of all documents into equal parts, so that only the last is
            padded, and most rows begin and end within a document; ``best_fit`` cuts only documents longer than a row,
            and puts each piece where the least room is left (Ding et al. 2024, best-fit decreasing).
    """
    return _concatenate(lengths, row_length) if method == "concatenate" else _fit_best(lengths, row_length)


def _concatenate(lengths: Indices, row_length: int) -> Packing:
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(np.concatenate([[0], ends]), np.arange(0, total + 1, row_length, dtype=np.int64))
    begins = cuts[:-1]
    documents = np.searchsorted(ends, begins, side="right")
    row_starts = np.searchsorted(begins, np.arange(0, total, row_length, dtype=np.int64))
    return Packing(
        documents,
        begins - (ends - lengths)[documents],
        np.diff(cuts),
        np.append(row_starts, len(begins)).astype(np.int64),
    )


def _fit_best(lengths: Indices, row_length: int) -> Packing:
    num_pieces = -(-lengths // row_length)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int64), num_pieces)
    first_pieces = np.cumsum(num_pieces) - num_pieces
    starts = (np.arange(len(documents), dtype=np.int64) - first_pieces[documents]) * row_length
    sizes = np.minimum(lengths[documents] - starts, row_length)
    order = np.argsort(-sizes, kind="stable")
    rows = np.empty(len(order), dtype=np.int64)
    rows_with_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    """Rows by the room that they have left."""
    rooms = 0
    """Rooms of which there are rows, as bits."""
    num_rows = 0
    for piece in order:
        size = int(sizes[piece])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            rooms &= ~(1 << room) if not rows_with_room[room] else -1
        else:
            room, row, num_rows = row_length, num_rows, num_rows + 1
        rows[piece] = row
        if left := room - size:
            rows_with_room[left].append(row)
            rooms |= 1 << left
    by_row = np.argsort(rows, kind="stable")
    row_starts = np.searchsorted(rows[by_row], np.arange(num_rows + 1))
    return Packing(documents[by_row], starts[by_row], sizes[by_row], row_starts.astype(np.int64))
