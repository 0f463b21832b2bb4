"""Several runs planned on one fleet: the curve of each, the best timetable, and simpler ones beside it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.errors import SettingsError
from paceline.planner.candidate import Candidate, Machines
from paceline.planner.choice import Choice, choose
from paceline.planner.explain import list_neighbours
from paceline.planner.fleet import Allocation, Fleet, Option, come_first, divide_evenly
from paceline.planner.fleet_intervals import SURE, Priced, TimeDraws
from paceline.planner.fleet_search import FleetLimits, Objective, SearchResult, search
from paceline.planner.planning import Planned, Trial, answer_candidate, refuse_alike
from paceline.planner.pool import Pool, make_pool
from paceline.planner.problem import PlanProblem
from paceline.planner.space import Space, make_space
from paceline.simulator.training.fit import Posterior

_MOST_TRIALS = 200
_MOST_COMPARED = 100
"""Fastest candidates of each kind among which the plan of so many ranks is chosen."""


@dataclass(frozen=True)
class FleetRun:
    """A run that shares a fleet.

    Args:
        name: Name of it, for people.
        problem: Problem of planning it on the whole fleet, without limits.
        trial: Judgement of training itself on a candidate.
    """

    name: str
    problem: PlanProblem
    trial: Trial


@dataclass(frozen=True)
class RunCurve:
    """What a run takes on how many ranks.

    Args:
        run: The run.
        space: Candidates of it.
        options: Ways to hold ranks, each faster than those with fewer.
        choices: Plan of each.
    """

    run: FleetRun
    space: Space
    options: tuple[Option, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class FleetPlan:
    """Runs planned on a fleet.

    Args:
        machines: Machines of the fleet.
        fleet: Hosts and ranks of these.
        curves: Curve of each run.
        found: Best timetable, and whether it is proven to be.
        by: Measure that is least in it.
        best: The same with intervals.
        others: Simpler timetables by name; None where there are fewer ranks than such a one needs.
        plans: Plan of each run.
        took_s: Seconds that planning took.
        limits: Limits of all together.
        intervals: 90 % interval of the time of each option of each run.
    """

    machines: Machines
    fleet: Fleet
    curves: tuple[RunCurve, ...]
    found: SearchResult
    by: Objective
    best: Priced
    others: dict[str, Priced | None]
    plans: tuple[Planned, ...]
    took_s: float
    limits: FleetLimits
    intervals: tuple[tuple[tuple[float, float], ...], ...]

    def list_before(self, entry: Allocation) -> list[int]:
        """Return the runs that must end before one of the best timetable begins."""
        return self.best.timetable.list_before(entry)


def make_fleet(machines: Machines) -> Fleet:
    """Return the fleet of machines.

    Raises:
        SettingsError: The ranks are no whole hosts.
    """
    per_host = min(machines.num_ranks, machines.cluster.paths.devices_per_host)
    if machines.num_ranks % per_host:
        raise SettingsError(
            f"--num_ranks must be of whole hosts for several runs, but got {machines.num_ranks} = "
            f"{machines.num_ranks // per_host} x {per_host} + {machines.num_ranks % per_host}; take a multiple of "
            f"{per_host}"
        )
    return Fleet(machines.num_ranks // per_host, per_host, not machines.has_host_devices)


def plan_fleet(runs: Sequence[FleetRun], posterior: Posterior, limits: FleetLimits) -> FleetPlan:
    """Plan runs on the machines that their problems share.

    Args:
        runs: The runs.
        posterior: Beliefs about the parameters of steps.
        limits: Limits of all together.

    Raises:
        SettingsError: A run fits on no part of the fleet, or no timetable keeps the limits.
    """
    began_s = time.perf_counter()
    machines = runs[0].problem.machines[0]
    fleet = make_fleet(machines)
    curves = tuple(make_curve(run, posterior, fleet) for run in runs)
    options = [curve.options for curve in curves]
    by: Objective = "time"
    if limits.within_s is not None:
        by = "money" if runs[0].problem.has_prices else "energy"
    found = search(fleet, options, limits, by)
    if found.timetable is None:
        raise _nothing_keeps(fleet, options, limits, found)
    draws = TimeDraws(options, [[choice.needs for choice in curve.choices] for curve in curves], posterior)
    best = draws.price(found.timetable, found.timetable)
    even = divide_evenly(fleet, options)
    simple = {"even split": even, "first come": come_first(fleet, options)}
    others = {name: None if one is None else draws.price(one, found.timetable) for name, one in simple.items()}
    plans = {entry.run: _make_planned(curves[entry.run], entry.option) for entry in found.timetable.entries}
    return FleetPlan(
        machines,
        fleet,
        curves,
        found,
        by,
        best,
        others,
        tuple(plans[run] for run in range(len(runs))),
        time.perf_counter() - began_s,
        limits,
        draws.intervals(),
    )


def make_curve(run: FleetRun, posterior: Posterior, fleet: Fleet) -> RunCurve:
    """Return what a run takes on each number of ranks that it may hold, as far as more make it faster.

    Raises:
        SettingsError: The run fits on none.
    """
    problem = run.problem
    numbers = {fleet.ranks_per_host >> halvings for halvings in range(fleet.ranks_per_host.bit_length())}
    numbers = {number for number in numbers if number and fleet.ranks_per_host % number == 0} | set(fleet.sizes)
    # Where there are too many candidates, numbers that are no halves of the fleet are left out first.
    ordered = sorted(numbers, key=lambda number: (fleet.num_ranks % number == 0, number), reverse=True)
    space = make_space(problem, num_ranks=ordered)
    pool, least = make_pool(problem, posterior, space.candidates)
    refused: dict[Candidate, str] = {}
    accepted: set[Candidate] = set()
    reason: SettingsError | None = None
    found: list[tuple[Option, Choice]] = []
    for size in fleet.sizes:
        try:
            while True:
                best = _take_best(pool, size, refused)
                choice = choose(best, least, refused, size)
                candidate = choice.needs.candidate
                why = "" if candidate in accepted else run.trial(candidate)
                if not why:
                    break
                refused |= refuse_alike(pool, candidate, why)
                if len(refused) > _MOST_TRIALS and not accepted:
                    raise SettingsError(f"training refuses {len(refused)} of the best plans: {why}")
        except SettingsError as error:
            reason = error
            continue
        accepted.add(candidate)
        option = _make_option(choice, size)
        if not found or option.time_s < found[-1][0].time_s * (1 - SURE):
            found.append((option, choice))
    if not found:
        raise SettingsError(f"{run.name}: {reason}")
    options, choices = zip(*found, strict=True)
    return RunCurve(run, space, options, choices)


def _take_best(pool: Pool, num_ranks: int, refused: Mapping[Candidate, str]) -> Pool:
    """Return the fastest that fit on so many ranks, and the fastest of plainer kinds, which are taken in a tie."""
    candidates = [one.candidate for one in pool.needs]
    allowed = pool.fits & np.array([one.division.num_ranks <= num_ranks for one in candidates], dtype=bool)
    if refused:
        allowed &= np.array([one not in refused for one in candidates], dtype=bool)
    is_exact = np.array([one.way is None for one in candidates], dtype=bool)
    is_undivided = np.array([one.division.ranks_of_worker == 1 for one in candidates], dtype=bool)
    kept: set[int] = set()
    for kind in (allowed, allowed & is_exact, allowed & is_exact & is_undivided):
        places = np.flatnonzero(kind)
        kept |= set(places[np.argsort(pool.step_s[places])[:_MOST_COMPARED]].tolist())
    return pool.take(sorted(kept)) if kept else pool


def _make_option(choice: Choice, num_ranks: int) -> Option:
    problem = choice.pool.problem
    steps = problem.num_steps or 1
    step_s, _, energy_j, _ = choice.objectives[choice.index].tolist()
    machines = problem.machines[0]
    hosts = num_ranks / min(machines.num_ranks, machines.cluster.paths.devices_per_host)
    money = (machines.price_per_hour or 0.0) * hosts * step_s / 3600
    return Option(num_ranks, step_s * steps, money * steps, energy_j * steps)


def _make_planned(curve: RunCurve, option: int) -> Planned:
    choice = curve.choices[option]
    return Planned(
        curve.run.problem,
        curve.space,
        choice,
        answer_candidate(choice, None),
        (),
        tuple(list_neighbours(choice)),
        0,
        0.0,
    )


def _nothing_keeps(
    fleet: Fleet, options: Sequence[Sequence[Option]], limits: FleetLimits, found: SearchResult
) -> SettingsError:
    soonest = search(fleet, options, FleetLimits()).timetable
    assert soonest is not None
    money = sum(min(one.money for one in of_run) for of_run in options)
    energy_j = sum(min(one.energy_j for one in of_run) for of_run in options)
    words = [f"the soonest end of all is after {soonest.end_s / 3600:.3g} h"]
    words += [f"the least money {money:.4g}"] if limits.budget is not None else []
    words += [f"the least energy {energy_j / 3.6e6:.3g} kWh"] if limits.energy_j is not None else []
    doubt = "" if found.is_proven else " that was found"
    return SettingsError(
        f"nothing keeps the limits: of all runs {', '.join(words)}{doubt}; allow more, or offer more ranks"
    )
