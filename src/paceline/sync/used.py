"""The ranges of work that a server or a worker has done: positions of samples, or numbers of steps."""

from collections.abc import Sequence
from itertools import pairwise

Ranges = list[list[int]]
"""Disjoint pairs of start and stop, sorted, of which none begins where another ends."""


def add_range(ranges: Sequence[Sequence[int]], start: int, stop: int) -> Ranges:
    """Return the ranges with one more, which may overlap them."""
    if start >= stop:
        return [list(each) for each in ranges]
    apart = [list(each) for each in ranges if each[1] < start or stop < each[0]]
    joined = [each for each in ranges if not (each[1] < start or stop < each[0])]
    return sorted([*apart, [min([start, *(each[0] for each in joined)]), max([stop, *(each[1] for each in joined)])]])


def subtract(ranges: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> Ranges:
    """Return what is in the ranges, and not in the others."""
    left = [list(each) for each in ranges]
    for start, stop in others:
        parts = [part for first, end in left for part in ([first, min(end, start)], [max(first, stop), end])]
        left = [part for part in parts if part[0] < part[1]]
    return left


def unite(*several: Sequence[Sequence[int]]) -> Ranges:
    """Return the ranges that are in any of several."""
    united: Ranges = []
    for ranges in several:
        for start, stop in ranges:
            united = add_range(united, start, stop)
    return united


def covers(ranges: Sequence[Sequence[int]], start: int, stop: int) -> bool:
    """Return whether all of start..stop-1 is in the ranges."""
    return start >= stop or any(first <= start and stop <= end for first, end in ranges)


def find_gaps(ranges: Sequence[Sequence[int]]) -> Ranges:
    """Return what lies between the ranges."""
    return [[before[1], after[0]] for before, after in pairwise(ranges)]
