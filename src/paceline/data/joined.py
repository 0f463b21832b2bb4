"""Several sources read as one."""

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from paceline.data.base import IterableSource, Source, Spec
from paceline.data.batch import describe, list_tensors, map_tensors
from paceline.data.map_source import open_source
from paceline.data.orders import Indices
from paceline.errors import DataError


class FetchedFrom(NamedTuple):
    """Samples of one source, fetched, and their places among those that were asked for."""

    source: Source
    places: Indices
    fetched: Any


class JoinedSource(Source):
    """The samples of several sources, numbered through: those of the first, then those of the second, and so on.

    Args:
        datasets: Sources, or torch data sets with samples under an index, whose samples have the same structure. They
            may be of different formats, and lie in different places.

    Raises:
        DataError: There is none, one is empty or has no samples under an index, or their shapes or classes differ.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        if not datasets or any(isinstance(dataset, IterableSource) for dataset in datasets):
            raise DataError(
                "sources must be one or more, each with samples under an index, but got "
                f"{', '.join(type(dataset).__name__ for dataset in datasets) or 'none'}; leave iterable data sets out"
            )
        self.sources = [open_source(dataset, None) for dataset in datasets]
        if empty := [type(source).__name__ for source in self.sources if not len(source)]:
            raise DataError(f"sources must have samples, but {empty[0]} is empty; leave it out")
        specs = [source.spec for source in self.sources]
        if any(spec.input_shape != specs[0].input_shape for spec in specs):
            raise DataError(
                f"sources must have samples of one shape, but got {[spec.input_shape for spec in specs]}; give them "
                "the same settings"
            )
        named = dict.fromkeys(spec.classes for spec in specs if spec.classes)
        if len(named) > 1:
            union = json.dumps(sorted(set(chain.from_iterable(named))))
            raise DataError(
                f"sources must give classes the same numbers, but got {' and '.join(map(', '.join, named))}; make each "
                f"one data of the kind files with classes: {union}"
            )
        self.spec = Spec(max(spec.num_classes for spec in specs), specs[0].input_shape, *named)
        self._ends = np.cumsum([len(source) for source in self.sources])

    @property
    def fingerprint(self) -> str:
        """Identifier of the content of all sources that have one; empty if none has."""
        known = [source.fingerprint for source in self.sources]
        return blake3("\n".join(known).encode()).hexdigest() if any(known) else ""

    def __len__(self) -> int:
        """Return the number of samples of all sources."""
        return int(self._ends[-1])

    @property
    def shard_sizes(self) -> Sequence[int]:
        """Number of samples of each shard of each source."""
        return list(chain.from_iterable(source.shard_sizes for source in self.sources))

    @property
    def is_thread_safe(self) -> bool:  # type: ignore[override]
        """Whether several threads may read each of the sources at once."""
        return all(source.is_thread_safe for source in self.sources)

    def read(self, indices: Indices) -> Any:
        """Return the samples at `indices`, in that order, from all sources that have some of them.

        Raises:
            DataError: The samples of sources differ in structure.
        """
        return self.decode(self.fetch(indices))

    def fetch(self, indices: Indices) -> list[FetchedFrom]:
        """Return what each source that has some of the samples fetches."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        fetched = []
        for number in np.unique(numbers).tolist():
            places, source = np.flatnonzero(numbers == number), self.sources[number]
            inside = indices[places] - (self._ends[number] - len(source))
            fetched.append(FetchedFrom(source, places, source.fetch(inside)))
        return fetched

    def decode(self, fetched: list[FetchedFrom], seeds: Sequence[int] | None = None) -> Any:
        """Return the samples that were fetched, each with the seed of its random numbers; see `read`."""
        parts = []
        for source, places, inside in fetched:
            own_seeds = None if seeds is None else [seeds[place] for place in places.tolist()]
            decoded = source.decode(inside, own_seeds)
            parts.append(source.collate(decoded) if source.decodes_samples else decoded)
        if len(parts) == 1:
            return parts[0]
        return _merge(parts, torch.from_numpy(np.argsort(np.concatenate([each.places for each in fetched]))))


def _merge(parts: list[Any], order: Tensor) -> Any:
    """Return the samples of all `parts`, put in `order`."""
    columns = [list_tensors(part) for part in parts]
    kinds = [[(tensor.shape[1:], tensor.dtype) for tensor in column] for column in columns]
    if any(kind != kinds[0] for kind in kinds):
        raise DataError(
            "samples of sources must have the same structure to share a batch, but got "
            f"{' and '.join(dict.fromkeys(describe(part) for part in parts))}; change what the sources return"
        )
    merged = (torch.cat(tensors)[order] for tensors in zip(*columns, strict=True))
    return map_tensors(lambda _: next(merged), parts[0])
