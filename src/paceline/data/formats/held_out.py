"""A part of a source of files: held-out samples, drawn at random by their indices alone, or all others.

Shapes: U blocks, M samples that are drawn of a block.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.base import Source
from paceline.data.formats.source import FileSource
from paceline.data.map_source import CollateFn
from paceline.data.orders import Indices
from paceline.data.permutation import mix_words
from paceline.data.storage import Extent
from paceline.data.storage.base import Upcoming
from paceline.errors import DataError

_MOST_SAMPLES = 100
"""Largest block, unless a fraction is smaller than one of it."""
_STEP = np.uint64(0x9E3779B97F4A7C15)


class PartOfSource(Source):
    """Samples of a source that are held out, or all but these; a rule and no list, whatever the number of samples.

    Each block, such as ten samples, has as many held-out ones, drawn at random by their indices alone: whatever repeats
    in the data, such as classes in turn, has no part in it. Samples that are added change nothing before them.

    Args:
        source: Source of files.
        fraction: Fraction of the samples that is held out.
        held_out: Whether the part has these, or all others.

    Raises:
        DataError: One of the two parts would be empty.
    """

    decodes_samples = True

    def __init__(self, source: FileSource, fraction: float, *, held_out: bool) -> None:
        self.source, self.spec = source, source.spec
        self.is_thread_safe, self.stacks = source.is_thread_safe, source.stacks
        self.collate_fn = source.collate_fn
        self._fraction, self._held_out, self.grows = fraction, held_out, source.grows
        drawn = min(fraction, 1 - fraction)
        self._is_drawn = held_out == (fraction == drawn)
        """Whether this part is the smaller one, whose samples are drawn; the other one has the rest."""
        if len(source) * drawn < 0.5:
            raise _too_few(source, fraction)
        ratio = Fraction(drawn).limit_denominator(max(_MOST_SAMPLES, math.ceil(1 / drawn)))
        self._block_samples, self._block_drawn = ratio.denominator, ratio.numerator
        self._num_full, rest = divmod(len(source), ratio.denominator)
        self._last_M = np.full(ratio.numerator, 2 * ratio.denominator, dtype=np.int64)
        """Places of drawn samples in the last block, which is not whole; of data that grows it becomes so."""
        if num_last := math.floor(rest * ratio + Fraction(1, 2)):
            self._last_M[:num_last] = _draw(np.array([self._num_full]), ratio.denominator, rest, num_last)[0]
        if not 0 < self._count_drawn(np.array([len(source)]))[0] < len(source):
            raise _too_few(source, fraction)
        self._counted: tuple[Sequence[int], list[int]] = [], []
        """Sizes of the source's shards, and of this part of them."""

    def __len__(self) -> int:
        """Return the number of samples of the part."""
        return sum(self.shard_sizes)

    def __str__(self) -> str:
        return f"{len(self)} of {self.source}"

    @property
    def shard_sizes(self) -> list[int]:
        """Number of samples of each shard."""
        whole, sizes = self._counted
        if whole is not self.source.shard_sizes:  # also if it has grown, with the other part of it
            whole = self.source.shard_sizes
            ends = np.cumsum([0, *whole])
            before = self._count_drawn(ends)
            sizes = np.diff(before if self._is_drawn else ends - before).tolist()
            self._counted = whole, sizes
        return sizes

    @property
    def fingerprint(self) -> str:
        """Identifier of the content of all the data."""
        return self.source.fingerprint

    def with_collate(self, collate_fn: CollateFn) -> "PartOfSource":
        """Return the part with another function that makes a batch from a list of samples."""
        return PartOfSource(self.source.with_collate(collate_fn), self._fraction, held_out=self._held_out)

    def recognises(self, fingerprint: str) -> bool:
        """Return whether the content of all the data is that of a fingerprint: see `FileSource.recognises`."""
        return self.source.recognises(fingerprint)

    def list_shards(self, *, looks: bool) -> list[Any]:
        """Return what identifies the files: see `FileSource.list_shards`."""
        return self.source.list_shards(looks=looks)

    def take_shards(self, num_shards: int) -> None:
        """Have this part of the first files; so does the other part."""
        self.source.take_shards(num_shards)

    def locate(self, indices: Indices) -> list[Extent]:
        """Return the ranges of bytes that reading samples touches."""
        return self.source.locate(self._map(indices))

    def expect(self, upcoming: Upcoming) -> None:
        """Tell the storage what will be read: see `FileSource.expect`."""
        self.source.storage.expect(upcoming, self.locate)

    def read(self, indices: Indices) -> Any:
        """Return samples, transformed and collated."""
        return self.source.read(self._map(indices))

    def fetch(self, indices: Indices) -> list[Any]:
        """Return samples as `FileSource.fetch` does."""
        return self.source.fetch(self._map(indices))

    def decode(self, fetched: list[Any], seeds: Sequence[int] | None = None) -> list[Any]:
        """Return samples, transformed."""
        return self.source.decode(fetched, seeds)

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch of samples."""
        return self.source.collate(samples)

    def _map(self, indices: Indices) -> Indices:
        """Return the samples' indices in the source."""
        indices = np.asarray(indices, dtype=np.int64)
        size, num_drawn = self._block_samples, self._block_drawn
        blocks, ranks = np.divmod(indices, num_drawn if self._is_drawn else size - num_drawn)
        drawn_UM = self._look_up(blocks)
        if self._is_drawn:
            places: Indices = np.take_along_axis(drawn_UM, ranks[:, None], axis=1)[:, 0]
        else:
            places = ranks + (drawn_UM - np.arange(num_drawn) <= ranks[:, None]).sum(axis=1)
        return blocks * size + places

    def _count_drawn(self, ends: Indices) -> Indices:
        """Return how many of the first samples of the source are drawn, for several numbers of first samples."""
        blocks, rest = np.divmod(ends, self._block_samples)
        counts: Indices = blocks * self._block_drawn + (self._look_up(blocks) < rest[:, None]).sum(axis=1)
        return counts

    def _look_up(self, blocks: Indices) -> NDArray[np.int64]:
        """Return the places of the drawn samples in each block, ascending."""
        drawn_UM = _draw(blocks, self._block_samples, self._block_samples, self._block_drawn)
        if not self.grows:
            drawn_UM[blocks == self._num_full] = self._last_M
        return drawn_UM


def _draw(blocks: Indices, size: int, num_there: int, num_drawn: int) -> NDArray[np.int64]:
    """Return the places of some of the samples that are there in each block, ascending, drawn by their indices."""
    if num_drawn == 1:
        words = mix_words((blocks.astype(np.uint64) + np.uint64(1)) * _STEP)
        return (words % np.uint64(num_there)).astype(np.int64)[:, None]
    samples = blocks[:, None] * size + np.arange(num_there)
    words = mix_words((samples.astype(np.uint64).ravel() + np.uint64(1)) * _STEP)
    drawn: NDArray[np.int64] = np.argpartition(words.reshape(samples.shape), num_drawn - 1, axis=1)[:, :num_drawn]
    drawn.sort(axis=1)
    return drawn


def _too_few(source: FileSource, fraction: float) -> DataError:
    return DataError(
        f"the data must hold at least {1 / min(fraction, 1 - fraction):g} samples for some of them to be held out with "
        f"data.held_out_fraction={fraction:g}, but has {source}; give --data.held_out, or another fraction"
    )
