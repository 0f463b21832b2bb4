"""Samples that cannot be read: fatal, skipped or replaced, and counted."""

import queue
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from paceline.data.base import Source
from paceline.data.orders import Indices
from paceline.errors import BadSample, DataError, SettingsError
from paceline.registry import Settings

_MOST_TRIES = 100
"""Neighbours of a bad sample that are tried in its place."""


class BadSampleWarning(UserWarning):
    """A sample could not be read, and was skipped or replaced."""


class BadSamples(Settings):
    """Settings for samples that cannot be read, of which a source says so by raising `BadSample`."""

    action: Literal["fatal", "skip", "replace"] = "fatal"
    """Reaction to a sample that cannot be read: the run stops (fatal), the sample counts nothing (skip), or the next
    one in the data that can be read takes its place (replace). The order stays as it is."""
    budget: int = Field(100, ge=0)
    """Number of different bad samples that a worker tolerates, from when it was started, before the run stops."""


class FoundBadSample(NamedTuple):
    """A sample that could not be read."""

    sample: int
    """Index of the sample in the data."""
    path: str
    key: str
    reason: str


class GoodSamples(NamedTuple):
    """Samples that were read where some were bad."""

    data: Any
    """Result of the source's `decode`."""
    kept: list[int]
    """Places of those that are no bad ones."""
    found: list[FoundBadSample]


def read_good(source: Source, indices: Indices, seeds: Sequence[int] | None, *, replaces: bool) -> GoodSamples:
    """Return the samples at `indices`, of which some are bad: these are left out, or replaced.

    A bad sample costs a second reading of its micro-batch, in which samples are read one by one.

    Args:
        source: Source of the samples.
        indices: Indices of the samples.
        seeds: Seed of each sample's random numbers, in a process that only reads.
        replaces: Whether the next sample that can be read takes the place of each bad one.

    Raises:
        BadSample: No neighbour of a bad sample is any better.
    """
    found, good, places, kept = [], [], [], []
    for place, index in enumerate(indices.tolist()):
        bad = _try_to_read(source, index)
        if bad is None:
            kept.append(place)
        else:
            found.append(bad)
        if bad is None or replaces:
            good.append(index if bad is None else _find_neighbour(source, bad))
            places.append(place)
    if not good:  # a borrowed sample, which counts nothing
        good, places = [_find_neighbour(source, found[0])], [0]
    kept_seeds = None if seeds is None else [seeds[place] for place in places]
    return GoodSamples(source.decode(source.fetch(np.array(good, dtype=np.int64)), kept_seeds), kept, found)


def _try_to_read(source: Source, index: int) -> FoundBadSample | None:
    try:
        source.read(np.array([index], dtype=np.int64))
    except BadSample as error:
        return FoundBadSample(index, error.path, error.key, error.reason or str(error))
    return None


def _find_neighbour(source: Source, bad: FoundBadSample) -> int:
    """Return the next sample that can be read."""
    for step in range(1, min(len(source), _MOST_TRIES + 1)):
        index = (bad.sample + step) % len(source)
        if _try_to_read(source, index) is None:
            return index
    raise BadSample(
        f"a sample near {bad.sample} must be readable to take its place, but none of the next {_MOST_TRIES} is "
        f"({_name(bad)}); see whether the data is damaged",
        path=bad.path,
        key=bad.key,
        reason=bad.reason,
    )


class BadSampleCount:
    """Count of the bad samples that a worker has met, and those that nobody has asked for yet."""

    def __init__(self, settings: BadSamples) -> None:
        if not isinstance(settings, BadSamples):
            raise SettingsError(
                f"bad_samples must be a BadSamples, but got {settings!r}; write BadSamples(action='skip')"
            )
        self.settings = settings
        self.is_fatal, self.skips = settings.action == "fatal", settings.action == "skip"
        self._known: set[int] = set()
        self._new: queue.SimpleQueue[FoundBadSample] = queue.SimpleQueue()

    def note(self, found: Sequence[FoundBadSample]) -> None:
        """Count bad samples.

        Raises:
            DataError: There are more bad samples than the budget.
        """
        for one in found:
            if one.sample in self._known:
                continue
            self._known.add(one.sample)
            self._new.put(one)
            if len(self._known) > self.settings.budget:
                raise DataError(
                    f"bad samples must be at most {self.settings.budget} (bad_samples.budget), but got "
                    f"{len(self._known)}, the last of them {_name(one)}; mend the data, or raise the budget"
                )
            if len(self._known) == 1:
                warnings.warn(
                    f"{_name(one)} cannot be read, which is tolerated ({self.settings.action}); later ones are "
                    "counted without a warning: see Loader.take_bad_samples",
                    BadSampleWarning,
                    stacklevel=2,
                )

    def take(self) -> list[FoundBadSample]:
        """Return the bad samples that were met since the last call, each once."""
        return [self._new.get() for _ in range(self._new.qsize())]


def read_without_bad(source: Source, indices: Indices, count: BadSampleCount) -> tuple[Any, int]:
    """Return the batch of samples at `indices` without the bad ones, and how many these are.

    Raises:
        BadSample: A sample cannot be read, and that is fatal, or no neighbour of bad ones is any better.
        DataError: There are more bad samples than the budget.
    """
    try:
        return source.read(indices), 0
    except BadSample:
        if count.is_fatal:
            raise
    good = read_good(source, indices, None, replaces=False)
    count.note(good.found)
    data = source.collate(good.data) if source.decodes_samples else good.data
    return data, len(indices) - len(good.kept)


def _name(bad: FoundBadSample) -> str:
    place = " ".join(part for part in (bad.path, bad.key) if part)
    return f"sample {bad.sample}{f' ({place})' if place else ''}: {bad.reason}"
