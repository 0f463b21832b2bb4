"""Reading a log: completely, as it grows, and in summary."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar, cast

from paceline import errors
from paceline.monitor.encoding import from_json
from paceline.monitor.events import (
    BatchChanged,
    BudgetSpent,
    CheckpointSaved,
    CheckpointSkipped,
    CodecChanged,
    ConsensusMeasured,
    DataRead,
    Evaluated,
    Event,
    EventError,
    ExpertsUsed,
    Failed,
    GradientNoiseMeasured,
    MemoryEstimated,
    MemoryMeasured,
    ModelGrown,
    PlanCompared,
    Preempted,
    Record,
    ResourcesUsed,
    Restarted,
    RolledBack,
    RunFinished,
    RunStarted,
    SharesChanged,
    Showcased,
    SlowWorker,
    StalenessMeasured,
    StepFinished,
    UnusedParameters,
    Warned,
)
from paceline.monitor.growth import lies_there
from paceline.monitor.pipeline import PipelineStep, find_pipeline_steps
from paceline.monitor.timeline import TimedStep, find_timed_steps, typical_steps

E = TypeVar("E", bound=Event)


class Records(list[Record]):
    """The records of a log, in the order of writing."""

    num_skipped: int = 0
    """Number of lines that are not events: torn by a killed writer, or of a kind that this version does not know."""


def read_log(path: str | os.PathLike[str]) -> Records:
    """Return the records of the log at `path`; an incomplete last line is left out.

    Raises:
        EventError: The file does not exist.
    """
    if not Path(path).is_file():
        raise EventError(f"a log must be a file, but got {os.fspath(path)}; give the directory of a run")
    records = Records()
    with Path(path).open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                records.extend(_parse(line))
            except EventError:
                records.num_skipped += 1
    return records


def follow(
    path: str | os.PathLike[str],
    stop: threading.Event,
    poll_s: float = 0.2,
    offset: int = 0,
    on_pause: Callable[[], None] = lambda: None,
) -> Iterator[Record]:
    """Yield the records of the log at `path` as they come, waiting for the file if there is none yet.

    Reading begins at byte `offset`, such as the size of a log whose earlier attempts do not matter, and ends
    once `stop` is set and everything written before is read. Lines that are not events are skipped
    (`read_log` counts them). `on_pause` is called whenever the end of the file is reached. Where another file takes
    the place of the first one, reading goes on there.
    """
    path = Path(path)
    while True:
        while not path.is_file():
            if stop.is_set():
                return
            stop.wait(poll_s)
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(offset)
            offset, rest, is_replaced = 0, b"", False
            while not is_replaced:
                # Before reading, so that the end of the file is not missed.
                stopping, is_replaced = stop.is_set(), path.exists() and not lies_there(path, file.fileno())
                for piece in file:
                    rest += piece
                    if rest.endswith(b"\n"):
                        with contextlib.suppress(EventError):
                            yield from _parse(rest)
                        rest = b""
                if stopping and not is_replaced:
                    return
                if not is_replaced:
                    on_pause()
                    stop.wait(poll_s)


_TAIL_BYTES = 1 << 20


def find_last_step(path: str | os.PathLike[str]) -> int:
    """Return the step after which the log at `path` goes on; -1 if no line of its last MiB says so."""
    lines: list[bytes] = []
    with contextlib.suppress(FileNotFoundError), Path(path).open("rb") as file:  # somebody has removed it
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(EventError):
            for record in _parse(line):
                if isinstance(record.event, RunStarted):
                    return record.event.start_step
                if isinstance(record.event, StepFinished | RolledBack):
                    return record.step
    return -1


def select(records: Iterable[Record], kind: type[E]) -> list[Record[E]]:
    """Return the records whose event is of class `kind`."""
    return [cast("Record[E]", record) for record in records if isinstance(record.event, kind)]


State = Literal["empty", "unfinished", "finished", "failed", "preempted", "over_budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Summary of a run's log, over all attempts.

    An attempt that starts at an earlier step undoes the steps, evaluations and shares after it; if a step was
    repeated the last one counts. The summary does not say whether a process is still alive: a run that was killed
    silently is ``"unfinished"``, like one that is still training.
    """

    state: State
    starts: list[Record[RunStarted]]
    """Start of each attempt."""
    steps: list[Record[StepFinished]]
    """Steps that count, in order."""
    evaluations: list[Record[Evaluated]]
    """Evaluations that count, in order."""
    distances: list[Record[ConsensusMeasured]]
    """Distances of workers from their consensus that count, in order."""
    staleness: list[Record[StalenessMeasured]]
    """Measurements of the delay of gradients that count, in order."""
    experts: list[Record[ExpertsUsed]]
    """Uses of experts that count, in order."""
    checkpoints: list[Record[CheckpointSaved]]
    skipped_checkpoints: list[Record[CheckpointSkipped]]
    data_reads: list[Record[DataRead]]
    """Times of reading data, of all workers."""
    restarts: list[Record[Restarted]]
    failures: list[Record[Failed]]
    preemptions: list[Record[Preempted]]
    warnings: list[Record[Warned]]
    memory_estimates: list[Record[MemoryEstimated]]
    plan_comparisons: list[Record[PlanCompared]]
    memory_measured: list[Record[MemoryMeasured]]
    slow_workers: list[Record[SlowWorker]]
    share_changes: list[Record[SharesChanged]]
    """Changes that count, in order."""
    changes: list[Record]
    """Changes of batch and model that count, and measurements of gradient noise, in order."""
    usage: list[Record[ResourcesUsed]]
    """Energy, carbon and money of all workers, for steps that were undone too."""
    unused_parameters: list[str]
    timed_steps: list[TimedStep]
    """Sampled steps of all workers."""
    pipeline_steps: list[PipelineStep]
    """Sampled steps of all pipelines."""
    showcase: Record[Showcased] | None
    finish: Record[RunFinished] | None
    num_lost_steps: int
    """Number of steps that were undone by a restart."""
    elapsed_s: float
    """Wall time of all attempts, without the gaps between them."""

    @property
    def held_out_loss(self) -> float | None:
        """The final held-out loss, or else the latest."""
        if self.finish is not None and self.finish.event.held_out_loss is not None:
            return self.finish.event.held_out_loss
        return self.evaluations[-1].event.loss if self.evaluations else None

    @property
    def samples_per_s(self) -> float | None:
        """Median over steps: the speed while it trains."""
        rates = [step.event.num_samples / step.event.duration_s for step in self.steps if step.event.duration_s > 0]
        return median(rates) if rates else None

    @property
    def samples_per_s_overall(self) -> float | None:
        """Samples that count, divided by all the time spent, with evaluations, checkpoints and undone steps."""
        num_samples = sum(step.event.num_samples for step in self.steps)
        return num_samples / self.elapsed_s if self.elapsed_s > 0 else None

    @property
    def communication_share(self) -> float | None:
        """Share of the steps' time spent waiting for the exchange."""
        duration_s = sum(step.event.duration_s for step in self.steps)
        return sum(step.event.communication_s for step in self.steps) / duration_s if duration_s > 0 else None

    @property
    def data_share(self) -> float | None:
        """Share of the steps' time spent waiting for data: the data stall."""
        duration_s = sum(step.event.duration_s for step in self.steps)
        return sum(step.event.data_s for step in self.steps) / duration_s if duration_s > 0 else None

    @property
    def slowest_stage(self) -> str:
        """Stage of reading data while which training waited the most; empty if unknown."""
        waited_s: dict[str, float] = {}
        for event in (record.event for record in self.data_reads):
            waited_s[event.slowest] = waited_s.get(event.slowest, 0.0) + event.waited_s
        return max(waited_s, key=lambda stage: waited_s[stage], default="")

    @property
    def wire_bytes(self) -> int | None:
        """Bytes that rank 0 has sent in total; None if no step has them."""
        sent = [step.event.wire_bytes for step in self.steps if step.event.wire_bytes is not None]
        return sum(sent) if sent else None

    @property
    def wire_bytes_per_s(self) -> float | None:
        """`wire_bytes` divided by the time of the steps that have them."""
        duration_s = sum(step.event.duration_s for step in self.steps if step.event.wire_bytes is not None)
        return self.wire_bytes / duration_s if self.wire_bytes is not None and duration_s > 0 else None

    @property
    def typical_steps(self) -> list[TimedStep]:
        """One step per rank, whose times are medians; empty if no step was sampled."""
        return typical_steps(self.timed_steps)


def summarise(records: Iterable[Record]) -> RunSummary:
    """Return the summary of `records`, which are in the order of writing."""
    records = list(records)
    counting = _without_undone(records)
    steps = select(counting, StepFinished)
    finishes, showcases = select(counting, RunFinished), select(counting, Showcased)
    return RunSummary(
        state=_state(records),
        starts=select(records, RunStarted),
        steps=steps,
        evaluations=select(counting, Evaluated),
        distances=select(counting, ConsensusMeasured),
        staleness=select(counting, StalenessMeasured),
        experts=select(counting, ExpertsUsed),
        checkpoints=select(records, CheckpointSaved),
        skipped_checkpoints=select(records, CheckpointSkipped),
        data_reads=select(records, DataRead),
        restarts=select(records, Restarted),
        failures=select(records, Failed),
        preemptions=select(records, Preempted),
        warnings=select(records, Warned),
        memory_estimates=select(records, MemoryEstimated),
        plan_comparisons=select(records, PlanCompared),
        memory_measured=select(records, MemoryMeasured),
        slow_workers=select(records, SlowWorker),
        share_changes=select(counting, SharesChanged),
        changes=[record for record in counting if isinstance(record.event, _CHANGES)],
        usage=select(records, ResourcesUsed),
        timed_steps=list(find_timed_steps(records)),
        pipeline_steps=list(find_pipeline_steps(records)),
        unused_parameters=sorted({name for one in select(records, UnusedParameters) for name in one.event.names}),
        showcase=showcases[-1] if showcases else None,
        finish=finishes[-1] if finishes else None,
        num_lost_steps=len(select(records, StepFinished)) - len(steps),
        elapsed_s=_elapsed_s(records),
    )


def _parse(line: bytes) -> list[Record]:
    text = line.decode("utf-8", errors="replace").strip()
    return [from_json(text)] if text else []  # a writer that ended another's torn line may leave an empty one


_CHANGES = (BatchChanged, CodecChanged, ModelGrown, GradientNoiseMeasured)
_CURVES = (StepFinished, Evaluated, ConsensusMeasured, StalenessMeasured, ExpertsUsed, SharesChanged, *_CHANGES)


def _without_undone(records: list[Record]) -> list[Record]:
    """Return the steps, evaluations and shares that count, by step, and after them all other records that count."""
    others: list[Record] = []
    points: dict[tuple[type[Event], int], Record] = {}
    for record in records:
        event = record.event
        if isinstance(event, RunStarted):
            points = {key: point for key, point in points.items() if key[1] <= event.start_step}
            others = [other for other in others if not isinstance(other.event, RunFinished | Showcased)]
        if isinstance(event, _CURVES):
            points[type(event), record.step] = record
        else:
            others.append(record)
    return [points[key] for key in sorted(points, key=lambda key: key[1])] + others


def _state(records: list[Record]) -> State:
    state: State = "empty"
    for record in records:
        match record.event:
            case RunStarted() | Restarted():
                state = "unfinished"
            case Preempted():
                state = "preempted"
            case BudgetSpent():
                state = "over_budget"
            case Failed():
                state = "failed"
            case RunFinished():
                state = "finished"
    return state


def _elapsed_s(records: list[Record]) -> float:
    elapsed_s = 0.0
    start: Record | None = None
    last_s = 0.0  # time since that start
    for record in records:
        if isinstance(record.event, RunStarted):
            elapsed_s, start, last_s = elapsed_s + last_s, record, 0.0
        elif start is not None and record.rank == start.rank and not isinstance(record.event, Restarted):
            last_s = max(last_s, record.unix_s - start.unix_s)
    return elapsed_s + last_s


def last_traceback(path: str | os.PathLike[str]) -> str:
    """Return the traceback of the first failure in the newest start of the run whose log is at `path`.

    Paceline's own errors have none, since their messages are enough; empty if there are no others.
    """
    failures = select(read_log(path), Failed)
    newest = [failure.event for failure in failures if failure.epoch == failures[-1].epoch]
    return next((event.traceback for event in newest if not hasattr(errors, event.error)), "")
