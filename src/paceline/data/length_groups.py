"""Groups of samples of similar length, which the samples of a global batch are dealt to."""

import weakref
from collections.abc import Sequence

import numpy as np

from paceline.data.base import Source
from paceline.data.order import GlobalOrder, Interval
from paceline.data.orders import Indices
from paceline.data.padding import Padding
from paceline.errors import BadSample, SettingsError

_CHUNK = 512
"""Samples that are read together to be measured."""
_NUM_HALVINGS = 40


class LengthGroups:
    """Division of a global batch into groups of similar length, one for each worker and micro-batch.

    Its samples are sorted by length, longest first, and cut so that the largest group, by its number of samples times
    the length of its longest, is as small as it can be: short samples come many together, long ones few. Which samples
    are in a global batch is unchanged, and so is everything that counts positions. It depends on lengths, weights and
    the interval alone: all workers find the same without a message.

    Args:
        order: Global order.
        lengths: Length of each sample, by its index.

    Raises:
        SettingsError: Lengths are not as many as samples, or negative.
    """

    def __init__(self, order: GlobalOrder, lengths: Sequence[int] | Indices) -> None:
        self._order = order
        self._lengths = np.asarray(lengths, dtype=np.int64)
        if self._lengths.ndim != 1 or len(self._lengths) < order.num_samples or (self._lengths < 0).any():
            raise SettingsError(
                f"lengths must be one whole number for each of {order.num_samples} samples, none negative, but got an "
                f"array of shape {self._lengths.shape}; give the length of each sample in the data set's order"
            )

    def divide(self, interval: Interval, weights: Sequence[float]) -> list[Indices]:
        """Return the positions of each group.

        Args:
            interval: Positions of the global batch.
            weights: Part of the cost that each group should have; one of weight 0 gets nothing.
        """
        lengths = self._lengths[self._order.samples_at(interval)]
        longest_first = np.argsort(-lengths, kind="stable")
        costs = np.maximum(lengths[longest_first], 1).tolist()
        ends = np.cumsum(_fill(costs, list(weights)))[:-1]
        return [np.sort(group) for group in np.split(longest_first + interval.start, ends)]


def _fill(costs: list[int], weights: list[float]) -> list[int]:
    """Return the number of samples of each group, so that the largest cost by weight is the least that is found.

    Args:
        costs: Length of each sample, descending.
        weights: Weight of each group.
    """
    total = sum(weights)
    parts = [weight / total for weight in weights]
    too_small, enough = 0.0, float(costs[0] * len(costs)) * max(1.0 / min(part for part in parts if part), 1.0)
    counts = _try_to_fill(costs, parts, enough)
    assert counts is not None
    for _ in range(_NUM_HALVINGS):
        capacity = (too_small + enough) / 2
        found = _try_to_fill(costs, parts, capacity)
        if found is None:
            too_small = capacity
        else:
            enough, counts = capacity, found
    return counts


def _try_to_fill(costs: list[int], parts: list[float], capacity: float) -> list[int] | None:
    """Return the number of samples of each group if all fit; each group that may have some has one, if there is one."""
    counts, start = [], 0
    num_left = sum(part > 0 for part in parts)
    for part in parts:
        num_left -= part > 0
        room = len(costs) - start
        count = 0
        if part and room:
            fitting = int(capacity * part / costs[start])
            count = max(1, min(fitting, room - num_left))
            if fitting < 1 and room > num_left + 1:  # else there are too few samples to have a choice
                return None
        counts.append(count)
        start += count
    return counts if start == len(costs) else None


_measured: "weakref.WeakKeyDictionary[Source, Indices]" = weakref.WeakKeyDictionary()


def measure_lengths(source: Source, *, is_fatal: bool = True) -> Indices:
    """Return the length of each sample of a source, which reads all of them, once in this process.

    Args:
        source: Source of the samples.
        is_fatal: Whether a sample that cannot be read is an error; else its length is 0.

    Raises:
        BadSample: A sample cannot be read.
        SettingsError: The source does not know what a sample's length is.
    """
    padding = source.collate_fn
    if not source.decodes_samples or not isinstance(padding, Padding):
        raise SettingsError(
            f"lengths must be given for group_by_length with {type(source).__name__}, whose samples are not padded by "
            "Padding; give Loader(lengths=...), one number for each sample, or collate_fn=Padding()"
        )
    if source not in _measured:
        parts = [np.zeros(0, dtype=np.int64)]
        for start in range(0, len(source), _CHUNK):
            indices = np.arange(start, min(start + _CHUNK, len(source)), dtype=np.int64)
            parts.append(_measure(source, padding, indices, is_fatal=is_fatal))
        _measured[source] = np.concatenate(parts)
    return _measured[source]


def _measure(source: Source, padding: Padding, indices: Indices, *, is_fatal: bool) -> Indices:
    """Return the lengths of some samples, which are read one by one if one of them is bad."""
    try:
        return np.array([padding.length_of(one) for one in source.decode(source.fetch(indices))], np.int64)
    except BadSample:
        if is_fatal:
            raise
        if len(indices) == 1:
            return np.zeros(1, np.int64)
        return np.concatenate(
            [_measure(source, padding, one, is_fatal=False) for one in np.split(indices, len(indices))]
        )


def open_groups(
    order: GlobalOrder,
    source: Source | None,
    lengths: Sequence[int] | None,
    *,
    group_by_length: bool,
    is_bad_fatal: bool = True,
) -> LengthGroups | None:
    """Return the groups of a loader, by its settings; None if it has none.

    Raises:
        BadSample: A sample cannot be read to be measured, and `is_bad_fatal`.
        SettingsError: Settings do not fit each other, or the data.
    """
    if not group_by_length:
        if lengths is not None:
            raise SettingsError("lengths must come with group_by_length; give group_by_length=True too")
        return None
    if source is None:
        raise SettingsError(
            "group_by_length must be false for an iterable data set, whose samples are known one after another; write "
            "a data set with __len__ and __getitem__"
        )
    return LengthGroups(order, measure_lengths(source, is_fatal=is_bad_fatal) if lengths is None else lengths)
