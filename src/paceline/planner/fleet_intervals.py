"""Intervals of a fleet's timetables, from joint draws of the times of all its runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.planner.fleet import Option, Timetable
from paceline.planner.pool import Needs
from paceline.simulator.training.answers import widen_unknown
from paceline.simulator.training.batch import make_batch
from paceline.simulator.training.energy import widen_by_power
from paceline.simulator.training.fit import Posterior
from paceline.simulator.training.likeness import Features
from paceline.topology.cluster import Floats

_NUM_DRAWS = 4000
_QUANTILES = (0.05, 0.95)
SURE = 0.001
"""Relative difference of two times below which they are one and the same."""

Amount = tuple[float, float, float]
"""An estimate and the ends of its 90 % interval."""


@dataclass(frozen=True)
class RunTimes:
    """When a run of a timetable begins and ends, and what it takes, each with its 90 % interval."""

    begin_s: Amount
    end_s: Amount
    time_s: Amount


@dataclass(frozen=True)
class Priced:
    """A timetable with intervals.

    Args:
        timetable: The timetable.
        end_s: Time at which the last run ends.
        money: Price of all.
        energy_j: Energy of all.
        runs: Times of each entry.
        ratio: Ratio of its end to that of the best timetable: what is uncertain of both alike cancels.
    """

    timetable: Timetable
    end_s: Amount
    money: Amount
    energy_j: Amount
    runs: tuple[RunTimes, ...]
    ratio: Amount

    @property
    def is_tie(self) -> bool:
        """Whether it ends no later, or earlier, than the best by more than is known."""
        return self.ratio[1] <= 1 + SURE and self.ratio[2] >= 1 - SURE


class TimeDraws:
    """TimeDraws of the times of all runs on all numbers of ranks, together: they share most of their uncertainty.

    Args:
        options: Options of each run.
        needs_of: Plan of each option.
        posterior: Beliefs about the parameters of steps.
    """

    def __init__(
        self, options: Sequence[Sequence[Option]], needs_of: Sequence[Sequence[Needs]], posterior: Posterior
    ) -> None:
        self._options = options
        pairs = [(run, number) for run, of_run in enumerate(options) for number in range(len(of_run))]
        self._index = {pair: index for index, pair in enumerate(pairs)}
        needs = [one for of_run in needs_of for one in of_run]
        descriptions = [one.description for one in needs]
        covariance = posterior.covary(make_batch(descriptions), Features(descriptions))
        case = descriptions[0].case
        covariance = covariance + widen_unknown(0.0, case, posterior) ** 2  # of all alike: the hardware is the same
        ways = [one.candidate.way for one in needs]
        alike = np.array([[a is b and a is not None for b in ways] for a in ways])
        spreads = np.array([0.0 if way is None else way.log_spread for way in ways])
        covariance = covariance + alike * np.outer(spreads, spreads)
        normal = np.random.default_rng(0).standard_normal((len(needs) + 1, _NUM_DRAWS))
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        self._factors = np.exp(root @ normal[:-1])
        self._power = np.exp(widen_by_power(case, 0.0) * normal[-1])

    def price(self, timetable: Timetable, best: Timetable) -> Priced:
        """Return a timetable with intervals, and beside the best."""
        factors, times = self._times(timetable)
        ends = timetable.retime(times)
        best_times = self._times(best)[1]
        chosen = [self._options[entry.run][entry.option] for entry in timetable.entries]
        money = (np.array([[one.money] for one in chosen]) * factors).sum(axis=0)
        energy = (np.array([[one.energy_j] for one in chosen]) * factors).sum(axis=0) * self._power
        ratio = ends.max(axis=0) / best.retime(best_times).max(axis=0)
        entries = timetable.entries
        return Priced(
            timetable,
            _interval(timetable.end_s, ends.max(axis=0)),
            _interval(timetable.money, money),
            _interval(timetable.energy_j, energy),
            tuple(
                RunTimes(
                    _interval(entry.begin_s, end - time_s),
                    _interval(entry.end_s, end),
                    _interval(entry.end_s - entry.begin_s, time_s),
                )
                for entry, end, time_s in zip(entries, ends, times, strict=True)
            ),
            _interval(timetable.end_s / best.end_s, ratio),
        )

    def intervals(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Return the 90 % interval of the time of each option of each run."""
        return tuple(
            tuple(
                _interval(option.time_s, option.time_s * self._factors[self._index[run, number]])[1:]
                for number, option in enumerate(of_run)
            )
            for run, of_run in enumerate(self._options)
        )

    def _times(self, timetable: Timetable) -> tuple[Floats, Floats]:
        """Return factors on the estimates of each entry, and its times, shape (entries, draws)."""
        factors = self._factors[[self._index[pair] for pair in timetable.order]]
        estimates = np.array([[self._options[run][option].time_s] for run, option in timetable.order])
        return factors, estimates * factors


def _interval(estimate: float, draws: Floats) -> Amount:
    low, high = np.quantile(draws, _QUANTILES).tolist()
    return estimate, min(low, estimate), max(high, estimate)
