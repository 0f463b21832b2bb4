"""The report's section on a pipeline: how long its ranks were idle, beside the formula of its order."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.monitor.events import PipelineMeasured, Record
from paceline.monitor.formatting import duration, share
from paceline.monitor.html_elements import Pictures, picture, safe, section, table
from paceline.monitor.timeline import covered_s

_LARGEST_S = 1e12
"""Largest time that counts as valid: no axis could hold more."""
_WORKS = ("forward", "backward", "inputs", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStep:
    """One sampled step of one pipeline, from the events of all its ranks."""

    epoch: int
    step: int
    events: tuple[PipelineMeasured, ...]
    """Events by position on the pipeline."""

    @property
    def began_unix_s(self) -> float:
        """Time when the first rank began to work."""
        return min(event.began_unix_s + event.began_s[0] for event in self.events)

    @property
    def duration_s(self) -> float:
        """Duration until the last rank had finished."""
        return max(event.began_unix_s + max(event.ended_s) for event in self.events) - self.began_unix_s

    @property
    def busy_s(self) -> list[float]:
        """Working time of each rank."""
        return [covered_s(zip(event.began_s, event.ended_s, strict=True)) for event in self.events]

    @property
    def bubble(self) -> float:
        """Idle share of the step, over all ranks."""
        return 1 - sum(self.busy_s) / (len(self.events) * self.duration_s)

    @property
    def formula(self) -> float | None:
        """Idle share by the order's own formula, for stages and passes of equal cost."""
        return self.events[0].formula

    @property
    def description(self) -> str:
        """Short description of the pipeline."""
        event = self.events[0]
        stages = f"{event.stages_per_rank} stages each, " if event.stages_per_rank > 1 else ""
        batches = "1 micro-batch" if event.num_micro_batches == 1 else f"{event.num_micro_batches} micro-batches"
        return f"{len(event.ranks)} ranks, {stages}{batches}, order {event.order}"


def find_pipeline_steps(records: Iterable[Record]) -> Iterator[PipelineStep]:
    """Yield the sampled steps that all ranks of a pipeline have reported, as their records come.

    A step that lacks a rank, or has invalid times, is left out.
    """
    told: dict[tuple[int, int, tuple[int, ...]], dict[int, PipelineMeasured]] = {}
    for record in records:
        event = record.event
        if isinstance(event, PipelineMeasured) and record.rank in event.ranks and _is_sound(event):
            key = (record.epoch, record.step, tuple(event.ranks))
            told.setdefault(key, {})[event.ranks.index(record.rank)] = event
            if len(told[key]) == len(event.ranks):
                by_place = told.pop(key)
                events = tuple(by_place[place] for place in sorted(by_place))
                step = PipelineStep(epoch=record.epoch, step=record.step, events=events)
                if step.duration_s > 0:
                    yield step


def typical_pipeline_step(steps: Sequence[PipelineStep]) -> PipelineStep | None:
    """Return the step with the median bubble among those like the newest; None if no step was sampled."""
    if not steps:
        return None
    last = steps[-1]
    alike = [one for one in steps if one.epoch == last.epoch and one.description == last.description]
    return sorted(alike, key=lambda one: one.bubble)[(len(alike) - 1) // 2]


def describe_pipeline(steps: Sequence[PipelineStep]) -> str:
    """Return the bubble of a typical step beside the formula, as a sentence; empty if no step was sampled."""
    step = typical_pipeline_step(steps)
    if step is None:
        return ""
    if step.formula is None:
        theory = "no formula is known for so few micro-batches"
    else:
        theory = f"{share(step.formula)} by the formula for equal stages"
    return (
        f"Pipeline of {step.description}: ranks are idle for {share(step.bubble)} of a typical step of "
        f"{duration(step.duration_s)} ({theory})."
    )


def render_pipeline(steps: Sequence[PipelineStep], gantt: Pictures | None) -> str:
    """Return the section of a report's page; empty if no step was sampled.

    Args:
        steps: Sampled steps.
        gantt: Timeline picture of the typical one.
    """
    step = typical_pipeline_step(steps)
    if step is None or gantt is None:
        return ""
    sampled = "1 step was sampled" if len(steps) == 1 else f"{len(steps):,} steps were sampled"
    parts = [
        f"<p>{safe(describe_pipeline(steps))} ({sampled}; the median is shown.)</p>",
        picture(gantt, "A step in time: when each rank of the pipeline computed, and when it was idle"),
        _render_ranks(step),
    ]
    return section("Pipeline", "".join(parts))


def _render_ranks(step: PipelineStep) -> str:
    used = [work for work in _WORKS if any(work in event.works for event in step.events)]
    rows = [
        [
            str(rank),
            f"{1e3 * busy_s:,.2f}",
            share(1 - busy_s / step.duration_s),
            *(_typical_ms(event, work) for work in used),
            ", ".join(str(stage) for stage in sorted(set(event.stages))),
        ]
        for rank, busy_s, event in zip(step.events[0].ranks, step.busy_s, step.events, strict=True)
    ]
    headings = ["rank", "busy, ms", "idle", *(f"{work}, ms" for work in used)]
    return table([*headings, "stages"], rows, num_numeric=len(headings))


def _typical_ms(event: PipelineMeasured, work: str) -> str:
    """Return the median duration of an operation of that kind."""
    spans = zip(event.works, event.began_s, event.ended_s, strict=True)
    times_s = [ended_s - began_s for kind, began_s, ended_s in spans if kind == work]
    return f"{1e3 * median(times_s):,.2f}" if times_s else "–"


def _is_sound(event: PipelineMeasured) -> bool:
    lists = (event.works, event.stages, event.micro_batches, event.began_s, event.ended_s)
    if not event.works or len({len(one) for one in lists}) > 1:
        return False
    spans = zip(event.began_s, event.ended_s, strict=True)
    return abs(event.began_unix_s) < _LARGEST_S and all(0 <= began <= ended < _LARGEST_S for began, ended in spans)
