"""Sections of a report: memory; slow workers, and their shares; experts; changes of batch and model."""

from collections.abc import Iterator

from paceline.monitor.events import BatchChanged, CodecChanged, DataRead, Event, GradientNoiseMeasured, ModelGrown
from paceline.monitor.formatting import busiest_load, describe_size, describe_slow, number, share, size
from paceline.monitor.html_elements import safe, section, table
from paceline.monitor.reader import RunSummary

_MAX_ROWS = 20
_STAGES = ("fetch", "decode", "augment", "collate")
"""Stages of reading data."""


def render_memory(summary: RunSummary) -> str:
    """Return the section on memory; empty if memory was neither estimated nor measured."""
    estimated = summary.memory_estimates[-1].event if summary.memory_estimates else None
    measured = summary.memory_measured[-1].event if summary.memory_measured else None
    columns = [event for event in (estimated, measured) if event is not None]
    if not columns:
        return ""
    names = list(dict.fromkeys(name for event in columns for name in event.bytes_of))
    rows = [[name, *(size(event.bytes_of[name]) if event.bytes_of else "–" for event in columns)] for name in names]
    rows.append(["in all", *(size(event.peak_bytes) for event in columns)])
    if estimated is not None:
        rows.append(["available", size(estimated.available_bytes), *[""] * (len(columns) - 1)])
    headings = ["tensors of a rank", *["estimated"] * (estimated is not None), *["measured"] * (measured is not None)]
    return section("Memory", table(headings, rows))


def render_plan(summary: RunSummary) -> str:
    """Return the section on the plan of the run: a step as predicted, and as measured; empty without a plan."""
    if not summary.plan_comparisons:
        return ""
    last = summary.plan_comparisons[-1].event
    place = "inside" if last.is_within else "outside"
    rows = [
        [
            "predicted",
            f"{number(last.predicted_s)} s",
            f"{number(last.predicted_s_low)} to {number(last.predicted_s_high)} s",
        ],
        ["measured", f"{number(last.measured_s)} s", f"median of {last.num_steps:,} steps, {place} the interval"],
    ]
    words = f"Planned for {last.machines}, by numbers of basis {last.basis}." if last.basis else ""
    return section("Plan", f"<p>{safe(words)}</p>{table(['a step', 'time', ''], rows)}")


def describe_stragglers(summary: RunSummary) -> Iterator[str]:
    """Yield a sentence for each slow worker; the newest record of each rank counts."""
    is_following = bool(summary.starts) and summary.starts[-1].event.settings.get("shares") == "measured"
    for record in {one.event.slow_rank: one for one in summary.slow_workers}.values():
        cure = "its share follows its speed" if is_following else "--shares measured would give it fewer samples"
        yield f"{describe_slow(record.event)} (found at step {record.step:,}; {cure})."


def render_stragglers(summary: RunSummary) -> str:
    """Return the section on workers; empty if no worker was slow and no share changed."""
    parts = [f"<p>{safe(sentence)}</p>" for sentence in describe_stragglers(summary)]
    changes = summary.share_changes
    if changes:
        rows = [
            [
                f"{one.step:,}",
                f"{one.event.start:,}",
                ", ".join(f"{share:,}" for share in one.event.shares),
                ", ".join(number(speed) for speed in one.event.samples_per_s),
            ]
            for one in reversed(changes[-_MAX_ROWS:])
        ]
        number_of = "Shares changed once" if len(changes) == 1 else f"Shares changed {len(changes):,} times"
        newest = f"; the newest {_MAX_ROWS} changes are shown" if len(changes) > _MAX_ROWS else ""
        headings = ["step", "from sample", "shares by rank", "samples/s by rank, while computing"]
        parts.append(f"<p>{number_of}, to follow the speed of workers{newest}.</p>")
        parts.append(table(headings, rows, num_numeric=2))
    return section("Workers", "".join(parts)) if parts else ""


def render_data(summary: RunSummary) -> str:
    """Return the section on reading data, of all events of each worker; empty if none was logged."""
    by_rank: dict[int, list[DataRead]] = {}
    for record in summary.data_reads:
        by_rank.setdefault(record.rank, []).append(record.event)
    rows = []
    for rank, events in sorted(by_rank.items()):
        waited_s, used_s = sum(one.waited_s for one in events), sum(one.used_s for one in events)
        num_steps = max(1, sum(one.num_steps for one in events))
        stages_s = (sum(getattr(one, f"{stage}_s") for one in events) for stage in _STAGES)
        last = events[-1]
        plural = "" if last.num_readers == 1 else "es" if last.reader == "process" else "s"
        rows.append(
            [
                str(rank),
                share(waited_s / max(waited_s + used_s, 1e-9)),
                last.slowest,
                *(f"{1e3 * stage_s / num_steps:.3g}" for stage_s in stages_s),
                f"{last.num_readers} {last.reader}{plural}",
            ]
        )
    headings = ["rank", "stall", "slowest stage", *(f"{stage}, ms a step" for stage in _STAGES), "read by"]
    return section("Data", table(headings, rows, num_numeric=2)) if rows else ""


def render_experts(summary: RunSummary) -> str:
    """Return the section on experts, of all steps that count; empty for a model without any."""
    counts: dict[str, list[int]] = {}
    dropped: dict[str, int] = {}
    for event in (record.event for record in summary.experts):
        for layer, used, lost in zip(event.layers, event.counts, event.num_dropped, strict=True):
            before = counts.get(layer, [0] * len(used))
            counts[layer] = [a + b for a, b in zip(before, used, strict=True)]
            dropped[layer] = dropped.get(layer, 0) + lost
    rows = [
        [
            layer,
            f"{sum(used):,}",
            f"{dropped[layer]:,}",
            share(dropped[layer] / max(sum(used) + dropped[layer], 1)),
            number(busiest_load(used)),
            number(min(used) * len(used) / max(sum(used), 1)),
        ]
        for layer, used in counts.items()
    ]
    headings = ["layer", "uses of experts", "dropped", "", "busiest expert, of its even share", "idlest"]
    return section("Experts", table(headings, rows)) if rows else ""


def render_changes(summary: RunSummary) -> str:
    """Return the section on batch, codec and model; empty if nothing changed or was measured."""
    if not summary.changes:
        return ""
    shown = summary.changes[-_MAX_ROWS:]
    rows = [[f"{one.step:,}", _describe_change(one.event)] for one in reversed(shown)]
    hidden = len(summary.changes) - len(shown)
    before = f"<p>{safe(f'{hidden:,} earlier ones are not shown.')}</p>" if hidden else ""
    return section("Batch, codec and model", before + table(["after step", "what"], rows, num_numeric=1))


def _describe_change(event: Event) -> str:
    """Return the change or measurement as part of a sentence."""
    match event:
        case BatchChanged(global_batch=batch, start=start):
            return f"{batch:,} samples a step, from sample {start:,} on"
        case CodecChanged(codec=codec, before=before, codec_of=of, reason=reason):
            return f"codec {codec} of {of}s in place of {before}, {reason}"
        case ModelGrown(num_layers=num_layers, width=width, num_parameters=parameters, method=method):
            return f"{describe_size(num_layers, width)} with {parameters:,} parameters, by {method}"
        case GradientNoiseMeasured(noise_scale=None):
            return "gradient noise scale too large to be measured"
        case GradientNoiseMeasured(noise_scale=scale):
            assert scale is not None
            return f"gradient noise scale {number(scale)} samples"
        case _:
            raise AssertionError(event)
