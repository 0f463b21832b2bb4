"""Where the time of sampled steps went: computing, exchanging, and how much of that was hidden behind computing."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median, median_low
from typing import TypeVar

from paceline.monitor.events import BucketExchanged, Event, Float, Int, Record, StepTimed, list_fields

E = TypeVar("E", bound=Event)
Span = tuple[float, float]
"""From a moment to a later one, in seconds."""

_TIMES = (Float, Float | None)
_LARGEST_S = 1e12
"""A time beyond it is not one: no axis and no trace could hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One sampled step of one worker."""

    rank: int
    epoch: int
    step: int
    times: StepTimed
    buckets: tuple[BucketExchanged, ...]
    """By number."""
    num_steps: int = 1
    """How many steps it is the median of."""

    @property
    def computing_s(self) -> float:
        """Its time without what the worker stood still."""
        return max(0.0, self.times.duration_s - self.times.waited_s)

    @property
    def optimizer_spans(self) -> list[Span]:
        """When the optimizer ran on all parameters at once: once, or never."""
        began_s, ended_s = self.times.optimizer_began_s, self.times.optimizer_ended_s
        return [] if began_s is None or ended_s is None else [(began_s, ended_s)]

    @property
    def exchange_s(self) -> float:
        """Time during which at least one bucket was under way."""
        return covered_s((bucket.began_s, bucket.ended_s) for bucket in self.buckets)

    @property
    def hidden_s(self) -> float:
        """Time of the exchange that the worker did not stand still for."""
        return max(0.0, self.exchange_s - self.times.waited_s)

    @property
    def hidden_share(self) -> float | None:
        """`hidden_s` as a part of `exchange_s`; None where nothing was exchanged."""
        return self.hidden_s / self.exchange_s if self.exchange_s > 0 else None

    @property
    def wire_bytes(self) -> int:
        """What the worker put on the wire for all its buckets."""
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

    A step that its worker did not finish telling of, or with a time that is none, is left out.
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
    """Return one step a rank, of the newest start that sampled any; its times are medians over the rank's steps.

    Steps whose buckets were others than those of the rank's newest step are left out: buckets are laid out anew
    once the order is known in which gradients become ready. Medians keep the order of moments.
    """
    if not steps:
        return []
    newest = [one for one in steps if one.epoch == steps[-1].epoch]  # epochs count starts, of resumed runs too
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
    """Return the last of `events` with the median of each number; of integers the lower one, which is one of them."""
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
