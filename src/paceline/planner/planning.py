"""A plan made: candidates, memory, prices, choice, what training says of it, and reasons; as a document and words."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from paceline.errors import SettingsError
from paceline.monitor.formatting import duration, interval, number
from paceline.planner.candidate import Candidate
from paceline.planner.choice import Choice, choose
from paceline.planner.explain import (
    NO_CHANGE,
    Neighbour,
    WhatIf,
    describe_change,
    describe_term,
    list_neighbours,
    list_what_ifs,
)
from paceline.planner.plan_file import Plan, PlannedMachines
from paceline.planner.pool import Needs, Pool, make_pool
from paceline.planner.problem import PlanProblem
from paceline.planner.space import Space, make_space
from paceline.simulator.training.answers import answer_described
from paceline.simulator.training.fit import Posterior
from paceline.simulator.training.profile import Profile
from paceline.simulator.training.profiled import apply_profile
from paceline.training.forecast import Forecast

Trial = Callable[[Candidate], str]
"""Function that returns why training refuses a candidate, as only the model itself shows; empty if it does not."""
_MOST_TRIALS = 200


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps of a candidate that was run, beside what was predicted of them.

    Args:
        words: The candidate.
        steps_factor: Steps to the same loss, to those of exact ways.
        predicted_s: Time of a step that was predicted.
        rounds_s: Time of a step in each round.
        error: Reason why it could not be run; empty if it could.
        is_chosen: Whether the plan takes it.
    """

    words: str
    steps_factor: float
    predicted_s: float
    rounds_s: tuple[float, ...]
    error: str
    is_chosen: bool = False

    def describe(self) -> str:
        """Return it in words."""
        if self.error:
            return f"{self.words}: not measured: {self.error}"
        times = " and ".join(f"{time:.4g}" for time in self.rounds_s)
        steps = f" x {self.steps_factor:.3g} steps" if self.steps_factor != 1 else ""
        chosen = "; chosen" if self.is_chosen else ""
        return f"{self.words}: {times} s{steps}, predicted {self.predicted_s:.4g} s{chosen}"


@dataclass(frozen=True)
class Planned:
    """A plan with its reasons.

    Args:
        problem: The problem.
        space: Candidates of it.
        choice: The choice, and the front.
        answer: Answer to the chosen step, as in the contract.
        what_ifs: Gains by changes of the machines.
        neighbours: Candidates that differ from it in one thing.
        num_pruned: Candidates that do not fit by far.
        took_s: Seconds that planning took.
        measured: Candidates that were run, the choice by estimate first.
    """

    problem: PlanProblem
    space: Space
    choice: Choice
    answer: dict[str, Any]
    what_ifs: tuple[WhatIf, ...]
    neighbours: tuple[Neighbour, ...]
    num_pruned: int
    took_s: float
    measured: tuple[MeasuredSteps, ...] = ()

    @property
    def better(self) -> str:
        """What is better by estimate than a plainer choice, in words; empty if it was chosen by measurement."""
        return "" if self.measured else self.choice.describe_better()

    @property
    def num_steps(self) -> int | None:
        """Steps of the run with which the plan comes to the same loss; None: not known."""
        steps = self.problem.num_steps
        return None if steps is None else ceil(steps * self.candidate.steps_factor)

    @property
    def candidate(self) -> Candidate:
        """The chosen candidate."""
        return self.choice.needs.candidate


def make_plan(
    problem: PlanProblem, posterior: Posterior, trial: Trial = lambda _: "", profile: Profile | None = None
) -> Planned:
    """Plan a problem.

    Args:
        problem: The problem.
        posterior: Beliefs about the parameters of steps.
        trial: Judgement of training itself on a candidate; those that it refuses are not chosen, nor shown.
        profile: Profile of the model on these machines, whose times the choice has where it tells them.

    Raises:
        SettingsError: Nothing fits, or keeps the limits; the message names the nearest.
    """
    began_s = time.perf_counter()
    space = make_space(problem)
    pool, least = make_pool(problem, posterior, space.candidates)
    refused: dict[Candidate, str] = {}
    tried: set[Candidate] = set()
    while True:
        choice = choose(pool, least, refused)
        shown = [pool.needs[one].candidate for one in dict.fromkeys([choice.index, choice.best, *choice.shown])]
        new = [candidate for candidate in shown if candidate not in tried]
        if not new:
            break
        for candidate in new:
            tried.add(candidate)
            if reason := trial(candidate):
                refused |= refuse_alike(pool, candidate, reason)
                break  # others may not be shown any more
        if len(tried) > _MOST_TRIALS:
            first = next(iter(refused.values()), "")
            raise SettingsError(f"training must take one of the best plans, but refuses {len(tried)} of them: {first}")
    answer = answer_candidate(choice, profile)
    return Planned(
        problem,
        space,
        choice,
        answer,
        tuple(list_what_ifs(choice)),
        tuple(list_neighbours(choice)),
        len(space.candidates) - len(pool.needs),
        time.perf_counter() - began_s,
    )


def answer_candidate(choice: Choice, profile: Profile | None) -> dict[str, Any]:
    """Return the answer to the chosen step, as in the contract, with the times of a profile where it tells them."""
    answer = answer_described([choice.needs.description], choice.pool.posterior)[0]
    return answer if profile is None else apply_profile(answer, choice.needs.description.case, profile)


def refuse_alike(pool: Pool, candidate: Candidate, reason: str) -> dict[Candidate, str]:
    """Return a refused candidate, and all others that divide the model alike, and offload alike if it offloads."""
    key = _divide_model(candidate)
    alike = [one.candidate for one in pool.needs if _divide_model(one.candidate) == key]
    also = [one for one in alike if candidate.offload in ("none", one.offload)]
    return dict.fromkeys([candidate, *also], reason)


def _divide_model(candidate: Candidate) -> tuple[object, ...]:
    """Return what is the same of candidates whose ranks hold the same parts of the model, and recompute them alike."""
    division = candidate.division
    parts = (
        division.tensor,
        division.context,
        division.pipeline,
        division.order,
        division.stages_per_rank,
        candidate.recompute,
    )
    return parts if division.ranks_of_worker > 1 else (division.sharded, division.zero_stage, candidate.way)


def to_document(planned: Planned) -> dict[str, Any]:
    """Return all of a plan as JSON."""
    choice = planned.choice
    chosen, *front = _describe(planned, [choice.index, *choice.front])
    return {
        "version": 1,
        "choice": {
            **chosen,
            "row": _write_row(planned),
            "answer": planned.answer,
        },
        "by": choice.by,
        "front": front,
        **_give_reasons(planned),
        "searched": {
            "candidates": len(planned.space.candidates),
            "refused": planned.space.num_refused + len(choice.refused),
            "pruned_by_memory": planned.num_pruned,
            "left_out": planned.space.left_out or None,
            "took_s": planned.took_s,
        },
    }


def _write_row(planned: Planned) -> dict[str, Any] | None:
    if not planned.problem.has_row(planned.candidate):
        return None
    return planned.problem.row_of(planned.candidate).model_dump(mode="json", exclude_none=True)


def _give_reasons(planned: Planned) -> dict[str, Any]:
    """Return why the choice is the choice, as JSON."""
    choice = planned.choice
    return {
        "better": planned.better or None,
        "measured": [asdict(one) for one in planned.measured],
        "ties": [choice.pool.needs[one].candidate.describe() for one in choice.ties],
        "what_if": [
            {
                "change": one.change,
                "same_plan": None if one.same_ratio is None else one.same_ratio - 1,
                "best_plan": one.best_ratio - 1,
                "best": one.best.describe(),
            }
            for one in planned.what_ifs
        ],
        "neighbours": [
            {
                "plan": one.candidate.describe(),
                "change": one.change,
                "verdict": one.verdict,
                "reason": one.reason,
                "slower": None if one.ratio is None else one.ratio - 1,
                "term": one.term or None,
            }
            for one in planned.neighbours
        ],
    }


def _describe(planned: Planned, chosen: Sequence[int]) -> list[dict[str, Any]]:
    pool = planned.choice.pool
    ends = pool.intervals(chosen).tolist()
    return [
        _describe_one(planned, pool.needs[index], planned.choice.objectives[index].tolist(), of_one)
        for index, of_one in zip(chosen, ends, strict=True)
    ]


def _describe_one(
    planned: Planned, needs: Needs, objectives: list[float], ends: list[tuple[float, float]]
) -> dict[str, Any]:
    problem, way, steps_factor = planned.problem, needs.candidate.way, needs.candidate.steps_factor
    *of_progress, memory = ((value, *of_value) for value, of_value in zip(objectives, ends, strict=True))
    step_s, money, energy_j = ([value / steps_factor for value in values] for values in of_progress)
    carbon_kg = [problem.site.carbon_kg(value) for value in energy_j]
    machines = problem.machines[needs.candidate.machines]
    return {
        "plan": needs.candidate.describe(),
        "cluster": machines.name,
        "num_ranks": needs.candidate.division.num_ranks,
        "num_hosts": needs.description.case.num_hosts,
        "overrides": needs.candidate.list_overrides(),
        "steps_factor": steps_factor,
        "steps_basis": None if way is None else way.describe_factor(),
        **_name("step_s", step_s),
        **_name("money", money if problem.has_prices else [None] * 3),
        **_name("energy_j", [value or None for value in energy_j]),
        **_name("carbon_kg", [value or None for value in carbon_kg]),
        **_name("memory_bytes", memory),
    }


def _name(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """Return a number and the ends of its interval, by name."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


def to_plan(planned: Planned, recipe: str | None, digest: str) -> Plan:
    """Return what `paceline train --plan` takes."""
    candidate, answer = planned.candidate, planned.answer
    machines = planned.problem.machines[candidate.machines]
    num_ranks, num_hosts = candidate.division.num_ranks, planned.choice.needs.description.case.num_hosts
    words = f"{num_ranks} rank{'s' * (num_ranks > 1)} of {machines.name}"
    return Plan(
        recipe=recipe,
        fingerprint=digest,
        overrides=candidate.list_overrides() | _list_steps(planned),
        num_workers=candidate.division.num_workers,
        machines=PlannedMachines(name=machines.name, num_ranks=num_ranks, num_hosts=num_hosts, words=words),
        predicted=Forecast(**{name: answer[name] for name in Forecast.model_fields}),
        words=candidate.describe(),
        why=_give_reasons(planned),
    )


def _list_steps(planned: Planned) -> dict[str, Any]:
    """Return the settings with which a way that learns less in a step takes more of them."""
    if planned.candidate.steps_factor == 1 or planned.num_steps is None:
        return {}
    return {"num_steps": planned.num_steps, "num_epochs": None}


def describe_choice(planned: Planned) -> list[str]:
    """Return the choice in words, one line each."""
    answer, terms = planned.answer, planned.answer["terms"]
    step_s, available = answer["step_s"], planned.choice.needs.available_bytes
    memory_bytes, machines = answer["memory_bytes"], planned.problem.machines[planned.candidate.machines]
    bound = answer["bound"]
    ordered = sorted(terms.items(), key=lambda pair: -pair[1])
    lines = [
        f"plan: {planned.candidate.describe()} on {machines.name}",
        f"step: {step_s:.4g} s ({answer['step_s_low']:.4g} to {answer['step_s_high']:.4g}), "
        f"{planned.problem.global_batch / step_s:.4g} samples/s; {_energy(answer)}",
        f"memory of a rank: {memory_bytes / 1e9:.3g} GB (up to {answer['memory_bytes_high'] / 1e9:.3g}) of "
        f"{available / 1e9:.3g} GB",
        f"bound by {describe_term(bound)}, {terms[bound] / step_s:.0%} of the step; then "
        + ", ".join(f"{describe_term(name)} {seconds / step_s:.0%}" for name, seconds in ordered[1:4]),
    ]
    if planned.problem.num_steps is not None:
        lines.append(_describe_run(planned, planned.num_steps or 1))
        if answer["energy_j"]:
            lines.append(f"carbon: {planned.problem.site.describe_carbon()}")
    if machines.price_words:
        lines.append(f"price: {machines.price_words}")
    if (way := planned.candidate.way) is not None:
        lines.append(f"steps: {way.describe_factor()}")
    if machines.cap_w is not None:
        lines.append(
            f"power: each device limited to {machines.cap_w:g} W, which training does not set: on each host of NVIDIA "
            f"GPUs, nvidia-smi --power-limit={machines.cap_w:g}"
        )
    if planned.better:
        lines.append(planned.better)
    lines += [f"measured: {one.describe()}" for one in planned.measured]
    if planned.choice.ties:
        lines.append(
            f"ties with {len(planned.choice.ties)} of the nearest candidates: the difference is less than is known"
        )
    return lines


def _describe_run(planned: Planned, num_steps: int) -> str:
    problem = planned.problem
    time_s, energy_j = (_times(planned.answer, name, num_steps) for name in ("step_s", "energy_j"))
    money = [value * planned.choice.pool.price_per_hour(planned.choice.needs) / 3600 for value in time_s]
    words = f"run of {num_steps:,} steps: {duration(time_s[0])} ({' to '.join(map(duration, time_s[1:]))})"
    if energy_j[0]:
        words += f"; {interval(*(value / 3.6e6 for value in energy_j))} kWh"
        words += f"; {interval(*map(problem.site.carbon_kg, energy_j))} kgCO2e"
    if problem.has_prices:
        words += f"; {interval(*money)} in {problem.currency}"
    limits = problem.limits
    for high, limit, allowed in (
        (time_s[2], limits.within_s, duration),
        (money[2], limits.budget, lambda value: f"{number(value)} in {problem.currency}"),
        (energy_j[2], limits.energy_j, lambda value: f"{number(value / 3.6e6)} kWh"),
    ):
        if limit is not None and high > limit:
            words += f"; the upper end of its interval is beyond the {allowed(limit)} that are allowed"
    return words


def _times(answer: dict[str, Any], name: str, factor: float) -> list[float]:
    """Return a number of an answer and the ends of its interval, multiplied."""
    return [answer[end] * factor for end in (name, f"{name}_low", f"{name}_high")]


def _energy(answer: dict[str, Any]) -> str:
    if not answer["energy_j"]:
        return "energy unknown, as the power of the machines is"
    return f"{interval(*_times(answer, 'energy_j', 1e-3))} kJ of all hosts"


def describe_what_if(one: WhatIf, chosen: Candidate) -> str:
    """Return a change of the machines in words."""
    parts = []
    if one.same_ratio is not None and (same := describe_change(one.same_ratio)) != NO_CHANGE:
        parts.append(f"{same} with this plan")
    if one.best != chosen and (best := describe_change(one.best_ratio)) != NO_CHANGE:
        parts.append(f"{best} from the best now to the best then ({one.best.describe()})")
    return f"{one.change}: {'; '.join(parts) or NO_CHANGE}"
