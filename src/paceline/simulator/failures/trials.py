"""Runs that fail, simulated many at a time: each step of the loop takes every trial to its next event.

A stretch between two events is worked through in cycles of `interval_s` of training and `save_s` of saving. What a
failure leaves is the last save that was complete, or, with a notice that is long enough for a save, all but the save.
Events may come while a run restarts, which then begins to restart again.
"""

from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from paceline.simulator.failures.processes import Arrivals, FailureProcess, Never
from paceline.topology.cluster import Floats, Integers

_GIVE_UP = 50.0
"""Multiple of the work after which a trial counts as one that never ends."""


@dataclass(frozen=True)
class TrialSettings:
    """A run that fails, as numbers.

    Args:
        work_s: Time of its steps, without failures and saves.
        num_hosts: Number of hosts.
        failures: Process of failures, which come without notice.
        preemptions: Process by which spot hosts are taken away.
        notice_s: Notice of a preemption.
        detection_s: Time until a failure is known.
        restart_s: Time from then on until steps go on.
        wait_s: Mean time until spot hosts are offered again after a preemption; exponential.
        interval_s: Training time between saves; infinite for none, 0 for all the time.
        save_s: Time for which a save stops training.
        write_s: Time after that until the save can be used.
        overhead: Additional time of every step, as a share.
        deadline_s: Time at which the run must have ended; on-demand hosts replace spot hosts when it would be missed
            otherwise.
    """

    work_s: float
    num_hosts: int
    failures: FailureProcess
    preemptions: FailureProcess = field(default_factory=Never)
    notice_s: float = 0.0
    detection_s: float = 0.0
    restart_s: float = 0.0
    wait_s: float = 0.0
    interval_s: float = inf
    save_s: float = 0.0
    write_s: float = 0.0
    overhead: float = 0.0
    deadline_s: float = inf

    @property
    def cycle_s(self) -> float:
        """Time from one save to the next."""
        return self.interval_s * (1 + self.overhead) + self.save_s

    @property
    def is_saving_always(self) -> bool:
        """Whether every moment is saved at no cost."""
        return self.cycle_s == 0

    @property
    def reserve_s(self) -> float:
        """Time before a deadline's latest start that one more preemption would take."""
        if self.is_noticed:
            return self.save_s + self.write_s + self.restart_s
        return (self.cycle_s if self.interval_s < inf else self.work_s) + self.restart_s

    @property
    def is_noticed(self) -> bool:
        """Whether the notice of a preemption is long enough for a save."""
        return self.notice_s >= self.save_s + self.write_s

    def time_for(self, work_s: Floats) -> Floats:
        """Return the time of some work without events; no save follows its end."""
        pure = work_s * (1 + self.overhead)
        if self.interval_s in (0.0, inf) or not self.save_s:
            return pure
        return np.asarray(pure + self.save_s * np.maximum(0.0, np.ceil(work_s / self.interval_s - 1e-9) - 1))

    def saved_after(self, time_s: Floats) -> Floats:
        """Return the work that is saved, and can be used, after some time without events."""
        if self.interval_s == inf:
            return np.zeros_like(time_s)
        if self.is_saving_always:
            return np.maximum(0.0, time_s - self.write_s) / (1 + self.overhead)
        return np.asarray(self.interval_s * np.floor(np.maximum(0.0, time_s - self.write_s) / self.cycle_s))

    def work_after(self, time_s: Floats) -> Floats:
        """Return the work that is done after some time without events, saved or not."""
        slow = 1 + self.overhead
        if self.interval_s == inf or self.is_saving_always:
            return time_s / slow
        cycles, rest = np.divmod(time_s, self.cycle_s)
        return np.asarray(self.interval_s * cycles + np.minimum(rest / slow, self.interval_s))


@dataclass(frozen=True)
class Trials:
    """Ends of trials: one number of each."""

    duration_s: Floats
    has_ended: NDArray[np.bool_]
    """False where failures come faster than work is saved."""
    num_failures: Integers
    num_preemptions: Integers
    down_s: Floats
    """Time of detection and restarts."""
    waiting_s: Floats
    """Time without spot hosts."""
    spot_s: Floats
    """Time for which spot hosts are paid."""
    on_demand_s: Floats
    """Time for which on-demand hosts are paid."""


def run_trials(settings: TrialSettings, num_trials: int, seed: int) -> Trials:
    """Return the ends of trials; with the same seed failures come alike whatever the interval."""
    return _Trials(settings, num_trials, seed).run()


class _Trials:
    def __init__(self, settings: TrialSettings, num_trials: int, seed: int) -> None:
        self.settings = settings
        failing, preempting, self.waiting = np.random.default_rng(seed).spawn(3)
        self.failures: Arrivals = settings.failures.start(failing, num_trials, settings.num_hosts)
        self.preemptions: Arrivals = settings.preemptions.start(preempting, num_trials, settings.num_hosts)
        self.left_s = np.full(num_trials, settings.work_s)
        self.ready_s, self.now_s = np.zeros(num_trials), np.zeros(num_trials)
        self.is_done = np.zeros(num_trials, dtype=bool)
        self.has_ended = np.zeros(num_trials, dtype=bool)
        self.on_demand = np.zeros(num_trials, dtype=bool)
        self.switched_s = np.full(num_trials, inf)
        if isinstance(settings.preemptions, Never):
            self.on_demand[:] = True
            self.switched_s[:] = 0.0
        self.counts = np.zeros((2, num_trials), dtype=np.int64)
        self.down_s, self.waiting_s = np.zeros(num_trials), np.zeros(num_trials)

    def run(self) -> Trials:
        self._fall_back(np.arange(len(self.left_s)), np.zeros(len(self.left_s)))
        while not self.is_done.all():
            active = np.flatnonzero(~self.is_done)
            spot_next = np.where(self.on_demand[active], inf, self.preemptions.next_s[active])
            event_s = np.minimum(self.failures.next_s[active], spot_next)
            needed_s = self.ready_s[active] + self.settings.time_for(self.left_s[active])
            ends = needed_s <= event_s
            self._end(active[ends], needed_s[ends])
            hit = ~ends
            is_preemption = spot_next[hit] <= self.failures.next_s[active[hit]]
            self._strike(active[hit], event_s[hit], is_preemption)
        on_demand_s = np.maximum(0.0, self.now_s - self.switched_s)
        return Trials(
            duration_s=self.now_s,
            has_ended=self.has_ended,
            num_failures=self.counts[0],
            num_preemptions=self.counts[1],
            down_s=self.down_s,
            waiting_s=self.waiting_s,
            spot_s=np.maximum(0.0, self.now_s - on_demand_s - self.waiting_s),
            on_demand_s=on_demand_s,
        )

    def _end(self, trials: Integers, at_s: Floats) -> None:
        self.now_s[trials] = at_s
        self.is_done[trials] = self.has_ended[trials] = True

    def _strike(self, trials: Integers, at_s: Floats, is_preemption: NDArray[np.bool_]) -> None:
        """Let events happen: work that was not saved is lost, and the run restarts."""
        settings = self.settings
        trained_s = np.maximum(0.0, at_s - self.ready_s[trials])
        kept_s = settings.saved_after(trained_s)
        last_save_s = settings.save_s + settings.write_s
        if settings.is_noticed:
            noticed = settings.work_after(np.maximum(0.0, trained_s - last_save_s))
            kept_s = np.where(is_preemption, np.maximum(kept_s, noticed), kept_s)
        self.left_s[trials] = np.maximum(0.0, self.left_s[trials] - kept_s)
        self.down_s[trials] -= np.maximum(0.0, self.ready_s[trials] - at_s)  # a restart that was cut short
        self.counts[0, trials] += ~is_preemption
        self.counts[1, trials] += is_preemption
        self.failures.advance(trials[~is_preemption])
        self.preemptions.advance(trials[is_preemption])
        down_s = np.where(is_preemption, 0.0, settings.detection_s) + settings.restart_s
        wait_s = np.zeros(len(trials))
        if settings.wait_s:
            wait_s = np.where(is_preemption, self.waiting.exponential(settings.wait_s, len(trials)), 0.0)
        self.ready_s[trials] = at_s + down_s
        wait_s = self._fall_back(trials, wait_s)
        self.ready_s[trials] += wait_s
        self.waiting_s[trials] += wait_s
        self.down_s[trials] += down_s
        for arrivals in (self.failures, self.preemptions):
            self._skip_missed(arrivals, trials[is_preemption], (at_s + wait_s)[is_preemption])
        gives_up = at_s > _GIVE_UP * (settings.work_s + settings.reserve_s)
        self.now_s[trials[gives_up]] = at_s[gives_up]
        self.is_done[trials[gives_up]] = True

    def _skip_missed(self, arrivals: Arrivals, trials: Integers, until_s: Floats) -> None:
        """Draw again for trials that had no hosts when the next event would have come."""
        missed = arrivals.next_s[trials] < until_s
        while missed.any():
            arrivals.advance(trials[missed])
            missed = arrivals.next_s[trials] < until_s

    def _fall_back(self, trials: Integers, wait_s: Floats) -> Floats:
        """Take on-demand hosts where waiting for spot hosts would miss the deadline; return the time that is waited."""
        settings = self.settings
        if settings.deadline_s == inf:
            return wait_s
        latest_s = settings.deadline_s - settings.time_for(self.left_s[trials]) - settings.reserve_s
        slack_s = latest_s - self.ready_s[trials]
        falls = ~self.on_demand[trials] & (slack_s <= wait_s)
        waited_s = np.where(falls, np.clip(slack_s, 0.0, wait_s), wait_s)
        chosen = trials[falls]
        self.on_demand[chosen] = True
        begun_s = np.maximum(0.0, self.ready_s[chosen] - settings.restart_s)
        self.switched_s[chosen] = begun_s + waited_s[falls]
        return waited_s
