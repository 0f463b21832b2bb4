"""Cutting a sequence into contiguous parts so that the dearest part is as cheap as it can be."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf, isfinite

from paceline.errors import SettingsError

_ROUNDING = 1e-9


def partition(costs: Sequence[float], num_parts: int) -> list[range]:
    """Return the places of each part of a sequence of `costs`, in order; none is empty.

    The dearest part is as cheap as any cut can make it. Of all such cuts it is one whose parts are the most even (the
    least sum of squares), for whoever holds several parts. Both by dynamic programming (the linear partition
    problem), in num_parts * len(costs)^2 steps at most.

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
    """Return the least value of all cuts, and where the parts of one begin that has it.

    Args:
        sums: Of the first i costs, for each i.
        num_parts: Parts that none may be empty.
        join: The value of a cut, from that of its first parts and the cost of the last; it grows with both.
    """
    num_items = len(sums) - 1
    values = [0.0] + [inf] * num_items  # of the first i items, in as many parts as rounds were made
    begins: list[list[int]] = []  # where the last of these parts begins
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
