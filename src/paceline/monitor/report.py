"""The report of a run: a picture of its curves, and a self-contained page."""

import contextlib
import os
from pathlib import Path

from paceline.errors import storing
from paceline.monitor.gantt import draw_gantt
from paceline.monitor.html_elements import Pictures
from paceline.monitor.html_page import render_page
from paceline.monitor.picture import draw
from paceline.monitor.pipeline import typical_pipeline_step
from paceline.monitor.pipeline_picture import draw_pipeline
from paceline.monitor.plot_style import DARK, LIGHT
from paceline.monitor.reader import read_log, summarise


def write_report(run_dir: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write ``report.png`` and ``report.html`` into `run_dir` from the log there, and return their paths.

    They are rewritten each time, and each is replaced atomically. A run with little data yet
    gives a report that says so. If steps were sampled, ``timeline.png`` shows the timeline of one of them,
    and ``pipeline.png`` that of a pipeline's ranks.

    Raises:
        MissingExtraError: matplotlib is not installed.
        EventError: `run_dir` holds no log.
        StorageError: The disk is full or read-only.
    """
    run_dir = Path(run_dir)
    records = read_log(run_dir / "events.jsonl")
    summary = summarise(records)
    palettes = (LIGHT, DARK)
    curves = Pictures(*(draw(summary, palette, titled=False) for palette in palettes))
    typical = summary.typical_steps
    gantt = Pictures(*(draw_gantt(typical[0], palette) for palette in palettes)) if typical else None
    piped = typical_pipeline_step(summary.pipeline_steps)
    pipeline = Pictures(*(draw_pipeline(piped, palette) for palette in palettes)) if piped is not None else None
    picture, page = run_dir / "report.png", run_dir / "report.html"
    _write_whole(picture, draw(summary, LIGHT, titled=True))
    if gantt is not None:
        _write_whole(run_dir / "timeline.png", gantt.light)
    if pipeline is not None:
        _write_whole(run_dir / "pipeline.png", pipeline.light)
    _write_whole(page, render_page(summary, records.num_skipped, curves, gantt, pipeline).encode("utf-8"))
    return picture, page


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with storing(path):
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):  # on a read-only disk there is none
                temporary.unlink()
