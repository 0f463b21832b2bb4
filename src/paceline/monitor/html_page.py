"""The page of a report: one HTML file that loads nothing from the network, and escapes every text."""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.resources import files
from math import isfinite
from typing import Any

from paceline.monitor.communication import render_communication
from paceline.monitor.events import Record
from paceline.monitor.formatting import describe, duration, number, share, size, workers
from paceline.monitor.html_elements import Pictures, picture, safe, section, table, tiles
from paceline.monitor.pipeline import render_pipeline
from paceline.monitor.reader import RunSummary
from paceline.monitor.report_sections import (
    render_changes,
    render_data,
    render_experts,
    render_memory,
    render_plan,
    render_stragglers,
)
from paceline.monitor.usage import list_usage_tiles, render_usage

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def render_page(
    summary: RunSummary, num_skipped: int, curves: Pictures, gantt: Pictures | None, pipeline: Pictures | None
) -> str:
    """Return the page.

    Args:
        summary: Summary of the log.
        num_skipped: Number of lines of the log that could not be read.
        curves: Picture of loss and speed by step.
        gantt: Timeline picture of a sampled step, if any.
        pipeline: Timeline picture of a sampled pipeline step, if any.
    """
    parts = [
        _header(summary),
        _failure(summary),
        _tiles(summary),
        _curves(curves),
        render_communication(summary.typical_steps, gantt) if gantt else "",
        render_pipeline(summary.pipeline_steps, pipeline),
        render_plan(summary),
        render_usage(summary),
        render_memory(summary),
        render_stragglers(summary),
        render_data(summary),
        render_experts(summary),
        render_changes(summary),
        _notices(summary, num_skipped),
        _showcase(summary),
        _evaluations(summary),
        _history(summary),
        _checkpoints(summary),
        _settings(summary),
        "<footer>Written by Paceline from events.jsonl.</footer>",
    ]
    title = summary.starts[-1].event.recipe if summary.starts else "A run"
    style = files("paceline.monitor").joinpath("report.css").read_text(encoding="utf-8")
    return _PAGE.format(title=safe(title), style=style, body="\n".join(part for part in parts if part))


def _header(summary: RunSummary) -> str:
    state = f'<span class="state {summary.state}">{summary.state.replace("_", " ")}</span>'
    if not summary.starts:
        return f"<header><h1>A run {state}</h1><p class=facts>The log has no start.</p></header>"
    first, last = summary.starts[0], summary.starts[-1].event
    facts = [
        f"run {first.run}",
        f"started {_when(first)}",
        workers(last),
        f"{last.num_parameters:,} parameters",
        f"global batch {last.global_batch:,}",
    ]
    return f"<header><h1>{safe(last.recipe)} {state}</h1><p class=facts>{safe(' · '.join(facts))}</p></header>"


def _when(record: Record) -> str:
    try:
        return datetime.fromtimestamp(record.unix_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"


def _tiles(summary: RunSummary) -> str:
    last = summary.steps[-1].step if summary.steps else 0
    total = f"of {summary.starts[-1].event.total_steps:,}" if summary.starts else ""
    losses = [one.event.loss for one in summary.evaluations if isfinite(one.event.loss)]
    best = f"best {number(min(losses))}" if losses else ""
    overall = "" if summary.samples_per_s_overall is None else f"{number(summary.samples_per_s_overall)} overall"
    undone = f"{summary.num_lost_steps:,} steps were undone" if summary.num_lost_steps else ""
    rate = "" if summary.wire_bytes_per_s is None else f"{size(summary.wire_bytes_per_s)}/s, by rank 0"
    sent = [] if summary.wire_bytes is None else [("sent", size(summary.wire_bytes), rate)]
    content = [
        ("held-out loss", _known(summary.held_out_loss, number), best),
        *((name, number(value), "held out") for name, value in _final_metrics(summary).items()),
        ("steps", f"{last:,}", total),
        ("samples/s", _known(summary.samples_per_s, number), overall),
        ("communication", _known(summary.communication_share, share), "of the steps' time"),
        ("data stall", _known(summary.data_share, share), _describe_stall(summary)),
        *sent,
        ("time spent", duration(summary.elapsed_s), undone),
        *list_usage_tiles(summary),
    ]
    return tiles(content)


def _describe_stall(summary: RunSummary) -> str:
    stage = summary.slowest_stage
    return f"of the steps' time, by {stage}" if stage else "of the steps' time"


def _count(value: int) -> str:
    return f"{value:,}" if value >= 0 else "–"


def _known(value: float | None, formatter: Callable[[float], str]) -> str:
    return "–" if value is None else formatter(value)


def _final_metrics(summary: RunSummary) -> dict[str, float]:
    if summary.finish is not None and summary.finish.event.metrics:
        return summary.finish.event.metrics
    return summary.evaluations[-1].event.metrics if summary.evaluations else {}


def _curves(curves: Pictures) -> str:
    shown = "Loss, learning rate, samples per second and time of a step, against the step"
    return f"<section class=curves>{picture(curves, shown)}</section>"


def _failure(summary: RunSummary) -> str:
    if summary.state != "failed":
        return ""
    paragraphs = [
        f"<p>{safe(describe(one) or '')}</p>"
        f"<details><summary>Traceback</summary><pre>{safe(one.event.traceback)}</pre></details>"
        for one in reversed(summary.failures)
    ]
    return section("Why it failed", "".join(paragraphs), "alarm")


def _notices(summary: RunSummary, num_skipped: int) -> str:
    rows = [[_count(one.step), _count(one.rank), one.event.message] for one in summary.warnings]
    parts = [table(["step", "rank", "warning"], rows, num_numeric=2)] if rows else []
    if summary.unused_parameters:
        parts.append(f"<p>Parameters that no rank used: {safe(', '.join(summary.unused_parameters))}</p>")
    if num_skipped:
        parts.append(f"<p>{num_skipped:,} lines of the log could not be read and are not in this report.</p>")
    return section("Warnings", "".join(parts), "notice") if parts else ""


def _showcase(summary: RunSummary) -> str:
    if summary.showcase is None:
        return ""
    return section("What it can do", f"<pre>{safe(summary.showcase.event.text)}</pre>")


def _evaluations(summary: RunSummary) -> str:
    names = list(dict.fromkeys(name for one in summary.evaluations for name in one.event.metrics))
    rows = [
        [
            f"{one.step:,}",
            number(one.event.loss),
            *(_known(one.event.metrics.get(name), number) for name in names),
            f"{one.event.num_samples:,}",
            duration(one.event.duration_s),
        ]
        for one in reversed(summary.evaluations)
    ]
    headings = ["step", "held-out loss", *names, "samples", "took"]
    return section("Evaluations", table(headings, rows, num_numeric=len(headings))) if rows else ""


def _history(summary: RunSummary) -> str:
    stops: list[Record] = [*summary.restarts, *summary.preemptions, *summary.failures]
    if len(summary.starts) < 2 and not stops and not any(start.event.resumed_from for start in summary.starts):
        return ""
    finish: list[Record] = [summary.finish] if summary.finish is not None else []
    records = sorted([*summary.starts, *stops, *finish], key=lambda record: record.unix_s)
    rows = [[_count(one.step), _count(one.rank), _when(one), describe(one) or ""] for one in records]
    return section("Starts and stops", table(["step", "rank", "when", "what"], rows, num_numeric=2))


def _checkpoints(summary: RunSummary) -> str:
    rows = [
        (
            one.unix_s,
            [f"{one.step:,}", size(one.event.num_bytes), duration(one.event.duration_s), one.event.path],
        )
        for one in summary.checkpoints
    ]
    rows += [
        (one.unix_s, [f"{one.step:,}", "–", "–", f"{one.event.path} was skipped: {one.event.reason}"])
        for one in summary.skipped_checkpoints
    ]
    cells = [row for _, row in sorted(rows, reverse=True)]
    return section("Checkpoints", table(["step", "size", "took", "path"], cells, num_numeric=3)) if cells else ""


def _settings(summary: RunSummary) -> str:
    if not summary.starts:
        return ""
    rows = [[path, value] for path, value in _flatten(summary.starts[-1].event.settings)]
    return section("Settings", table(["name", "value"], rows, code=True))


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
