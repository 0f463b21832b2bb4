"""A fleet that several runs share: which ranks each holds from when to when, and what all of them cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np

from paceline.topology.cluster import Floats


@dataclass(frozen=True)
class Fleet:
    """Ranks of a cluster, of which a run holds whole hosts, or a part of one.

    Args:
        num_hosts: Number of hosts.
        ranks_per_host: Ranks of each.
        can_divide_hosts: Whether runs may hold parts of a host: not where its processor is what computes.
    """

    num_hosts: int
    ranks_per_host: int
    can_divide_hosts: bool = True

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.num_hosts * self.ranks_per_host

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of ranks that a run may hold, ascending: halves of a host, and whole hosts."""
        parts = {self.ranks_per_host}
        while self.can_divide_hosts and min(parts) % 2 == 0:
            parts.add(min(parts) // 2)
        return tuple(sorted(parts | {self.ranks_per_host * hosts for hosts in _list_hosts(self.num_hosts)}))


def _list_hosts(most: int) -> list[int]:
    """Return numbers of hosts: powers of two, one and a half times those up to 16, and all."""
    powers = {1 << power for power in range(most.bit_length())}
    found = {most, 3, 6, 12, 24, *powers}
    return sorted(one for one in found if one <= most)


@dataclass(frozen=True)
class Option:
    """One way for a run to hold ranks of the fleet.

    Args:
        num_ranks: Ranks that it holds.
        time_s: Time of the whole run.
        money: Price of its share of the hosts for that time; 0 where no price is known.
        energy_j: Energy of all its hosts.
    """

    num_ranks: int
    time_s: float
    money: float = 0.0
    energy_j: float = 0.0


Curves = Sequence[Sequence[Option]]
"""Options of each run."""
Order = tuple[tuple[int, int], ...]
"""Runs in the order in which they take ranks, each with the index of its option."""


@dataclass(frozen=True)
class Allocation:
    """Ranks that a run holds, and when.

    Args:
        run: Index of the run.
        option: Index of its option.
        units: Smallest parts of the fleet that it holds, by index.
        begin_s: Time at which it begins.
        end_s: Time at which it ends.
    """

    run: int
    option: int
    units: tuple[int, ...]
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timetable:
    """Runs on a fleet.

    Args:
        fleet: The fleet.
        unit: Ranks of the smallest part.
        entries: Holdings of each run, in the order in which they take ranks.
        money: Price of all.
        energy_j: Energy of all.
    """

    fleet: Fleet
    unit: int
    entries: tuple[Allocation, ...]
    money: float
    energy_j: float

    @property
    def order(self) -> Order:
        """Runs in the order in which they take ranks."""
        return tuple((entry.run, entry.option) for entry in self.entries)

    @property
    def end_s(self) -> float:
        """Time at which the last run ends."""
        return max(entry.end_s for entry in self.entries)

    @property
    def mean_end_s(self) -> float:
        """Mean time at which runs end."""
        return sum(entry.end_s for entry in self.entries) / len(self.entries)

    def list_ranks(self, entry: Allocation) -> tuple[int, ...]:
        """Return the ranks of the fleet that a run holds."""
        return tuple(one * self.unit + rank for one in entry.units for rank in range(self.unit))

    def list_before(self, entry: Allocation) -> list[int]:
        """Return the runs that must end before one begins: those that last held its ranks."""
        last: dict[int, int] = {}
        for other in self.entries[: self.entries.index(entry)]:
            last |= dict.fromkeys(other.units, other.run)
        return sorted({last[unit] for unit in entry.units if unit in last})

    def retime(self, times_s: Floats) -> Floats:
        """Return when each run ends if runs take other times, on the same ranks in the same order.

        Args:
            times_s: Times of each entry, shape (entries, draws).
        """
        num_units = self.fleet.num_ranks // self.unit
        free_s = np.zeros((num_units, times_s.shape[1]))
        ends = np.zeros_like(times_s)
        for number, entry in enumerate(self.entries):
            held = list(entry.units)
            ends[number] = free_s[held].max(axis=0) + times_s[number]
            free_s[held] = ends[number]
        return ends


class Placing:
    """Runs put onto a fleet one after another, each where it can begin soonest.

    Args:
        fleet: The fleet.
        curves: Options of each run.
    """

    def __init__(self, fleet: Fleet, curves: Curves) -> None:
        self._fleet, self._curves = fleet, curves
        self.unit = gcd(fleet.ranks_per_host, *(option.num_ranks for options in curves for option in options))
        self._units_of_host = fleet.ranks_per_host // self.unit
        self._free_s = [0.0] * (fleet.num_ranks // self.unit)
        self.entries: list[Allocation] = []
        self._undo: list[list[float]] = []

    def push(self, run: int, option: int) -> Allocation:
        """Put a run where it can begin soonest; of equal places where least is free."""
        taken = self._curves[run][option]
        size = taken.num_ranks // self.unit
        units = self._find_part(size) if size < self._units_of_host else self._find_hosts(size // self._units_of_host)
        begin_s = max(self._free_s[unit] for unit in units)
        entry = Allocation(run, option, units, begin_s, begin_s + taken.time_s)
        self._undo.append([self._free_s[unit] for unit in units])
        for unit in units:
            self._free_s[unit] = entry.end_s
        self.entries.append(entry)
        return entry

    def pop(self) -> None:
        """Take the last run off."""
        for unit, free_s in zip(self.entries.pop().units, self._undo.pop(), strict=True):
            self._free_s[unit] = free_s

    def _find_part(self, size: int) -> tuple[int, ...]:
        best: tuple[float, int, tuple[int, ...]] | None = None
        for host in range(self._fleet.num_hosts):
            first = host * self._units_of_host
            ordered = sorted(range(first, first + self._units_of_host), key=self._free_s.__getitem__)
            begin_s = self._free_s[ordered[size - 1]]
            free = [unit for unit in ordered if self._free_s[unit] <= begin_s]
            found = (begin_s, len(free), tuple(free[-size:]))  # those that are free longest stay free
            if best is None or found[:2] < best[:2]:
                best = found
        assert best is not None
        return best[2]

    def _find_hosts(self, number: int) -> tuple[int, ...]:
        of_host = self._units_of_host
        ready = [max(self._free_s[host * of_host : (host + 1) * of_host]) for host in range(self._fleet.num_hosts)]
        ordered = sorted(range(len(ready)), key=ready.__getitem__)
        free = [host for host in ordered if ready[host] <= ready[ordered[number - 1]]]
        return tuple(unit for host in free[-number:] for unit in range(host * of_host, (host + 1) * of_host))

    def timetable(self) -> Timetable:
        """Return what has been put."""
        taken = [self._curves[entry.run][entry.option] for entry in self.entries]
        money, energy_j = sum(one.money for one in taken), sum(one.energy_j for one in taken)
        return Timetable(self._fleet, self.unit, tuple(self.entries), money, energy_j)


def place(fleet: Fleet, curves: Curves, order: Order) -> Timetable:
    """Return the timetable of runs that take ranks in an order."""
    placing = Placing(fleet, curves)
    for run, option in order:
        placing.push(run, option)
    return placing.timetable()


def divide_evenly(fleet: Fleet, curves: Curves) -> Timetable | None:
    """Return the timetable where each run has an equal part of the fleet from the start; None if it needs more."""
    most = fleet.num_ranks / len(curves)
    order = []
    for run, options in enumerate(curves):
        fitting = [number for number, option in enumerate(options) if option.num_ranks <= most]
        if not fitting:
            return None
        order.append((run, min(fitting, key=lambda number: options[number].time_s)))
    return place(fleet, curves, tuple(order))


def come_first(fleet: Fleet, curves: Curves) -> Timetable:
    """Return the timetable where runs come in the given order, each with all ranks that make it faster."""
    fastest = [min(range(len(options)), key=lambda number: options[number].time_s) for options in curves]
    return place(fleet, curves, tuple(enumerate(fastest)))
