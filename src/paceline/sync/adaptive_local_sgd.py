"""Local SGD whose period follows the measured share of time that communication takes."""

import math
import time
from collections.abc import Callable, Mapping

import torch
from pydantic import Field
from torch import Tensor

from paceline.comm.group import Group
from paceline.registry import register
from paceline.sync.periodic import AveragingRule, PeriodicSynchroniser, SyncSchedule
from paceline.sync.synchroniser import Synchroniser, WorkerContext


@register("adaptive_local_sgd")
class AdaptiveLocalSGD(AveragingRule):
    """Local SGD with an adaptive period, after AdaComm (Wang and Joshi 2019, arXiv:1810.08313).

    From time to time the period becomes the shortest with which exchanges take at most `communication_share` of the
    time: exchange_s / (exchange_s + period * step_s) <= communication_share, within a factor of 2 of the period before.
    The time of a step is that of the slowest worker; the time of an exchange that of the worker that waited least,
    since the others also waited for that one. All workers decide by the same numbers, which they gather at sync steps,
    and the decision is in the checkpoint. With a constant period it is local_sgd, also in cost and clipping (each
    worker's own gradient).

    AdaComm also changes its period after fixed times, but so that it shrinks with the root of the training loss, from a
    first one that is searched for; here the period follows the network, and the loss does not matter.
    """

    communication_share: float = Field(default=0.1, gt=0, lt=1)
    """Largest share of the time that exchanges may take."""
    interval_s: float = Field(default=60.0, ge=0)
    """Time from one change of the period to the next; the paper's is a minute."""
    max_period: int = Field(default=1000, ge=1)
    """Longest period."""

    def start_synchroniser(self, context: WorkerContext) -> Synchroniser | None:
        """Return the synchroniser that averages; None for a worker alone."""
        if context.group.size == 1:
            return None
        return PeriodicSynchroniser(context, self, MeasuredSyncSchedule(self))

    def choose_period(self, period: int, step_s: float, exchange_s: float) -> int:
        """Return the best period for the measured times.

        Args:
            period: Period before.
            step_s: Time of a step.
            exchange_s: Time of an exchange.
        """
        needed = exchange_s * (1 - self.communication_share) / (self.communication_share * max(step_s, 1e-9))
        lowest, highest = max(1, period // 2), min(2 * period, self.max_period)
        return min(max(math.ceil(needed), lowest), highest)


class MeasuredSyncSchedule(SyncSchedule):
    """A schedule that measures steps and exchanges, and changes its period at sync steps.

    Args:
        rule: The settings.
        clock: Function that returns the time, in seconds.
    """

    def __init__(self, rule: AdaptiveLocalSGD, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(rule.period)
        self._rule, self._clock = rule, clock
        self._next = rule.period - 1
        """Number of the next sync step."""
        self._began_s = self._changed_s = clock()
        self._step_s: list[float] = []
        self._exchange_s: list[float] = []

    def is_due(self, number: int) -> bool:
        """Return whether the present period ends with step `number`."""
        return number == self._next

    def record(self, number: int, waited_s: float, group: Group) -> None:
        """Share the measured times with the other workers, and choose the next period."""
        now_s = self._clock()
        step_s = (now_s - waited_s - self._began_s) / self.period
        mine = torch.tensor([step_s, waited_s, now_s - self._changed_s], dtype=torch.float64, device=group.device)
        everybody = mine.new_zeros(group.size, len(mine))
        group.all_gather(everybody, mine, name="measured times").wait()
        steps_s, exchanges_s, ages_s = everybody.T.tolist()
        self._step_s.append(max(steps_s))
        self._exchange_s.append(min(exchanges_s))
        if min(ages_s) >= self._rule.interval_s:
            self.period = self._rule.choose_period(self.period, _mean(self._step_s), _mean(self._exchange_s))
            self._step_s, self._exchange_s, self._changed_s = [], [], now_s
        self._next = number + self.period
        self._began_s = self._clock()

    def last_before(self, number: int) -> int:
        """Return the beginning of the present period."""
        return min(number, max(self._next - self.period + 1, 0))

    def skip(self, number: int) -> None:
        """Begin a period as long as the one before."""
        self._next, self._began_s = number + self.period, self._clock()

    def state(self) -> dict[str, Tensor]:
        """Return the period and the step that ends it."""
        return {"sync_schedule": torch.tensor([self.period, self._next])}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load both; times are measured again."""
        if "sync_schedule" in state:
            self.period, self._next = state["sync_schedule"].tolist()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
