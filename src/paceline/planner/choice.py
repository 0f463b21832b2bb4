"""The choice among candidates that fit: by time, or by money or energy where a limit of time is given."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from types import MappingProxyType

import numpy as np

from paceline.errors import SettingsError
from paceline.monitor.formatting import interval
from paceline.planner.candidate import Candidate
from paceline.planner.front import find_front
from paceline.planner.pool import MEMORY_HIGH, OBJECTIVES, Needs, Pool
from paceline.planner.problem import PlanProblem
from paceline.simulator.training.answers import QUANTILE
from paceline.topology.cluster import Floats, Integers

_COLUMNS = tuple(OBJECTIVES)
_ALIKE = 1.01
"""Ratio to the best up to which the plainer candidate is taken."""
_SAME = 1.0005
"""Ratio below which a difference is not worth a number."""
_MOST_TIES = 20
"""Candidates that are nearest to the choice, which are compared with it."""
_MOST_SHOWN = 12
"""Candidates of the front that are shown; the document has all."""


@dataclass(frozen=True)
class Choice:
    """A chosen candidate of a pool.

    Args:
        pool: The pool.
        objectives: Time, money, energy and memory of its candidates.
        index: Index of the chosen one: the best, or a plainer one that ties with it and may be off the front.
        best: Index of the best in the objective.
        is_unsure: Whether the two differ by less than is known.
        front: Indices of those that no other beats in everything, among those that keep the limits; fastest first.
        ties: Indices of those whose time differs from the choice's by less than is known.
        by: Objective that it is best in.
        refused: Candidates that only the model itself showed to be refused, each with the reason.
        kept: Indices of all that fit, keep the limits and are not refused.
    """

    pool: Pool
    objectives: Floats
    index: int
    best: int
    is_unsure: bool
    front: tuple[int, ...]
    ties: tuple[int, ...]
    by: str
    refused: Mapping[Candidate, str]
    kept: tuple[int, ...] = ()

    @property
    def shown(self) -> list[int]:
        """Indices of the front to show: the choice if it is one, the best in each thing, others; fastest first."""
        own = [self.index] if self.index in self.front else []
        wanted = [*own, *(min(self.front, key=lambda one: self.objectives[one, column]) for column in range(4))]
        spaced = self.front[:: max(1, len(self.front) // _MOST_SHOWN)]
        chosen = list(dict.fromkeys([*wanted, *spaced]))[:_MOST_SHOWN]
        return sorted(chosen, key=lambda one: float(self.objectives[one, 0]))

    @property
    def needs(self) -> Needs:
        """What the chosen candidate needs."""
        return self.pool.needs[self.index]

    def describe_better(self) -> str:
        """Return what is better by estimate, where a plainer candidate was taken; empty if it was not."""
        if self.index == self.best:
            return ""
        column = _COLUMNS.index(self.by)
        ratio = float(self.objectives[self.index, column] / self.objectives[self.best, column])
        better = {"step_s": "faster", "money": "cheaper", "energy_j": "more sparing of energy"}[self.by]
        words = f"{ratio - 1:.1%} {better}" if ratio > _SAME else f"no {better}, and needs other memory or energy"
        doubt = "less than is known" if self.is_unsure else "too little for its additional settings"
        return (
            f"taken as the plainest of a tie: {self.pool.needs[self.best].candidate.describe()} is {words} by "
            f"estimate, {doubt}"
        )


def choose(
    pool: Pool,
    least: Needs | None,
    refused: Mapping[Candidate, str] = MappingProxyType({}),
    most_ranks: int | None = None,
) -> Choice:
    """Return the choice among candidates that fit and keep the limits.

    Args:
        pool: Candidates, priced.
        least: Candidate of all that needs least memory.
        refused: Candidates that training has turned out to refuse, with the reason.
        most_ranks: Ranks that a candidate may have; None: as many as it has.

    Raises:
        SettingsError: None fits or keeps the limits; the message names the nearest.
    """
    problem = pool.problem
    allowed = pool.fits & np.array([one.candidate not in refused for one in pool.needs], dtype=bool)
    if most_ranks is not None:
        allowed &= np.array([one.candidate.division.num_ranks <= most_ranks for one in pool.needs], dtype=bool)
    if not allowed.any() and pool.fits.any() and refused:
        reason = next(iter(refused.values()))
        raise SettingsError(f"nothing fits: training refuses all candidates that memory would hold: {reason}")
    if not allowed.any():
        raise _nothing_fits(problem, least)
    objectives = pool.objectives()
    kept = np.flatnonzero(allowed & _keeps_limits(problem, objectives))
    if not len(kept):
        raise _nothing_keeps(pool, objectives, np.flatnonzero(allowed))
    by = _find_objective(problem, knows_energy=bool(objectives[kept, 2].all()))
    front = kept[find_front(objectives[kept])]
    index = _find_plainest(pool, objectives[:, _COLUMNS.index(by)], kept)
    ordered = sorted(front.tolist(), key=lambda one: objectives[one].tolist())
    near = sorted(kept.tolist(), key=lambda one: abs(np.log(objectives[one, 0] / objectives[index, 0])))[:_MOST_TIES]
    ties = tuple(one for one in find_ties(pool, index, near) if one != index)
    best = int(kept[int(np.argmin(objectives[kept, _COLUMNS.index(by)]))])
    is_unsure = index == best or bool(find_ties(pool, index, [best]))
    return Choice(pool, objectives, index, best, is_unsure, tuple(ordered), ties, by, refused, tuple(kept.tolist()))


def _find_plainest(pool: Pool, primary: Floats, kept: Integers) -> int:
    """Return the best of some candidates: exact, and no model divided among ranks, unless others are surely better.

    Dividing it has costs that no number here is of (schedules, more kernels), and ends more things that can fail.
    """
    best = int(kept[int(np.argmin(primary[kept]))])
    for is_plain in (_is_exact, _is_undivided):
        plainer = kept[[is_plain(pool.needs[one].candidate) for one in kept]]
        if len(plainer):
            plain = int(plainer[int(np.argmin(primary[plainer]))])
            spread = 0.0 if plain == best else float(pool.ratio_spreads([best, plain])[0, 1])
            if log(primary[plain] / primary[best]) <= QUANTILE * spread:
                best, kept = plain, plainer
    alike = kept[primary[kept] <= primary[best] * _ALIKE]
    return int(min(alike, key=lambda one: (pool.needs[one].candidate.plainness, primary[one])))


def _is_exact(candidate: Candidate) -> bool:
    return candidate.way is None


def _is_undivided(candidate: Candidate) -> bool:
    return candidate.division.ranks_of_worker == 1


def find_ties(pool: Pool, index: int, others: list[int]) -> list[int]:
    """Return those of `others` whose step differs from that of `index` by less than is known."""
    chosen = [index, *others]
    spreads = pool.ratio_spreads(chosen)[0, 1:]
    distances = np.abs(np.log(pool.step_s[others] / pool.step_s[index]))
    return [one for one, is_tie in zip(others, distances <= QUANTILE * spreads, strict=True) if is_tie]


def _find_objective(problem: PlanProblem, *, knows_energy: bool) -> str:
    if problem.limits.within_s is None:
        return "step_s"
    return "money" if problem.has_prices else "energy_j" if knows_energy else "step_s"


def _keeps_limits(problem: PlanProblem, objectives: Floats) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    kept = np.ones(len(objectives), dtype=bool)
    for limit, column in _list_limits(problem):
        kept &= objectives[:, column] <= limit
    return kept


def _list_limits(problem: PlanProblem) -> list[tuple[float, int]]:
    """Return limits of a step, each with the column of the objective that it is of."""
    limits = problem.limits
    pairs = ((limits.within_s, 0), (limits.budget, 1), (limits.energy_j, 2))
    return [(limit / (problem.num_steps or 1), column) for limit, column in pairs if limit is not None]


def describe_excess(problem: PlanProblem, objectives: Floats) -> str:
    """Return the limit of a problem that a candidate exceeds most, and by how much; empty if it keeps all."""
    found = [(float(objectives[column]) / limit, column) for limit, column in _list_limits(problem)]
    excess, column = max(found, default=(0.0, 0))
    return f"{excess:.3g} times the {OBJECTIVES[_COLUMNS[column]]} that is allowed" if excess > 1 else ""


def _nothing_fits(problem: PlanProblem, least: Needs | None) -> SettingsError:
    if least is None:
        return SettingsError(
            "nothing fits: training refuses every layout of these ranks; take another --num_ranks or --global_batch"
        )
    name = problem.machines[least.candidate.machines].name
    return SettingsError(
        f"nothing fits: the nearest needs {least.memory_bytes * MEMORY_HIGH / 1e9:.3g} GB a rank (estimated "
        f"{least.memory_bytes / 1e9:.3g}) of {least.available_bytes / 1e9:.3g} GB on {name}: "
        f"{least.candidate.describe()}; take more ranks, devices with more memory, or a smaller model"
    )


def _nothing_keeps(
    pool: Pool, objectives: Floats, allowed: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> SettingsError:
    problem = pool.problem
    limits = _list_limits(problem)
    excess = np.max([objectives[allowed, column] / limit for limit, column in limits], axis=0)
    nearest = int(allowed[int(np.argmin(excess))])
    ends = np.concatenate([objectives[nearest][:, None], pool.intervals([nearest])[0]], axis=1)
    time_s, money, energy_j, _ = (ends * (problem.num_steps or 1)).tolist()
    words = [f"{interval(*(value / 3600 for value in time_s))} h"]
    words += [f"{interval(*money)} in {problem.currency}"] if problem.has_prices else []
    words += [f"{interval(*(value / 3.6e6 for value in energy_j))} kWh"]
    return SettingsError(
        f"nothing keeps the limits: the nearest takes {', '.join(words)}, {float(excess.min()):.3g} times what is "
        f"allowed: {pool.needs[nearest].candidate.describe()}; allow more, or offer other machines"
    )
