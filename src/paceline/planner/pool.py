"""Candidates with what they need and cost: memory prunes them, and a closed form prices all that are left at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, hypot

import numpy as np

from paceline.planner.candidate import Candidate
from paceline.planner.problem import PlanProblem
from paceline.simulator.training.answers import MEMORY_ROW_SPREAD, QUANTILE, widen_unknown
from paceline.simulator.training.batch import StepBatch, make_batch
from paceline.simulator.training.description import Description, describe
from paceline.simulator.training.energy import WORKING, estimate_energy_j, widen_by_power
from paceline.simulator.training.fit import Posterior
from paceline.simulator.training.likeness import Features
from paceline.simulator.training.memory import LOG_SPREAD, estimate_memory
from paceline.simulator.training.price import TERMS
from paceline.topology.cluster import Floats

MEMORY_SPREAD = hypot(LOG_SPREAD, MEMORY_ROW_SPREAD)
"""Standard deviation of the logarithm of memory."""
MEMORY_HIGH = exp(QUANTILE * MEMORY_SPREAD)
"""Factor on estimated memory that one of twenty steps needs more than: what has to fit."""
MORE_MEMORY = 1.25
"""Factor on the memory of a rank up to which candidates that do not fit are priced: they show what more would buy."""
OBJECTIVES = {"step_s": "time", "money": "money", "energy_j": "energy", "memory_bytes": "memory"}
"""Measures by which a candidate is judged, in the order of `Pool.objectives`, with a word for each."""
_IS_WORKING = np.array([name in WORKING for name in TERMS])


@dataclass(frozen=True)
class Needs:
    """A candidate with its step as numbers, and the memory that it needs.

    Args:
        candidate: The candidate.
        description: Step of it, as numbers.
        memory_bytes: Memory of its fullest rank.
        available_bytes: Memory that a rank may use.
        host_bytes: Memory of the host for what waits there, of all its ranks.
    """

    candidate: Candidate
    description: Description
    memory_bytes: float
    available_bytes: float
    host_bytes: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether it fits at the upper end of its memory's interval, and into its host what waits there."""
        return self.memory_bytes * MEMORY_HIGH <= self.available_bytes and self.fits_host

    @property
    def fits_host(self) -> bool:
        """Whether the host's memory holds what waits there."""
        return self.host_bytes * MEMORY_HIGH <= self.description.case.cluster.host.memory_bytes


def find_needs(problem: PlanProblem, candidate: Candidate) -> Needs:
    """Return what a candidate needs."""
    description = describe(problem.case(candidate))
    machines = problem.machines[candidate.machines]
    available = description.case.device.memory_bytes
    if machines.memory_bytes is not None:
        available = machines.memory_bytes
    estimate = estimate_memory(description)
    host_bytes = estimate.host_bytes * description.case.on_host
    return Needs(candidate, description, estimate.total_bytes, available, host_bytes)


@dataclass(frozen=True)
class Pool:
    """Candidates of a problem, priced.

    Args:
        problem: The problem.
        posterior: Beliefs about the parameters of steps.
        needs: Candidates with what they need.
        batch: Numbers of their steps.
        features: Sizes and choices by which steps are alike.
        terms: Seconds of each term of each step, times the steps that its way takes to the same loss.
    """

    problem: PlanProblem
    posterior: Posterior
    needs: tuple[Needs, ...]
    batch: StepBatch
    features: Features
    terms: Floats

    @property
    def step_s(self) -> Floats:
        """Seconds in which each comes as far as a step of exact ways does."""
        return np.asarray(self.terms.sum(axis=1))

    @cached_property
    def fits(self) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Whether each fits into the memory of its ranks."""
        return np.array([one.fits for one in self.needs], dtype=bool)

    def objectives(self) -> Floats:
        """Return time, money, energy and memory of a step of each, shape (candidates, 4); unknown money is 0."""
        return self._objectives

    @cached_property
    def _objectives(self) -> Floats:
        step_s = self.step_s
        busy = self.terms[:, _IS_WORKING].sum(axis=1) / step_s
        cases = [one.description.case for one in self.needs]
        pairs = zip(cases, step_s.tolist(), busy.tolist(), strict=True)
        energy = [estimate_energy_j(case, seconds, share) for case, seconds, share in pairs]
        hourly = [self.price_per_hour(one) for one in self.needs]
        memory = [one.memory_bytes for one in self.needs]
        return np.stack([step_s, step_s * np.array(hourly) / 3600, np.array(energy), np.array(memory)], axis=1)

    def price_per_hour(self, needs: Needs) -> float:
        """Return the price of the hosts of a candidate for an hour; 0 if prices are not known."""
        price = self.problem.machines[needs.candidate.machines].price_per_hour
        return needs.description.case.num_hosts * price if self.problem.has_prices and price is not None else 0.0

    def with_columns(self, changes: Mapping[str, float]) -> "Pool":
        """Return the same candidates on machines some of whose numbers are multiplied."""
        columns = {name: values * changes.get(name, 1.0) for name, values in self.batch.columns.items()}
        batch = replace(self.batch, columns=columns)
        terms = self.posterior.estimate(batch, self.features) * _count_steps(self.needs)
        return replace(self, batch=batch, terms=terms)

    def spreads(self, chosen: Sequence[int]) -> Floats:
        """Return the standard deviation of the logarithm of some of `step_s`."""
        part = self.take(chosen)
        of_steps = part.posterior.predict(part.batch, part.features).log_spreads.tolist()
        of_ways = (0.0 if one.candidate.way is None else one.candidate.way.log_spread for one in part.needs)
        return np.array(
            [
                hypot(widen_unknown(spread, needs.description.case, self.posterior), of_way)
                for spread, of_way, needs in zip(of_steps, of_ways, part.needs, strict=True)
            ]
        )

    def intervals(self, chosen: Sequence[int]) -> Floats:
        """Return the ends of the 90 % intervals of `objectives` of some, shape (chosen, 4, 2)."""
        spreads = [
            (spread, spread, widen_by_power(self.needs[one].description.case, spread), MEMORY_SPREAD)
            for one, spread in zip(chosen, self.spreads(chosen).tolist(), strict=True)
        ]
        width = np.exp(QUANTILE * np.array(spreads).reshape(-1, 4))
        values = self.objectives()[list(chosen)]
        return np.stack([values / width, values * width], axis=2)

    def ratio_spreads(self, chosen: Sequence[int]) -> Floats:
        """Return the standard deviation of the logarithm of the ratio of steps of some, each with each.

        What is uncertain of both alike cancels, so that a ratio is surer than either.
        """
        part = self.take(chosen)
        joint = part.posterior.covary(part.batch, part.features)
        own = np.diag(joint)
        ways = [one.candidate.way for one in part.needs]
        steps = np.array([0.0 if way is None else way.log_spread**2 for way in ways])
        differ = np.array([[one is not other for other in ways] for one in ways])
        # How many steps a way takes is the same of all its candidates.
        of_steps = (steps[:, None] + steps[None, :]) * differ
        return np.asarray(np.sqrt(np.maximum(own[:, None] + own[None, :] - 2 * joint, 0.0) + of_steps))

    def take(self, chosen: Sequence[int]) -> "Pool":
        """Return some of the candidates, priced the same."""
        return price_needs(self.problem, self.posterior, [self.needs[index] for index in chosen])


def price_needs(problem: PlanProblem, posterior: Posterior, needs: Sequence[Needs]) -> Pool:
    """Return candidates, priced."""
    descriptions = [one.description for one in needs]
    batch, features = make_batch(descriptions), Features(descriptions)
    terms = posterior.estimate(batch, features) * _count_steps(needs)
    return Pool(problem, posterior, tuple(needs), batch, features, terms)


def _count_steps(needs: Sequence[Needs]) -> Floats:
    """Return the steps that each takes to the same loss, to those of exact ways, shape (candidates, 1)."""
    return np.array([[one.candidate.steps_factor] for one in needs]).reshape(-1, 1)


def make_pool(
    problem: PlanProblem,
    posterior: Posterior,
    candidates: Sequence[Candidate],
) -> tuple[Pool, Needs | None]:
    """Return the candidates that fit, or would with a quarter more memory, priced; and the one that needs least."""
    needs = [find_needs(problem, candidate) for candidate in candidates]
    least = min(needs, key=lambda one: one.memory_bytes / one.available_bytes, default=None)
    near = [
        one for one in needs if one.memory_bytes * MEMORY_HIGH <= one.available_bytes * MORE_MEMORY and one.fits_host
    ]
    return price_needs(problem, posterior, near), least
