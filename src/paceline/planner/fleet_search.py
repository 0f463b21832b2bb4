"""The best timetable of runs on a fleet: by enumeration with bounds where there are few, by local search beyond."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.planner.fleet import Curves, Fleet, Option, Order, Placing, Timetable, come_first, divide_evenly, place

Objective = Literal["time", "money", "energy"]
MOST_NODES = 100_000
"""Runs that are put somewhere by the enumeration before it gives up; it takes about as many times 10 us."""
_MOST_MOVES = 3000
_SAME = 1 + 1e-9
"""Ratio up to which two times count as one: sums in another order differ in their last digits."""


@dataclass(frozen=True)
class FleetLimits:
    """What all runs together must keep; None: no limit.

    Args:
        within_s: Time at which the last one ends.
        budget: Money.
        energy_j: Energy.
    """

    within_s: float | None = None
    budget: float | None = None
    energy_j: float | None = None

    def keeps(self, timetable: Timetable) -> bool:
        """Return whether a timetable keeps them."""
        pairs = (
            (timetable.end_s, self.within_s),
            (timetable.money, self.budget),
            (timetable.energy_j, self.energy_j),
        )
        return all(limit is None or value <= limit * _SAME for value, limit in pairs)


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Args:
        timetable: Best timetable that was found; None: none keeps the limits, or none was found.
        is_proven: Whether no other timetable of these options is better.
        bound_s: Time before which no timetable of these options ends.
        num_nodes: Runs that the enumeration has put somewhere.
    """

    timetable: Timetable | None
    is_proven: bool
    bound_s: float
    num_nodes: int


def search(
    fleet: Fleet, curves: Curves, limits: FleetLimits, by: Objective = "time", most_nodes: int = MOST_NODES
) -> SearchResult:
    """Return the best timetable of runs, each of which holds its ranks from its start to its end.

    A timetable in which every run begins as soon as its ranks are free, in some order, is as good as any: so orders and
    options are enumerated, and cut where even what is left in the best case would not be better.

    Args:
        fleet: The fleet.
        curves: Options of each run.
        limits: Limits of all together.
        by: Measure that is least. Of equals the runs end sooner in the mean.
        most_nodes: Runs put somewhere after which the enumeration gives up.
    """
    found = _enumerate(fleet, curves, limits, by, most_nodes)
    bound_s = bound_end(fleet, curves)
    is_bound = found.best is not None and by == "time" and found.best.end_s <= bound_s * _SAME
    is_whole = found.num_nodes <= most_nodes or is_bound
    if is_whole and not is_bound and not _counts_are_enough(fleet, curves):
        # Ranks of any hosts are more than whole hosts and parts of one: what is best of these bounds the others.
        wider = _enumerate(Fleet(1, fleet.num_ranks), curves, limits, by, most_nodes)
        is_whole = wider.num_nodes <= most_nodes and _is_as_good(found.best, wider.best, by)
        if by == "time" and wider.num_nodes <= most_nodes and wider.best is not None:
            bound_s = max(bound_s, wider.best.end_s)
    return SearchResult(found.best, is_whole, bound_s, found.num_nodes)


def _is_as_good(best: Timetable | None, wider: Timetable | None, by: Objective) -> bool:
    """Return whether a timetable reaches the best of more of them."""
    if best is None or wider is None:
        return wider is None
    return rank(best, by)[0] <= rank(wider, by)[0] * _SAME


def _enumerate(fleet: Fleet, curves: Curves, limits: FleetLimits, by: Objective, most_nodes: int) -> "_Enumeration":
    """Return an enumeration that is done, from the best of simple timetables and their neighbours on."""
    found = _Enumeration(fleet, curves, limits, by)
    for timetable in _list_starts(fleet, curves):
        found.offer(timetable)
    best = None if found.best is None else _improve(fleet, curves, limits, by, found.best)
    if best is not None:
        found.offer(best)
    ends_soonest = by == "time" and found.best is not None and found.best.end_s <= bound_end(fleet, curves) * _SAME
    found.run(most_nodes // 10 if ends_soonest else most_nodes)  # only the mean end can still be better
    return found


def bound_end(fleet: Fleet, curves: Curves) -> float:
    """Return a time before which no timetable ends: the work of all over all ranks, or the longest run's least time."""
    work = sum(min(one.num_ranks * one.time_s for one in options) for options in curves) / fleet.num_ranks
    return max(work, max(min(one.time_s for one in options) for options in curves))


def _counts_are_enough(fleet: Fleet, curves: Curves) -> bool:
    """Return whether ranks can be counted: parts of several hosts may be free, and yet be no host."""
    sizes = {one.num_ranks for options in curves for one in options}
    return fleet.num_hosts == 1 or all(size % fleet.ranks_per_host == 0 for size in sizes)


def rank(timetable: Timetable, by: Objective) -> tuple[float, ...]:
    """Return the sort key of timetables by which the better comes first."""
    first = {"time": (), "money": (timetable.money,), "energy": (timetable.energy_j,)}[by]
    return (*first, timetable.end_s, timetable.mean_end_s)


def _list_starts(fleet: Fleet, curves: Curves) -> Iterator[Timetable]:
    """Yield timetables to begin with: simple ones, and the longest first on each number of ranks."""
    even = divide_evenly(fleet, curves)
    yield from () if even is None else (even,)
    yield come_first(fleet, curves)
    for limit in sorted({one.num_ranks for options in curves for one in options}):
        chosen = []
        for run, options in enumerate(curves):
            fitting = [number for number, one in enumerate(options) if one.num_ranks <= limit] or [0]
            chosen.append((run, fitting[-1]))
        for is_reverse in (True, False):
            ordered = sorted(chosen, key=lambda pair: curves[pair[0]][pair[1]].time_s, reverse=is_reverse)
            yield place(fleet, curves, tuple(ordered))
    yield place(fleet, curves, tuple((run, _cheapest(options)) for run, options in enumerate(curves)))


def _cheapest(options: Sequence[Option]) -> int:
    return min(range(len(options)), key=lambda number: (options[number].money, options[number].energy_j))


def _improve(fleet: Fleet, curves: Curves, limits: FleetLimits, by: Objective, best: Timetable) -> Timetable:
    """Return what single changes of a timetable lead to: another option, or another place in the order."""
    num_tried = 0
    while True:
        for order in _list_moves(curves, best.order):
            num_tried += 1
            changed = place(fleet, curves, order)
            if limits.keeps(changed) and rank(changed, by) < rank(best, by):
                best = changed
                break
            if num_tried >= _MOST_MOVES:
                return best
        else:
            return best


def _list_moves(curves: Curves, order: Order) -> Iterator[Order]:
    for place_, (run, option) in enumerate(order):
        rest = order[:place_] + order[place_ + 1 :]
        for other in range(len(curves[run])):
            for position in range(len(order)):
                if (other, position) != (option, place_):
                    yield (*rest[:position], (run, other), *rest[position:])


class _Enumeration:
    """Depth-first enumeration of orders and options, with bounds on what is left."""

    def __init__(self, fleet: Fleet, curves: Curves, limits: FleetLimits, by: Objective) -> None:
        self._fleet, self._curves, self._limits, self._by = fleet, curves, limits, by
        self._placing = Placing(fleet, curves)
        self._left = set(range(len(curves)))
        self.best: Timetable | None = None
        self.num_nodes = 0
        self._work = [min(one.num_ranks * one.time_s for one in options) for options in curves]
        self._time = [min(one.time_s for one in options) for options in curves]
        self._money = [min(one.money for one in options) for options in curves]
        self._energy = [min(one.energy_j for one in options) for options in curves]

    def offer(self, timetable: Timetable) -> None:
        """Take a timetable if it keeps the limits and is better."""
        is_better = self.best is None or rank(timetable, self._by) < rank(self.best, self._by)
        if is_better and self._limits.keeps(timetable):
            self.best = timetable

    def run(self, most_nodes: int) -> None:
        """Enumerate all that may be better than the best so far."""
        self._descend(0.0, 0.0, 0.0, 0.0, 0.0, most_nodes)

    def _descend(
        self, end_s: float, sum_ends_s: float, work: float, money: float, energy_j: float, most_nodes: int
    ) -> None:
        if not self._left:
            self.offer(self._placing.timetable())
            return
        for run in sorted(self._left):
            self._left.remove(run)
            for number in reversed(range(len(self._curves[run]))):
                option = self._curves[run][number]
                self.num_nodes += 1
                if self.num_nodes > most_nodes:
                    break
                entry = self._placing.push(run, number)
                state = (
                    max(end_s, entry.end_s),
                    sum_ends_s + entry.end_s,
                    work + option.num_ranks * option.time_s,
                    money + option.money,
                    energy_j + option.energy_j,
                )
                if self._may_be_better(*state):
                    self._descend(*state, most_nodes)
                self._placing.pop()
            self._left.add(run)

    def _may_be_better(self, end_s: float, sum_ends_s: float, work: float, money: float, energy_j: float) -> bool:
        left, limits, best = self._left, self._limits, self.best
        work += sum(self._work[run] for run in left)
        end_s = max(end_s, work / self._fleet.num_ranks, *(self._time[run] for run in left))
        money += sum(self._money[run] for run in left)
        energy_j += sum(self._energy[run] for run in left)
        for value, limit in ((end_s, limits.within_s), (money, limits.budget), (energy_j, limits.energy_j)):
            if limit is not None and value > limit * _SAME:
                return False
        if best is None:
            return True
        mean_end_s = (sum_ends_s + sum(self._time[run] for run in left)) / len(self._curves)
        least = {"time": (), "money": (money,), "energy": (energy_j,)}[self._by]
        wanted = {"time": (), "money": (best.money,), "energy": (best.energy_j,)}[self._by]
        for value, reached in zip((*least, end_s, mean_end_s), (*wanted, best.end_s, best.mean_end_s), strict=True):
            if value * _SAME < reached:
                return True
            if value > reached * _SAME:
                return False
        return False  # equal at best
