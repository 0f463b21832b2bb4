"""Events, numbers and untrusted text, formatted for people."""

import math
import unicodedata
from collections.abc import Sequence

from paceline.monitor.data_events import DataGrown, StoreRead
from paceline.monitor.events import (
    AnomalyFound,
    BadSampleFound,
    BatchChanged,
    BudgetSpent,
    CheckpointIntervalChosen,
    CheckpointSaved,
    CheckpointSkipped,
    CodecChanged,
    Evaluated,
    ExpertsUsed,
    Failed,
    ModelGrown,
    Preempted,
    ReadersChosen,
    Record,
    ReplicasHealed,
    ResourceLow,
    Restarted,
    RolledBack,
    RunFinished,
    RunStarted,
    SharesChanged,
    SlowWorker,
    StoppedEarly,
    UnusedParameters,
    Warned,
)

_KEPT = "\n\u200c\u200d"  # a line break, and the two invisible joiners that Indic and Persian spelling needs


def printable(text: str, encoding: str = "utf-8") -> str:
    """Return `text` with control characters, and characters that `encoding` lacks, written as escapes."""
    text = text.replace("\r\n", "\n").expandtabs(4)
    shown = "".join(char if _is_harmless(char) else _escape(char) for char in text)
    return shown.encode(encoding, errors="backslashreplace").decode(encoding)


def one_line(text: str, max_length: int = 500) -> str:
    """Return `text` as one line of at most `max_length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_length else line[: max_length - 3] + "..."


def number(value: float) -> str:
    """Return `value` with four significant digits: ``1.234``, ``0.0001235``, ``12,346``."""
    if not math.isfinite(value):
        return str(float(value))
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3e}"
    return f"{value:.4g}"


def interval(value: float, low: float, high: float) -> str:
    """Return `value` with the ends of its interval: ``1.234 (1.05 to 1.45)``."""
    return f"{number(value)} ({_brief(low)} to {_brief(high)})"


def _brief(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def share(value: float) -> str:
    """Return a fraction of one as percent."""
    return f"{100 * value:.{1 if abs(value) < 0.1 else 0}f}%" if math.isfinite(value) else "?"


def duration(value_s: float) -> str:
    """Return a time as ``4.5 ms``, ``0.12 s``, ``5 min 03 s`` or ``2 h 05 min``."""
    if not math.isfinite(value_s):
        return "?"
    if 0 < value_s < 0.1:
        return f"{1e3 * value_s:.3g} ms"
    if value_s < 60:
        return f"{value_s:.3g} s"
    minutes, seconds = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def size(num_bytes: float) -> str:
    """Return a number of bytes as ``4.5 MB`` (powers of 1,000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{number(num_bytes)} TB"


def describe_size(num_layers: int | None, width: int | None) -> str:
    """Return the size of a model that grows: ``4 layers of width 64``."""
    parts = [] if num_layers is None else [f"{num_layers:,} layers"]
    return " of ".join(parts if width is None else [*parts, f"width {width:,}"])


def workers(start: RunStarted) -> str:
    """Return number and device of the workers: ``2 workers on cpu``."""
    return f"{'1 worker' if start.num_workers == 1 else f'{start.num_workers:,} workers'} on {start.device}"


def describe(record: Record) -> str | None:
    """Return the line of output for `record`, or None if it needs none."""
    match record.event:
        case RunStarted() as event:
            return _describe_start(event)
        case Evaluated(loss=loss) as event:
            spent = f"{event.num_samples:,} samples in {duration(event.duration_s)}"
            best = "the best so far" if event.is_best else ""
            plain = f"without averages {number(event.unaveraged['loss'])}" if event.unaveraged else ""
            return f"step {record.step:,}: {_join(_held_out(loss, event.metrics), plain, best)} ({spent})"
        case ExpertsUsed() as event:
            return f"step {record.step:,}: {describe_experts(event)}"
        case StoreRead() as event if event.num_damaged:
            return f"warning: {event.num_damaged:,} blocks from {event.url} came damaged, and were fetched again"
        case SlowWorker() as event:
            return f"step {record.step:,}: {describe_slow(event)}"
        case AnomalyFound() as event:
            return f"step {record.step:,}: {describe_anomaly(event)}"
        case RolledBack(checkpoint=checkpoint, from_step=from_step, skipped_steps=steps):
            skipped = ", ".join(f"{step:,}" for step in steps)
            return f"step {from_step:,}: training goes back to {checkpoint}, and skips the updates of steps {skipped}"
        case ReplicasHealed(ranks=ranks, source_rank=source, difference=difference):
            healed = ", ".join(map(str, ranks))
            return f"step {record.step:,}: {difference}; rank {healed} took the state of rank {source}"
        case BadSampleFound(sample=index, path=path, key=key, reason=reason, action=action):
            place = " ".join(part for part in (path, key) if part)
            return f"step {record.step:,}: sample {index} ({place or 'place unknown'}) is bad, {action}: {reason}"
        case ResourceLow(message=message, host=host):
            return f"warning: {host}: {message}"
        case SharesChanged(shares=shares):
            return f"step {record.step:,}: shares follow speed: {', '.join(map(str, shares))} samples of a global batch"
        case BatchChanged(global_batch=batch, rate_factor=factor):
            rates = "" if factor == 1 else f", learning rates times {factor:.3g}"
            return f"step {record.step:,}: {batch:,} samples a step from here on{rates}"
        case DataGrown() as event:
            return (
                f"step {record.step:,}: from sample {event.start:,} on, an epoch has {event.num_samples:,} samples, of "
                f"{event.num_shards:,} shards"
            )
        case ReadersChosen(num_readers=count, reader=reader, reason=reason):
            plural = "" if count == 1 else "es" if reader == "process" else "s"
            return f"step {record.step:,}: {count} {reader}{plural} to read data, for {reason}"
        case CodecChanged(codec=codec, before=before, reason=reason):
            return f"step {record.step:,}: codec {codec} in place of {before}, {reason.partition(':')[0]}"
        case ModelGrown(num_layers=num_layers, width=width, num_parameters=parameters):
            grown = f"{describe_size(num_layers, width)}, {parameters:,} parameters"
            return f"step {record.step:,}: the model has grown to {grown}"
        case CheckpointSaved(path=path, lost_ranks=[_, *_] as ranks):
            *others, last = map(str, ranks)
            lost = f"ranks {', '.join(others)} and {last} were" if others else f"rank {last} was"
            return f"step {record.step:,}: {lost} lost; what the others had learnt is saved in {path}"
        case CheckpointIntervalChosen() as event:
            return (
                f"step {record.step:,}: a checkpoint every {event.interval:,} steps, which lose the least time with "
                f"{event.save_s:.3g} s a checkpoint, {event.step_s:.3g} s a step and {event.failures_per_day:.2g} "
                "failures a day"
            )
        case CheckpointSkipped(path=path, reason=reason):
            return f"checkpoint {path} is skipped: {reason}"
        case UnusedParameters(names=names):
            return f"parameters that no rank used: {', '.join(names)}"
        case Warned(message=message):
            return f"warning: {message}"
        case Preempted(checkpoint=checkpoint, signal=signal):
            return f"stopped by {signal} at step {record.step:,}; a new start resumes from {checkpoint}"
        case BudgetSpent() as event:
            return f"ended at step {record.step:,}: {_describe_budget(event)}"
        case StoppedEarly(reason=reason):
            return f"ended after step {record.step:,}: {reason}"
        case Restarted(attempt=attempt, reason=reason):
            return f"restart {attempt}: {reason}"
        case Failed() as event:
            return describe_failure(event, [record.rank], record.step)
        case RunFinished(held_out_loss=loss) as event:
            spent = f"{duration(event.duration_s)}, {number(event.samples_per_s)} samples/s"
            return f"finished: {_join(_held_out(loss, event.metrics), spent)}"
        case _:
            return None


def describe_failure(event: Failed, ranks: Sequence[int], step: int) -> str:
    """Return where and how `ranks` failed with the same error; -1 is the launcher, or no step."""
    who = f"rank {', '.join(map(str, ranks))} failed" if min(ranks) >= 0 else "failed"
    when = f" at step {step:,}" if step >= 0 else ""
    return f"{f'{event.place}: ' if event.place else ''}{who}{when} with {event.error}: {event.message}"


def describe_experts(event: ExpertsUsed) -> str:
    """Return how many uses of experts were dropped, and how busy the busiest expert is."""
    dropped, used = sum(event.num_dropped), sum(map(sum, event.counts))
    layer, load = max(
        ((name, busiest_load(counts)) for name, counts in zip(event.layers, event.counts, strict=True)),
        key=lambda pair: pair[1],
    )
    found = (
        f"{dropped:,} of {dropped + used:,} uses of experts were dropped ({share(dropped / max(dropped + used, 1))})"
    )
    return f"{found}; the busiest expert, in {layer}, takes {number(load)} times its even share"


def busiest_load(counts: Sequence[int]) -> float:
    """Return the tokens of a layer's busiest expert, as a multiple of its even share."""
    return max(counts) * len(counts) / max(sum(counts), 1)


def describe_anomaly(event: AnomalyFound) -> str:
    """Return what was out of the ordinary, and what was done."""
    done = {"report": "", "skip": "; its update is skipped", "roll_back": "; training goes back"}.get(
        event.reaction, "; the run ends"
    )
    if event.limit is None or event.median is None:
        return f"{event.message or f'the {event.quantity} is {number(event.value)}'}{done}"
    usual = f"above {number(event.limit)}, where the median is {number(event.median)}"
    return f"the {event.quantity} is {number(event.value)}, {usual}{done}"


def describe_slow(event: SlowWorker) -> str:
    """Return which rank is slow, and by how much."""
    speeds = (
        f"{number(event.samples_per_s)} samples/s while it computes, the others {number(event.others_samples_per_s)}"
    )
    return f"rank {event.slow_rank} computes {event.factor:.1f} times slower than the others: {speeds}"


def _describe_start(event: RunStarted) -> str:
    what = f"{event.recipe}: {event.num_parameters:,} parameters, {workers(event)}"
    steps = f"steps {event.start_step:,} to {event.total_steps:,}, {event.global_batch:,} samples each"
    return _join(what, steps, f"resumed from {event.resumed_from}" if event.resumed_from else "")


def _describe_budget(event: BudgetSpent) -> str:
    spent = f"{number(event.spent)} of {number(event.limit)} {event.unit} are spent"
    return f"{spent}, which leaves too little for a step; a new start with more resumes from {event.checkpoint}"


def _held_out(loss: float | None, values: dict[str, float]) -> str:
    return _join(
        "" if loss is None else f"held-out loss {number(loss)}",
        *(f"{name} {number(value)}" for name, value in values.items()),
    )


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _is_harmless(char: str) -> bool:
    return char in _KEPT or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
