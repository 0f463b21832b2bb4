"""The choice among candidates that were run for a while: by measurement, unless the difference is within noise."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import hypot, log
from statistics import mean, median

import numpy as np

from paceline.errors import SettingsError
from paceline.planner.candidate import Candidate
from paceline.planner.choice import Choice
from paceline.planner.explain import list_neighbours, list_what_ifs
from paceline.planner.planning import MeasuredSteps, Planned, Trial, answer_candidate
from paceline.simulator.training.answers import QUANTILE
from paceline.simulator.training.profile import Profile
from paceline.topology.cluster import Floats

ROUNDS = 2
"""Times that each candidate is run; in every other round in the opposite order, so that drift meets all alike."""
SKIPPED = 3
"""First steps of a run, which take longer."""
Measure = Callable[[Planned], list[float]]
"""Function that trains by a plan for a few seconds and returns the times of its steps."""


def measure_best(
    planned: Planned, number: int, trial: Trial, measure: Measure, profile: Profile | None = None
) -> Planned:
    """Return a plan whose choice is that of the best `number` candidates which takes least time by measurement.

    The choice and its nearest rivals by the objective run in turns. What fails is left out. A rival is taken if it was
    faster in every round than the choice in any, and an inexact one if it was so by more than is known of its steps.

    Args:
        planned: The plan.
        number: Number of candidates.
        trial: Judgement of training on a candidate; those that it refuses are not run.
        measure: Function that runs one.
        profile: Profile of the model on this machine.

    Raises:
        SettingsError: All of them fail.
    """
    rivals = [_choose(planned, index, profile) for index in _list_best(planned.choice, number, trial)]
    rounds: list[list[float]] = [[] for _ in rivals]
    errors = [""] * len(rivals)
    for turn in range(ROUNDS):
        order = range(len(rivals)) if turn % 2 == 0 else reversed(range(len(rivals)))
        for place in order:
            if errors[place]:
                continue
            try:
                rounds[place].append(summarise(measure(rivals[place]), rivals[place].candidate))
            except SettingsError as error:
                errors[place] = " ".join(str(error).split())
    found = [
        MeasuredSteps(one.candidate.describe(), one.candidate.steps_factor, one.answer["step_s"], tuple(times), error)
        for one, times, error in zip(rivals, rounds, errors, strict=True)
    ]
    known = [place for place in range(len(rivals)) if not errors[place]]
    if not known:
        raise SettingsError(f"one of the best plans must run to be measured, but none does: {errors[0]}")
    rates = _find_rates(planned.choice)
    place = find_fastest(
        [rivals[one].candidate for one in known],
        [[time * rates[rivals[one].choice.index] for time in rounds[one]] for one in known],
    )
    chosen = known[place]
    found[chosen] = replace(found[chosen], is_chosen=True)
    best = rivals[chosen]
    if best.choice.index != planned.choice.index:
        what_ifs, neighbours = tuple(list_what_ifs(best.choice)), tuple(list_neighbours(best.choice))
        best = replace(best, what_ifs=what_ifs, neighbours=neighbours)
    return replace(best, measured=tuple(found))


def summarise(steps_s: Sequence[float], candidate: Candidate) -> float:
    """Return the time of a step from those of the first ones of a run: their median, or over whole periods their mean.

    Raises:
        SettingsError: There are too few.
    """
    period = 1 if candidate.way is None else candidate.way.period
    kept = steps_s[SKIPPED:] if period == 1 else steps_s[period:]
    kept = kept[: len(kept) // period * period]
    if not kept:
        raise SettingsError(f"a run must have more steps to be measured, but had {len(steps_s)}; let it take longer")
    return median(kept) if period == 1 else mean(kept)


def find_fastest(candidates: Sequence[Candidate], rounds: Sequence[Sequence[float]]) -> int:
    """Return the index of the candidate to take: the first, unless another was faster by more than noise.

    Args:
        candidates: Candidates, of which the first is the choice by estimate.
        rounds: Time of a step of each, in each round, or its money or energy.
    """
    progress = [
        [time * candidate.steps_factor for time in times] for candidate, times in zip(candidates, rounds, strict=True)
    ]
    surely = [
        place
        for place, times in enumerate(progress)
        if max(times) < min(progress[0])
        and log(mean(progress[0]) / mean(times)) > QUANTILE * _spread(candidates[0], candidates[place])
    ]
    return min(surely, key=lambda place: mean(progress[place]), default=0)


def _find_rates(choice: Choice) -> Floats:
    """Return the objective of each candidate for a second of its steps."""
    column = ("step_s", "money", "energy_j").index(choice.by)
    rates = choice.objectives[:, column] / choice.objectives[:, 0]
    return np.where(rates > 0, rates, 1.0)  # what costs nothing is chosen by time


def _spread(one: Candidate, other: Candidate) -> float:
    """Return the standard deviation of the logarithm of the ratio of the steps that two need to the same loss."""
    if one.way is other.way:
        return 0.0
    return hypot(*(way.log_spread for way in (one.way, other.way) if way is not None))


def _list_best(choice: Choice, number: int, trial: Trial) -> list[int]:
    """Return the choice, and the next best by its objective that fit, keep the limits and are not refused."""
    column = ("step_s", "money", "energy_j").index(choice.by)
    found = [choice.index]
    for index in sorted(choice.kept, key=lambda one: float(choice.objectives[one, column])):
        if len(found) == number:
            break
        if index not in found and not trial(choice.pool.needs[index].candidate):
            found.append(index)
    return found


def _choose(planned: Planned, index: int, profile: Profile | None) -> Planned:
    """Return the plan with another choice."""
    choice = replace(planned.choice, index=index)
    return replace(planned, choice=choice, answer=answer_candidate(choice, profile))
