"""Steps from one checkpoint to the next: fixed, or chosen from what checkpoints cost and how often workers fail."""

import time
from pathlib import Path
from typing import Literal

from paceline.monitor.events import CheckpointIntervalChosen, Restarted
from paceline.monitor.reader import read_log, select
from paceline.simulator.failures.interval import find_optimal_interval_s

_FIRST_STEPS = 10
"""Steps before the first checkpoint, which is the first measurement."""
_DAY_S = 86400.0
_NOTICEABLE = 0.1
"""Relative change of the interval that is logged."""


def estimate_failures_per_day(log: Path) -> float:
    """Return the rate of failures that the log of a run shows: restarts, and one as a first guess, by its days and one.

    Without a log, and in a run that has just begun, it is 1.
    """
    records = list(read_log(log)) if log.exists() else []
    elapsed_s = records[-1].unix_s - records[0].unix_s if records else 0.0
    return (1 + len(select(records, Restarted))) / (1 + max(0.0, elapsed_s) / _DAY_S)


class SaveInterval:
    """The steps after which a training saves; all workers have the same.

    Args:
        setting: Steps between checkpoints; 0 for none; ``auto`` to choose them.
        failures_per_day: Rate of failures.
    """

    def __init__(self, setting: int | Literal["auto"], failures_per_day: float) -> None:
        self.is_chosen = setting == "auto"
        self._interval = 0 if setting == "auto" else setting
        self.failures_per_day = failures_per_day
        self._next_step: int | None = None
        self._logged = 0
        self._step_s = 0.0
        self._since: tuple[int, float] | None = None
        """Step and time of the latest checkpoint, or of the first step since the start."""

    def is_due(self, step: int) -> bool:
        """Return whether the training saves after a step."""
        if self._since is None:
            self._since, self._next_step = (step, time.perf_counter()), step + _FIRST_STEPS
        if self.is_chosen:
            return self._next_step is not None and step >= self._next_step
        return self._interval > 0 and step % self._interval == 0

    def next_after(self, step: int) -> int | None:
        """Return the first step after `step` at which the training saves; None for none."""
        if self.is_chosen:
            return self._next_step if self._next_step is not None and self._next_step > step else None
        return (step // self._interval + 1) * self._interval if self._interval else None

    def choose(self, step: int, save_s: float, write_s: float) -> int:
        """Return the interval that suits this worker's measurements of the checkpoint after `step`, in steps.

        Args:
            step: Step after which it was saved.
            save_s: Time for which it has stopped training.
            write_s: Time that the one before took to be written in the background; the next one waits for that.
        """
        since, began_s = self._since or (step, time.perf_counter())
        self._step_s = max(1e-9, (time.perf_counter() - began_s - save_s) / max(1, step - since))
        best_s = max(find_optimal_interval_s(save_s, _DAY_S / self.failures_per_day), write_s)
        return max(1, round(best_s / self._step_s))

    def follow(self, step: int, interval: int, save_s: float) -> CheckpointIntervalChosen | None:
        """Take the interval that the workers agree on; return an event if it has changed noticeably."""
        self._since, self._next_step = (step, time.perf_counter()), step + interval
        if abs(interval - self._logged) <= _NOTICEABLE * self._logged:
            return None
        self._logged = interval
        return CheckpointIntervalChosen(
            interval=interval,
            save_s=save_s,
            step_s=self._step_s,
            failures_per_day=self.failures_per_day,
        )
