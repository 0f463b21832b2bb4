"""A part of a source of files: held-out samples at equal distances, or all others."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.data.base import Source
from paceline.data.formats.source import FileSource
from paceline.data.map_source import CollateFn
from paceline.data.orders import Indices
from paceline.data.storage import Extent
from paceline.data.storage.base import Upcoming


class PartOfSource(Source):
    """Every n-th sample of a source, or all but these; a rule and no list, whatever the number of samples.

    Args:
        source: Source of files.
        distance: Distance of held-out samples; the first sample is one.
        held_out: Whether the part has these, or all others.
    """

    decodes_samples = True

    def __init__(self, source: FileSource, distance: int, *, held_out: bool) -> None:
        self.source, self.spec = source, source.spec
        self.is_thread_safe, self.stacks = source.is_thread_safe, source.stacks
        self.collate_fn = source.collate_fn
        self._distance, self._held_out, self.grows = distance, held_out, source.grows
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
            before = -(-ends // self._distance)
            sizes = np.diff(before if self._held_out else ends - before).tolist()
            self._counted = whole, sizes
        return sizes

    @property
    def fingerprint(self) -> str:
        """Identifier of the content of all the data."""
        return self.source.fingerprint

    def with_collate(self, collate_fn: CollateFn) -> "PartOfSource":
        """Return the part with another function that makes a batch from a list of samples."""
        return PartOfSource(self.source.with_collate(collate_fn), self._distance, held_out=self._held_out)

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
        if self._held_out:
            return indices * self._distance
        return indices + indices // (self._distance - 1) + 1
