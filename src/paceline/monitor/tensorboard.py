"""Export of a log to TensorBoard."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import missing_extra
from paceline.monitor.events import Record, StepFinished
from paceline.monitor.formatting import printable
from paceline.monitor.reader import RunSummary, read_log, summarise

_SUFFIX = ".paceline"


def export_tensorboard(run_dir: str | os.PathLike[str], out_dir: str | os.PathLike[str]) -> int:
    """Write the run in `run_dir` to `out_dir` as a TensorBoard event file; return how many scalars it has.

    If steps were repeated after a restart only the last ones count, as everywhere. An event file that an
    earlier export left in `out_dir` is replaced; other event files stay.

    Raises:
        MissingExtraError: The package tensorboard is not installed.
        EventError: `run_dir` holds no log.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise missing_extra("tensorboard", "tensorboard", "exporting to TensorBoard") from error
    summary = summarise(read_log(Path(run_dir) / "events.jsonl"))
    for previous in Path(out_dir).glob(f"events.out.tfevents.*{_SUFFIX}"):
        previous.unlink()
    writer = EventFileWriter(os.fspath(out_dir), filename_suffix=_SUFFIX)
    num_scalars = 0
    try:
        for record, tag, value in _scalars(summary):
            content = {"value": [{"tag": tag, "simple_value": value}]}
            writer.add_event(Event(wall_time=record.unix_s, step=record.step, summary=content))
            num_scalars += 1
        for record, tag, text in _texts(summary):
            content = {"value": [_text_value(tag, text)]}
            writer.add_event(Event(wall_time=record.unix_s, step=record.step, summary=content))
    finally:
        writer.close()
    return num_scalars


def _scalars(summary: RunSummary) -> Iterator[tuple[Record, str, float]]:
    for step in summary.steps:
        for tag, value in _step_scalars(step.event).items():
            if value is not None:
                yield step, tag, value
    for measured in summary.distances:
        yield measured, "workers/distance_from_consensus", measured.event.distance
    for stale in summary.staleness:
        if stale.event.mean is not None and stale.event.largest is not None:
            yield stale, "workers/mean_delay", stale.event.mean
            yield stale, "workers/largest_delay", float(stale.event.largest)
    for evaluation in summary.evaluations:
        yield evaluation, "loss/held_out", evaluation.event.loss
        for name, value in evaluation.event.metrics.items():
            yield evaluation, f"held_out/{printable(name)}", value
        for name, value in (evaluation.event.unaveraged or {}).items():
            yield evaluation, f"held_out_unaveraged/{printable(name)}", value


def _step_scalars(step: StepFinished) -> dict[str, float | None]:
    timed = step.duration_s > 0
    return {
        "loss/train": step.loss,
        "optimizer/learning_rate": step.learning_rate,
        "optimizer/gradient_norm": step.gradient_norm,
        "optimizer/loss_scale": step.loss_scale,
        "speed/samples_per_s": step.num_samples / step.duration_s if timed else None,
        "speed/communication_share": step.communication_s / step.duration_s if timed else None,
        "speed/data_share": step.data_s / step.duration_s if timed else None,
        "speed/wire_bytes": step.wire_bytes,
    }


def _texts(summary: RunSummary) -> Iterator[tuple[Record, str, str]]:
    for start in summary.starts:
        yield start, "settings", json.dumps(start.event.settings, indent=2)
    if summary.showcase is not None:
        yield summary.showcase, "showcase", printable(summary.showcase.event.text)


def _text_value(tag: str, text: str) -> dict[str, Any]:
    """Return a value for TensorBoard's text plugin, formatted as code: the plugin would read it as Markdown."""
    code = "\n".join(f"    {line}" for line in text.split("\n"))
    return {
        "tag": tag,
        "metadata": {"plugin_data": {"plugin_name": "text"}},
        "tensor": {"dtype": "DT_STRING", "tensor_shape": {}, "string_val": [code.encode()]},
    }
