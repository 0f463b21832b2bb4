"""What failures do to a long run: goodput, time and cost by mechanism, with the interval between checkpoints."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from paceline.errors import SettingsError, unknown_name
from paceline.registry import Settings
from paceline.simulator.failures.interval import find_optimal_interval_s, find_young_interval_s
from paceline.simulator.failures.mechanisms import MECHANISMS, Mechanism
from paceline.simulator.failures.processes import Exponential, FailureProcess, Never
from paceline.simulator.failures.trials import Trials, TrialSettings, run_trials
from paceline.topology import BytesPerSecond, parse_size
from paceline.topology.tables import Price, find_price, read_prices

_HOUR_S = 3600.0
_FACTORS = np.geomspace(0.25, 4.0, 17)
"""Intervals that are tried, to the one of the closed form."""
_SEARCH_TRIALS = 400
_AS_GOOD = 0.001
"""Excess of the closed form's mean time, as a share, below which it is taken: trials know it no better."""


class FailureStudy(Settings):
    """A run, the hosts that it loses, and what it does then."""

    num_steps: int = Field(default=100_000, ge=1)
    """Steps of the run."""
    step_s: float = Field(default=1.0, gt=0)
    """Time of a step."""
    num_hosts: int = Field(default=16, ge=1)
    """Hosts; the loss of one stops all."""
    failures: FailureProcess = Exponential()
    """Process of failures, which come without notice: never, exponential, weibull, or trace (a CSV file)."""
    preemptions: FailureProcess = Never()
    """Process by which spot hosts are taken away; never for hosts that are paid on demand."""
    notice_s: float = Field(default=120.0, ge=0)
    """Notice of a preemption."""
    wait_s: float = Field(default=600.0, ge=0)
    """Mean time until spot hosts are offered again, in which none are paid."""
    detection_s: float = Field(default=60.0, ge=0)
    """Time until a failure is known."""
    mechanisms: tuple[str, ...] = tuple(MECHANISMS)
    """Mechanisms to compare: disk, incremental, peer_memory, erasure, hot_replacement."""
    state: str | float = "100GB"
    """Size of the state that a host saves."""
    disk_speed: BytesPerSecond = BytesPerSecond.parse("2GB/s")
    """Speed of a host's saves to disks."""
    network_speed: BytesPerSecond = BytesPerSecond.parse("100gbit")
    """Speed of a host's saves into the memory of others."""
    save_s: float | None = Field(default=None, ge=0)
    """Time for which a save stops training, as measured; by default size by speed."""
    write_s: float = Field(default=0.0, ge=0)
    """Time after that until a save can be used, in which training goes on."""
    restart_s: float | None = Field(default=None, ge=0)
    """Time from the moment at which a failure is known until steps go on, as measured; by default the mechanism's."""
    interval_s: float | None = Field(default=None, ge=0)
    """Training time between saves; by default the best that is found."""
    deadline_hours: float | None = Field(default=None, gt=0)
    """Time by which the run must end: on-demand hosts take the place of spot hosts before it would be missed."""
    instance: str | None = None
    """Instance type with prices in the table."""
    region: str | None = None
    """Region of the price table; by default the first that has the instance type."""
    prices: str | None = None
    """CSV file of prices; by default the shipped examples."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """Price of an on-demand host for an hour, in place of the table's."""
    spot_per_hour: float | None = Field(default=None, ge=0)
    """Price of a spot host for an hour, in place of the table's."""
    currency: str = "usd"
    """Currency of these two; prices of the table have their own."""
    num_trials: int = Field(default=2000, ge=10, le=1_000_000)
    """Trials of the Monte Carlo simulation."""
    seed: int = Field(default=0, ge=0)
    """Random seed of the trials."""

    @field_validator("mechanisms")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in MECHANISMS:
                raise unknown_name("a mechanism", name, MECHANISMS)
        return names

    @model_validator(mode="after")
    def _check(self) -> Self:
        parse_size(self.state)
        self.find_prices()
        if self.deadline_hours is not None and self.deadline_hours * _HOUR_S < self.work_s:
            raise SettingsError(
                f"deadline_hours must be at least num_steps x step_s = {self.work_s / _HOUR_S:.4g} h, but got "
                f"{self.deadline_hours:.4g}; no host is fast enough"
            )
        return self

    @property
    def work_s(self) -> float:
        """Time of all steps."""
        return self.num_steps * self.step_s

    def find_price(self) -> Price | None:
        """Return the row of the price table that is used; None without an instance type, or where both are given."""
        if self.instance is None or None not in (self.price_per_hour, self.spot_per_hour):
            return None
        return find_price(read_prices(self.prices), self.instance, self.region)

    def find_prices(self) -> tuple[float | None, float | None, str]:
        """Return the prices of an on-demand and of a spot host for an hour, and their currency.

        Raises:
            SettingsError: One of the two is given in another currency than the other's in the table.
        """
        row, on_demand, spot = self.find_price(), self.price_per_hour, self.spot_per_hour
        if row is None:
            return on_demand, spot, self.currency
        if (on_demand, spot) != (None, None) and row.currency != self.currency:
            raise SettingsError(
                f"currency must be that of the table, {row.currency}, where it has one of the two prices, but got "
                f"{self.currency}; change it, or give price_per_hour and spot_per_hour"
            )
        on_demand = row.on_demand_per_hour if on_demand is None else on_demand
        return on_demand, row.spot_per_hour if spot is None else spot, row.currency

    def answer_all(self) -> "list[Answer]":
        """Return the answers for all mechanisms, the shortest mean time first."""
        return sorted(map(self.answer, self.mechanisms), key=lambda answer: answer.mean_s)

    def answer(self, name: str) -> "Answer":
        """Return the answer for one mechanism."""
        base, mechanism = self._make_settings(name), MECHANISMS[name]
        gap_s = self._find_gap_s(base)
        closed = {  # the next save waits for the one before
            "young": max(base.write_s, find_young_interval_s(base.save_s, gap_s)),
            "daly": max(base.write_s, find_optimal_interval_s(base.save_s, gap_s)),
        }
        costs = dict(self._try_intervals(base, closed, mechanism))
        simulated_s = min(costs, key=lambda interval_s: (costs[interval_s], -interval_s))
        chosen_s = closed["daly"] if _find_excess(costs, closed["daly"]) <= _AS_GOOD else simulated_s
        if self.interval_s is not None and not mechanism.keeps_steps:
            chosen_s = self.interval_s
        chosen = replace(base, interval_s=chosen_s)
        trials = run_trials(chosen, self.num_trials, self.seed)
        return self._summarise(name, chosen, trials, closed, simulated_s, costs)

    def _make_settings(self, name: str) -> TrialSettings:
        mechanism = MECHANISMS[name]
        return TrialSettings(
            work_s=self.work_s,
            num_hosts=self.num_hosts,
            failures=self.failures,
            preemptions=self.preemptions,
            notice_s=self.notice_s,
            detection_s=self.detection_s,
            restart_s=mechanism.restart_s if self.restart_s is None else self.restart_s,
            wait_s=self.wait_s,
            save_s=self._find_save_s(mechanism),
            write_s=0.0 if mechanism.keeps_steps else self.write_s,
            overhead=mechanism.overhead,
            deadline_s=inf if self.deadline_hours is None else self.deadline_hours * _HOUR_S,
        )

    def _find_save_s(self, mechanism: Mechanism) -> float:
        if mechanism.over == "nothing":
            return 0.0
        if self.save_s is not None:
            return self.save_s * mechanism.size_share
        speed = self.disk_speed if mechanism.over == "disk" else self.network_speed
        return parse_size(self.state) * mechanism.size_share / speed

    def _find_gap_s(self, base: TrialSettings) -> float:
        """Return the mean time between two events that lose work: preemptions with enough notice lose none."""
        rate = 1 / self.failures.mean_gap_s(self.num_hosts)
        if not base.is_noticed:
            rate += 1 / self.preemptions.mean_gap_s(self.num_hosts)
        return 1 / rate if rate else inf

    def _try_intervals(
        self, base: TrialSettings, closed: Mapping[str, float], mechanism: Mechanism
    ) -> Iterator[tuple[float, float]]:
        """Yield intervals and their mean times, over the same failures."""
        centre_s = closed["daly"]
        if mechanism.keeps_steps or centre_s in (0.0, inf):
            intervals = {0.0 if mechanism.keeps_steps else centre_s}
        else:
            intervals = {max(base.write_s, each) for each in (*(centre_s * _FACTORS), *closed.values())}
        for interval_s in sorted({*intervals, *([] if self.interval_s is None else [self.interval_s])}):
            trials = run_trials(replace(base, interval_s=interval_s), _SEARCH_TRIALS, self.seed)
            yield interval_s, float(trials.duration_s.mean())

    def _summarise(
        self,
        name: str,
        chosen: TrialSettings,
        trials: Trials,
        closed: Mapping[str, float],
        simulated_s: float,
        costs: Mapping[float, float],
    ) -> "Answer":
        on_demand, spot, currency = self.find_prices()
        money: np.ndarray[Any, np.dtype[np.float64]] | None = None
        if on_demand is not None and (spot is not None or not trials.spot_s.any()):
            paid = (spot or 0.0) * trials.spot_s + on_demand * trials.on_demand_s
            money = np.asarray(self.num_hosts * paid / _HOUR_S)
        late = trials.duration_s > chosen.deadline_s
        mean_s = float(trials.duration_s.mean())
        return Answer(
            mechanism=name,
            about=MECHANISMS[name].about,
            restart_s=chosen.restart_s,
            save_s=chosen.save_s,
            interval_s=chosen.interval_s,
            interval_young_s=closed["young"],
            interval_daly_s=closed["daly"],
            interval_simulated_s=simulated_s,
            daly_excess=_find_excess(costs, closed["daly"]),
            young_excess=_find_excess(costs, closed["young"]),
            goodput=self.work_s / mean_s,
            mean_s=mean_s,
            quantiles_s={f"p{share}": float(np.percentile(trials.duration_s, share)) for share in (5, 50, 95, 99)},
            ended_share=float(trials.has_ended.mean()),
            num_failures=float(trials.num_failures.mean()),
            num_preemptions=float(trials.num_preemptions.mean()),
            down_share=float(trials.down_s.mean()) / mean_s,
            waiting_share=float(trials.waiting_s.mean()) / mean_s,
            on_demand_share=float(trials.on_demand_s.mean()) / mean_s,
            late_share=float(late.mean()),
            money=None if money is None else float(money.mean()),
            money_p95=None if money is None else float(np.percentile(money, 95)),
            currency=currency,
            overrides=self._list_overrides(name, chosen.interval_s),
        )

    def _list_overrides(self, name: str, interval_s: float) -> dict[str, Any]:
        """Return the settings of a run that does so."""
        steps = 0 if interval_s == inf else max(1, ceil(interval_s / self.step_s))
        return {
            "disk": {"checkpoint_interval": steps},
            "incremental": {"checkpoint_interval": steps, "incremental_checkpoints": 9},
            "peer_memory": {"peer_memory.interval": steps},
            "erasure": {"peer_memory.interval": steps, "peer_memory.num_data": 2},
            "hot_replacement": {},
        }[name]


def _find_excess(costs: Mapping[float, float], interval_s: float) -> float:
    """Return how much longer runs take with an interval than with the best, as a share; 0 where nothing was tried."""
    return costs[interval_s] / min(costs.values()) - 1 if interval_s in costs else 0.0


@dataclass(frozen=True)
class Answer:
    """What failures do to the run with one mechanism. Means are over trials."""

    mechanism: str
    about: str
    """Origin of the mechanism's numbers."""
    restart_s: float
    save_s: float
    """Time for which a save stops training."""
    interval_s: float
    """Training time between saves, of the answer."""
    interval_young_s: float
    interval_daly_s: float
    interval_simulated_s: float
    """Interval of the shortest mean time among those that were tried."""
    daly_excess: float
    """Mean time with Daly's interval, beyond the shortest, as a share."""
    young_excess: float
    goodput: float
    """Time of all steps, to the mean time that they took."""
    mean_s: float
    quantiles_s: dict[str, float]
    ended_share: float
    """Share of trials that ended at all."""
    num_failures: float
    num_preemptions: float
    down_share: float
    """Share of the time in which failures were noticed and the run restarted."""
    waiting_share: float
    """Share without hosts."""
    on_demand_share: float
    """Share on on-demand hosts."""
    late_share: float
    """Share of trials that missed the deadline."""
    money: float | None
    """Mean cost of all hosts; None without a price."""
    money_p95: float | None
    currency: str
    overrides: dict[str, Any]
    """Settings of a run that does so."""
