"""Partition of a sequence into contiguous parts, such that the most expensive part is as cheap as possible."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf, isfinite

from paceline.errors import SettingsError

_ROUNDING = 1e-9


def partition(costs: Sequence[float], num_parts: int) -> list[range]:
    """Return the indices of each part of a sequence of `costs`, in order; none is empty.

    The most expensive part is as cheap as any partition can make it. Of all such partitions it is one with the most
    even parts (the least sum of squares), which suits ranks that hold several parts. Both are found by dynamic
    programming (the linear partition problem), in at most num_parts * len(costs)^2 steps.

    Raises:
        SettingsError: There are fewer items than parts, or a cost is negative or not finite.
    """
    if not 1 <= num_parts <= len(costs):
        raise SettingsError(
            f"the parts of a sequence must be at least 1 and at most its items, but got {num_parts} parts of "
            f"{len(costs)} items; cut it into fewer parts"
        )
    for i, cost in enumerate(costs):
        if not isfinite(cost) or cost < 0:
            raise SettingsError(f"a cost must be finite and at least 0, but item {i} has {cost}; measure it again")
    sums = list(accumulate(costs, initial=0.0))
    dearest, _ = _cut(sums, num_parts, max)
    limit = dearest * (1 + _ROUNDING)

    def add_square(before: float, part: float) -> float:
        return before + part * part if part <= limit else inf

    _, begins = _cut(sums, num_parts, add_square)
    return [range(begin, end) for begin, end in pairwise([*begins, len(costs)])]


def _cut(sums: Sequence[float], num_parts: int, join: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """Return the least value of all partitions, and the beginnings of the parts of one that has it.

    Args:
        sums: Sum of the first i costs, for each i.
        num_parts: Number of parts, none of them empty.
        join: Value of a partition, from that of its first parts and the cost of the last; it grows with both.
    """
    num_items = len(sums) - 1
    values = [0.0] + [inf] * num_items  # value of the first i items, in one part per round so far
    begins: list[list[int]] = []  # beginning of the last of these parts
    for k in range(1, num_parts + 1):
        row = [inf] * (num_items + 1)
        places = [0] * (num_items + 1)
        for end in range(k, num_items - (num_parts - k) + 1):
            row[end], places[end] = min((join(values[i], sums[end] - sums[i]), i) for i in range(k - 1, end))
        values = row
        begins.append(places)
    cuts = [num_items]
    for places in reversed(begins):
        cuts.append(places[cuts[-1]])
    return values[num_items], cuts[:0:-1]
