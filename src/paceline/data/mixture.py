"""Mixtures: several sources, of which each step has exactly its part.

Shapes: K sources, B samples that are asked for, C samples of a cycle.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from pydantic import Field

from paceline.data.base import Data, Source, Splits
from paceline.data.joined import JoinedSource
from paceline.data.order import apportion
from paceline.data.orders import Arrangement, Indices, SampleOrder
from paceline.data.permutation import Words, derive_seed, permute
from paceline.errors import SettingsError
from paceline.registry import check_whole, register

Changes = tuple[tuple[int, tuple[float, ...]], ...]
OnEnd = Literal["repeat", "stop"]


@register("mixture")
class Mixture(Data):
    """Several data together, each with a weight; they may differ in format and place.

    Each cycle of samples has exactly each source's part, in random order. Every source goes through its own epochs:
    each of its samples is used once before any is used again. Held-out data is that of all sources.
    """

    sources: tuple[Data, ...] = Field(min_length=1)
    """Data that are mixed."""
    weights: tuple[float, ...] | None = None
    """Weight of each source; by default by `temperature`."""
    temperature: float = Field(1, ge=1)
    """Temperature of the weights if none are given, which are size ** (1 / temperature): 1 for proportional to the
    sources' sizes, more for more of small ones (as of languages: Xue et al. 2021)."""
    changes: Changes = ()
    """Pairs of a position and the weights from there on, such as '[[100000, [0.5, 0.5]]]': a curriculum."""
    on_end: OnEnd = "repeat"
    """End of an epoch: when every source has been used up, while shorter ones begin again (repeat), or when the first
    one has been (stop)."""
    cycle: int = Field(1000, ge=1)
    """Samples in which each source has exactly its part, to the next whole sample."""

    def open(self) -> Splits:
        """Open all sources.

        Raises:
            DataError: A source cannot be opened, or their samples differ in shape.
            SettingsError: The weights do not fit the sources.
        """
        splits = [source.open() for source in self.sources]
        held_out = [one.held_out for one in splits if one.held_out is not None]
        train = MixtureSource(
            [one.train for one in splits],
            self.weights,
            temperature=self.temperature,
            changes=self.changes,
            on_end=self.on_end,
            cycle=self.cycle,
        )
        num_processes = max(one.num_processes for one in splits)
        return Splits(train, JoinedSource(held_out) if held_out else None, num_processes=num_processes)


class MixtureSource(JoinedSource):
    """Several sources, of which each cycle of samples has exactly each one's part: see `Mixture`.

    Args:
        datasets: Sources, or torch data sets with samples under an index.
        weights: Weight of each source; None for weights by `temperature`.
        temperature: Temperature of the weights if none are given: size ** (1 / temperature).
        changes: Pairs of a position and the weights from there on, by ascending position.
        on_end: End of an epoch: when every source has been used up (repeat), or when the first has been (stop).
        cycle: Samples in which each source has exactly its part, to the next whole sample.

    Raises:
        SettingsError: The weights do not fit the sources, or a source gets no sample in a cycle.
        DataError: See `JoinedSource`.
    """

    def __init__(
        self,
        datasets: Sequence[Source | Any],
        weights: Sequence[float] | None = None,
        *,
        temperature: float = 1,
        changes: Sequence[tuple[int, Sequence[float]]] = (),
        on_end: OnEnd = "repeat",
        cycle: int = 1000,
    ) -> None:
        super().__init__(datasets)
        if on_end not in get_args(OnEnd):
            raise SettingsError(f"on_end must be repeat or stop, but got {on_end!r}; choose one of both")
        if weights is None:
            if not _is_number(temperature) or temperature < 1:
                raise SettingsError(f"temperature must be a number of at least 1, but got {temperature!r}; raise it")
            weights = [len(source) ** (1 / temperature) for source in self.sources]
        check_whole("cycle", cycle, 1)
        starts = [0, *(position for position, _ in changes)]
        if starts != sorted(set(starts)):
            raise SettingsError(f"changes must have ascending positions above 0, but got {starts[1:]}; sort them")
        planned = [weights, *(changed for _, changed in changes)]
        self._counts = [_count(one, len(self.sources), cycle) for one in planned]
        self._starts, self._cycle, self._on_end = starts, cycle, on_end

    def arrange(self, order: SampleOrder, seed: int) -> Arrangement:
        """Return the arrangement of the mixture, each source in an `order` of its own epochs."""
        arranged = [source.arrange(order, derive_seed(seed, number)) for number, source in enumerate(self.sources)]
        return _MixtureArrangement(self, arranged, seed)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _count(weights: Sequence[float], num_sources: int, cycle: int) -> list[int]:
    """Return each source's samples in a cycle."""
    is_usable = all(_is_number(weight) and weight >= 0 for weight in weights)
    if len(weights) != num_sources or not is_usable or sum(weights) <= 0:
        raise SettingsError(
            f"weights must be {num_sources} numbers (one per source), finite, none negative and not all 0, but got "
            f"{list(weights)}; give other weights"
        )
    counts = apportion(cycle, weights)
    if any(weight and not count for weight, count in zip(weights, counts, strict=True)):
        raise SettingsError(
            f"each source with a weight must have a sample in a cycle, but of {cycle} samples weights "
            f"{list(weights)} give {counts}; raise cycle or the small weights, or set them to 0"
        )
    return counts


class _Stretch(NamedTuple):
    """Cycles with the same weights, from a position on."""

    start: int
    counts_K: Indices
    """Samples of each source in a cycle."""
    used_K: Indices
    """Samples of each source before the position."""


class _MixtureArrangement(Arrangement):
    def __init__(self, mixture: MixtureSource, arranged: list[Arrangement], seed: int) -> None:
        self._arranged, self._seed, self._cycle = arranged, seed, mixture._cycle
        sizes = [len(source) for source in mixture.sources]
        self._offsets_K = np.cumsum(sizes) - sizes
        self._shuffle = lru_cache(maxsize=4)(self._shuffle_cycle)
        self._stretches: list[_Stretch] = []
        used_K = np.zeros(len(sizes), dtype=np.int64)
        for start, counts in zip(mixture._starts, mixture._counts, strict=True):
            if self._stretches:
                used_K = self._count_used(len(self._stretches) - 1, start)
            self._stretches.append(_Stretch(start, np.array(counts, dtype=np.int64), used_K))
        ends = [self._find_end(number, one.num_samples) for number, one in enumerate(arranged)]
        known = [end for end in ends if end is not None]  # others are left before they have been used up
        self.num_samples = (min if mixture._on_end == "stop" else max)(known, default=self._stretches[-1].start)
        self._on_end = mixture._on_end

    def samples_at(self, epoch: int, places: Words) -> Indices:
        return self._look_up(epoch, places)[0]

    def epochs_at(self, epoch: int, places: Words) -> Indices:
        return self._look_up(epoch, places)[1]

    def _look_up(self, epoch: int, places: Words) -> tuple[Indices, Indices]:
        """Return the samples at some places, and of each the epoch of its source."""
        positions_B = places.astype(np.int64) + epoch * self.num_samples
        starts = np.array([stretch.start for stretch in self._stretches])
        stretches_B = np.searchsorted(starts, positions_B, side="right") - 1
        cycles_B, slots_B = np.divmod(positions_B - starts[stretches_B], self._cycle)
        samples_B, epochs_B = np.empty_like(positions_B), np.empty_like(positions_B)
        for number, cycle in np.unique(np.stack([stretches_B, cycles_B], 1), axis=0).tolist():
            here_B = (stretches_B == number) & (cycles_B == cycle)
            samples_B[here_B], epochs_B[here_B] = self._read_cycle(number, cycle, slots_B[here_B])
        return samples_B, epochs_B

    def describe(self) -> dict[str, Any]:
        stretches = [[stretch.start, stretch.counts_K.tolist()] for stretch in self._stretches]
        sources = [one.describe() | {"num_samples": one.num_samples} for one in self._arranged]
        return {"name": Mixture.name, "cycles": stretches, "on_end": self._on_end, "sources": sources}

    def _read_cycle(self, number: int, cycle: int, slots: Indices) -> tuple[Indices, Indices]:
        """Return the samples at some slots of a cycle, and of each the epoch of its source."""
        stretch, (kinds_C, ranks_C) = self._stretches[number], self._shuffle(number, cycle)
        kinds = kinds_C[slots]
        own = stretch.used_K[kinds] + cycle * stretch.counts_K[kinds] + ranks_C[slots]
        samples, passes = np.empty_like(own), np.empty_like(own)
        for kind in np.unique(kinds):
            one = self._arranged[kind]
            epochs, places = np.divmod(own, one.num_samples)
            passes[kinds == kind] = epochs[kinds == kind]
            for epoch in np.unique(epochs[kinds == kind]):
                here = (kinds == kind) & (epochs == epoch)
                samples[here] = one.samples_at(int(epoch), places[here].astype(np.uint64)) + self._offsets_K[kind]
        return samples, passes

    def _shuffle_cycle(self, number: int, cycle: int) -> tuple[Indices, Indices]:
        """Return the source of each slot of a cycle, and how many slots before it have the same source."""
        slots = np.arange(self._cycle, dtype=np.uint64)
        mixed = permute(slots, self._cycle, derive_seed(self._seed, number, cycle)).astype(np.int64)
        kinds_C = np.searchsorted(np.cumsum(self._stretches[number].counts_K), mixed, side="right")
        ranks_C = np.zeros_like(kinds_C)
        for kind in np.unique(kinds_C):
            ranks_C[kinds_C == kind] = np.arange((kinds_C == kind).sum())
        return kinds_C, ranks_C

    def _count_used(self, number: int, position: int) -> Indices:
        """Return each source's samples before a position, in that stretch or at its end."""
        stretch = self._stretches[number]
        cycle, rest = divmod(position - stretch.start, self._cycle)
        kinds_C, _ = self._shuffle(number, cycle)
        part: Indices = np.bincount(kinds_C[:rest], minlength=len(stretch.counts_K))
        return stretch.used_K + cycle * stretch.counts_K + part

    def _find_end(self, kind: int, num_samples: int) -> int | None:
        """Return the position after the sample with which a source has been used up; None if it never is."""
        following = [*self._stretches[1:], None]
        for number, (stretch, after) in enumerate(zip(self._stretches, following, strict=True)):
            if after is not None and after.used_K[kind] < num_samples:
                continue
            if not stretch.counts_K[kind]:
                return None
            cycle, rank = divmod(int(num_samples - 1 - stretch.used_K[kind]), int(stretch.counts_K[kind]))
            kinds_C, ranks_C = self._shuffle(number, cycle)
            (slot,) = np.flatnonzero((kinds_C == kind) & (ranks_C == rank))
            return stretch.start + cycle * self._cycle + int(slot) + 1
        return None
