"""Detection of slow workers, and shares in proportion to speed.

Each worker measures its computing time per sample: forward and backward, without waiting for data or for others. It
sends the median over an interval of steps; the lower of its last two medians counts. A disturbance only ever
makes a worker slower, so neither a slow step nor a slow period shorter than an interval changes anything.

A worker is named as slow only if even the fastest of its steps in both intervals took much longer than the others'
median, and without the time in which other processes had its core: on a busy machine one step in many is undisturbed.

Shares of a global batch are then proportional to speed, so that all workers finish at the same time. The samples of a
step do not change, since every exchange carries its weight; the order of summation does, and the worker whose random
numbers a sample gets. So shares change only if that makes the slowest worker's step a tenth shorter: noise, and
the rounding to whole samples, leave them alone. Every worker keeps one sample of each full global batch, otherwise
nobody could see that it is fast again. If a step has a fixed cost besides its samples, speed depends on the share;
repeated measurement then converges to equal times.

On the wire it costs 32 bytes per worker and interval; no worker waits for them: they are read an interval later.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan, nan
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Group, Work
from paceline.comm.local_group import LocalGroup
from paceline.comm.streams import record
from paceline.data import Loader
from paceline.monitor.events import Event, SharesChanged, SlowWorker
from paceline.replica.step_result import StepTimes
from paceline.training.run_queue import RunQueue

LEAST_GAIN = 1.1
"""Smallest ratio of the slowest worker's time with the present shares to its time with new shares."""
SLOW_FACTOR = 1.5
"""Ratio of the computing time of a worker's fastest step to the others' median from which it counts as slow."""
_LEAST_LOAD = 0.75
"""Fraction of the others' computing time in a step below which no worker counts as slow: with few samples the fixed
cost of a step alone makes the time per sample long."""


class LoadBalancer:
    """Measures the speed of each worker, reports slow ones, and makes shares follow speed.

    Every worker has one, and makes the same calls.

    Args:
        loader: Loader whose shares follow speed.
        group: All workers; None, or a group of one, for no measurement.
        interval: Number of steps per measurement.
        is_following: Whether shares follow speed; else slow workers are only reported.
        clock: Clock of computing time on a CPU.
        queue_clock: Clock of the part of it in which other processes had the core; None for the kernel's, if `clock` is
            the host's.
    """

    def __init__(
        self,
        loader: Loader,
        group: Group | None,
        *,
        interval: int,
        is_following: bool,
        clock: Callable[[], float] = time.perf_counter,
        queue_clock: Callable[[], float] | None = None,
    ) -> None:
        self._loader, self._group = loader, group or LocalGroup()
        self._interval, self._is_following = interval, is_following
        if queue_clock is None:
            queue_clock = RunQueue() if clock is time.perf_counter else lambda: 0.0
        self._stopwatch = _Stopwatch(self._group.device, clock, queue_clock)
        self._num_samples = 0
        self._steps: list[_MeasuredStep] = []
        """Steps since the last message."""
        self._running: list[_MeasuredStep] = []
        """Steps that were not over then."""
        self._sent: tuple[Work, Tensor] | None = None
        self._last: Tensor | None = None
        self._named: set[int] = set()

    @contextmanager
    def computing(self, num_samples: int) -> Iterator[None]:
        """Measure, inside, the computation of a micro-batch's gradients."""
        with self._stopwatch.running():
            yield
        self._num_samples += num_samples

    def end_step(self, number: int, times: StepTimes) -> list[Event]:
        """Record the `times` of step `number`, and return the resulting events, the same on all workers."""
        if self._group.size == 1:
            return []
        # If gradients are applied in the next forward, the worker waits in there.
        waited_s = sum(bucket.waited_s for bucket in times.buckets if bucket.landed_s < times.backward_ended_s)
        self._steps.append(_MeasuredStep(self._stopwatch.take(), waited_s, self._num_samples))
        self._num_samples = 0
        if number % self._interval:
            return []
        measured, self._steps = self._steps, []
        # On a GPU the last step still runs: the host does not wait for it, and it counts in the next interval.
        known = [step for step in [*self._running, *measured] if step.is_over]
        self._running = [step for step in measured if not step.is_over]
        mine = measure([(step.read(), step.num_samples) for step in known])
        undisturbed = [(step.read_undisturbed(), step.num_samples) for step in known]
        if len(measured) < self._interval:  # the run resumed within an interval
            return []
        events = self._receive()
        self._send((*mine, measure(undisturbed)[0], find_fastest(undisturbed)))
        return events

    def _send(self, measured: Sequence[float]) -> None:
        mine = torch.tensor(measured, dtype=torch.float64, device=self._group.device)
        everybody = mine.new_zeros(self._group.size, len(mine))
        self._sent = self._group.all_gather(everybody, mine, name="speeds"), everybody

    def _receive(self) -> list[Event]:
        if self._sent is None:
            return []
        (work, everybody), self._sent = self._sent, None
        work.wait()
        last, self._last = self._last, everybody
        if last is None:
            return []
        sample_s, step_s, *undisturbed_s = torch.fmin(last, everybody).T.tolist()  # unknown times are NaN, and ignored
        return [*self._name_slow(step_s, *undisturbed_s), *self._follow(sample_s)]

    def _name_slow(
        self, step_s: Sequence[float], sample_s: Sequence[float], fastest_s: Sequence[float]
    ) -> Iterator[Event]:
        for rank, factor in find_slow(sample_s, step_s, fastest_s).items():
            if rank not in self._named:
                self._named.add(rank)
                own = 1 / fastest_s[rank]
                yield SlowWorker(slow_rank=rank, factor=factor, samples_per_s=own, others_samples_per_s=own * factor)

    def _follow(self, sample_s: Sequence[float]) -> Iterator[Event]:
        shares = follow(sample_s, self._loader.shares) if self._is_following else None
        if shares is not None:
            start = self._loader.change_shares(shares)
            yield SharesChanged(shares=shares, start=start, samples_per_s=[1 / value for value in sample_s])


def measure(steps: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Return the seconds of computing per sample, and per step; NaN if no step had samples.

    Args:
        steps: Seconds of computing, and samples, of each.
    """
    with_samples = [(max(time_s, _TICK_S), num_samples) for time_s, num_samples in steps if num_samples]
    if not with_samples:
        return nan, nan
    return median(time_s / num for time_s, num in with_samples), median(time_s for time_s, _ in with_samples)


def find_fastest(steps: Sequence[tuple[float, int]]) -> float:
    """Return the seconds of computing per sample in the fastest of the steps; NaN if none had samples."""
    return min((max(time_s, _TICK_S) / num_samples for time_s, num_samples in steps if num_samples), default=nan)


def find_slow(
    sample_s: Sequence[float], step_s: Sequence[float], fastest_s: Sequence[float] | None = None
) -> Mapping[int, float]:
    """Return the ratio of the computing time of each slow worker's fastest step to the others' median, by rank.

    Args:
        sample_s: Seconds of computing per sample, by rank; NaN if unknown.
        step_s: Seconds of computing per step, by rank; NaN if unknown.
        fastest_s: Seconds of computing per sample in the fastest step, by rank; None if all steps are alike.
    """
    fastest_s = sample_s if fastest_s is None else fastest_s
    known = [rank for rank, value in enumerate(sample_s) if not isnan(value)]
    if len(known) < 2:
        return {}
    slow = {}
    for rank in [rank for rank in known if sample_s[rank] >= SLOW_FACTOR * min(sample_s[one] for one in known)]:
        others = [other for other in known if other != rank]
        factor = fastest_s[rank] / median(sample_s[other] for other in others)
        load = step_s[rank] / median(step_s[other] for other in others)
        if factor >= SLOW_FACTOR and load >= _LEAST_LOAD:
            slow[rank] = factor
    return slow


def follow(sample_s: Sequence[float], present: Sequence[int]) -> list[int] | None:
    """Return the shares that follow speed, or None if the present ones are about as good.

    Args:
        sample_s: Seconds of computing per sample, by rank; an unknown worker counts as the median of the others.
        present: Samples of a global batch that each worker takes.
    """
    known = [value for value in sample_s if not isnan(value)]
    if not known:
        return None
    filled = [median(known) if isnan(value) else value for value in sample_s]
    shares = divide(sum(present), filled)
    slowest, would_be = (max(n * s for n, s in zip(each, filled, strict=True)) for each in (present, shares))
    return shares if slowest >= LEAST_GAIN * would_be else None


def divide(num_samples: int, sample_s: Sequence[float]) -> list[int]:
    """Divide samples so that the last worker finishes as early as possible, with at least one each.

    Args:
        num_samples: Number of samples, at least the number of workers.
        sample_s: Seconds per sample on each worker.
    """
    workers = range(len(sample_s))
    speed = sum(1 / value for value in sample_s)
    shares = [max(1, int(num_samples / value / speed)) for value in sample_s]
    while sum(shares) > num_samples:  # some had less than one sample, and got one
        shares[max((rank for rank in workers if shares[rank] > 1), key=lambda rank: shares[rank] * sample_s[rank])] -= 1
    while sum(shares) < num_samples:
        shares[min(workers, key=lambda rank: (shares[rank] + 1) * sample_s[rank])] += 1
    return shares


_TICK_S = 1e-9
"""Time below the resolution of a clock."""


@dataclass(frozen=True)
class _Span:
    """A computation's time: by the host's clock, or by two events of a GPU's queue."""

    host_s: float = 0.0
    queued_s: float = 0.0
    """Time of it in which other processes had the core."""
    events: Any = None

    @property
    def is_over(self) -> bool:
        return self.events is None or bool(self.events[1].query())

    def read(self) -> float:
        if self.events is None:
            return self.host_s
        began, ended = self.events
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3


@dataclass(frozen=True)
class _MeasuredStep:
    """Computations of one step."""

    spans: list[_Span]
    waited_s: float
    """Time of them in which the worker waited for others."""
    num_samples: int

    @property
    def is_over(self) -> bool:
        return all(span.is_over for span in self.spans)

    def read(self) -> float:
        return max(0.0, sum(span.read() for span in self.spans) - self.waited_s)

    def read_undisturbed(self) -> float:
        """Return the time without that in which other processes had the core; all of it if the worker has waited."""
        # Whoever wakes up from waiting for others waits for a core too, which is not to be taken off twice.
        return self.read() if self.waited_s else max(0.0, self.read() - sum(span.queued_s for span in self.spans))


class _Stopwatch:
    """Measures computations; on a GPU in its queue, since the host runs ahead of it."""

    def __init__(self, device: torch.device, clock: Callable[[], float], queue_clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock
        self._queue_clock = queue_clock
        self._spans: list[_Span] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the stopwatch inside."""
        if self._device.type != "cpu":
            began = record(self._device, is_timed=True)
            yield
            if began is not None:
                self._spans.append(_Span(events=(began, record(self._device, is_timed=True))))
        else:
            began_s, queued_s = self._clock(), self._queue_clock()
            yield
            time_s, queued_s = self._clock() - began_s, self._queue_clock() - queued_s
            self._spans.append(_Span(time_s, min(max(0.0, queued_s), time_s)))

    def take(self) -> list[_Span]:
        """Return what was measured since the last call."""
        spans, self._spans = self._spans, []
        return spans
