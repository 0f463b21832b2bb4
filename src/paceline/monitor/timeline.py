"""Times of sampled steps: computing, exchanging, and how much of the exchange was hidden behind computing."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median, median_low
from typing import TypeVar

from paceline.monitor.events import BucketExchanged, Event, Float, Int, Record, StepTimed, list_fields

E = TypeVar("E", bound=Event)
Span = tuple[float, float]
"""Begin and end of an interval, in seconds."""

_TIMES = (Float, Float | None)
_LARGEST_S = 1e12
"""Largest time that counts as valid: no axis and no trace could hold more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One sampled step of one worker."""

    rank: int
    epoch: int
    step: int
    times: StepTimed
    buckets: tuple[BucketExchanged, ...]
    """Buckets by number."""
    num_steps: int = 1
    """Number of steps that it is the median of."""

    @property
    def computing_s(self) -> float:
        """Duration of the step without the time that the worker waited."""
        return max(0.0, self.times.duration_s - self.times.waited_s)

    @property
    def optimizer_spans(self) -> list[Span]:
        """Intervals in which the optimizer updated all parameters at once: one, or none."""
        began_s, ended_s = self.times.optimizer_began_s, self.times.optimizer_ended_s
        return [] if began_s is None or ended_s is None else [(began_s, ended_s)]

    @property
    def exchange_s(self) -> float:
        """Time during which at least one bucket was under way."""
        return covered_s((bucket.began_s, bucket.ended_s) for bucket in self.buckets)

    @property
    def hidden_s(self) -> float:
        """Time of the exchange during which the worker did not wait."""
        return max(0.0, self.exchange_s - self.times.waited_s)

    @property
    def hidden_share(self) -> float | None:
        """`hidden_s` as a share of `exchange_s`; None if nothing was exchanged."""
        return self.hidden_s / self.exchange_s if self.exchange_s > 0 else None

    @property
    def wire_bytes(self) -> int:
        """Bytes that the worker sent for all its buckets."""
        return sum(bucket.wire_bytes for bucket in self.buckets)


def covered_s(spans: Iterable[Span]) -> float:
    """Return how long at least one of `spans` was under way."""
    total_s, end_s = 0.0, -inf
    for began_s, ended_s in sorted(spans):
        total_s += max(0.0, ended_s - max(began_s, end_s))
        end_s = max(end_s, ended_s)
    return total_s


def find_timed_steps(records: Iterable[Record]) -> Iterator[TimedStep]:
    """Yield the sampled steps of all workers, as their records come.

    A step with missing records or invalid times is left out.
    """
    told: dict[tuple[int, int, int], dict[int, BucketExchanged]] = {}
    for record in records:
        event, place = record.event, (record.rank, record.epoch, record.step)
        if isinstance(event, BucketExchanged):
            told.setdefault(place, {})[event.bucket] = event
        elif isinstance(event, StepTimed):
            buckets = told.pop(place, {})
            step = TimedStep(
                rank=record.rank,
                epoch=record.epoch,
                step=record.step,
                times=event,
                buckets=tuple(buckets[number] for number in sorted(buckets)),
            )
            if record.rank >= 0 and _is_sound(event, 0.0) and all(_is_sound(one, -_LARGEST_S) for one in step.buckets):
                yield step


def typical_steps(steps: Sequence[TimedStep]) -> list[TimedStep]:
    """Return one step per rank, from the newest start with samples; its times are medians over the rank's steps.

    Steps with other buckets than the rank's newest step are left out: buckets change once
    the order is known in which gradients become ready. Medians preserve the order of times.
    """
    if not steps:
        return []
    newest = [one for one in steps if one.epoch == steps[-1].epoch]  # epochs count starts, also those of resumed runs
    ranks = sorted({one.rank for one in newest})
    return [_typical([one for one in newest if one.rank == rank]) for rank in ranks]


def _typical(steps: Sequence[TimedStep]) -> TimedStep:
    last = steps[-1]
    alike = [one for one in steps if _layout(one) == _layout(last)]
    times = _medians([one.times for one in alike])
    buckets = zip(*(one.buckets for one in alike), strict=True)
    return replace(
        last,
        times=replace(times, began_unix_s=last.times.began_unix_s),
        buckets=tuple(_medians(one) for one in buckets),
        num_steps=len(alike),
    )


def _layout(step: TimedStep) -> list[tuple[int, str, int, int]]:
    return [(one.bucket, one.first_parameter, one.num_parameters, one.num_bytes) for one in step.buckets]


def _medians(events: Sequence[E]) -> E:
    """Return the last of `events` with the median of each number; for integers the lower of the two middle ones."""
    numbers: dict[str, float] = {}
    for name, annotation in list_fields(type(events[-1])).items():
        values = [getattr(event, name) for event in events]
        if annotation is Int:
            numbers[name] = median_low(values)
        elif annotation in _TIMES and None not in values:
            numbers[name] = median(values)
    return replace(events[-1], **numbers)  # type: ignore[type-var]


def _is_sound(event: Event, least_s: float) -> bool:
    times = [getattr(event, name) for name, annotation in list_fields(type(event)).items() if annotation in _TIMES]
    return all(time_s is None or least_s <= time_s < _LARGEST_S for time_s in times)
