"""The report of a run: a picture of its curves, and a page that needs nothing but itself."""

import os
from pathlib import Path

from paceline.monitor.page import render_page
from paceline.monitor.picture import DARK, LIGHT, draw
from paceline.monitor.reader import read_log, summarise


def write_report(run_dir: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write ``report.png`` and ``report.html`` into `run_dir` from the log there, and return their paths.

    They are made anew each time, and each appears whole or not at all. A run of which little is known yet
    gives a report that says so.

    Raises:
        MissingExtraError: matplotlib is not installed.
        EventError: `run_dir` holds no log.
    """
    run_dir = Path(run_dir)
    records = read_log(run_dir / "events.jsonl")
    summary = summarise(records)
    light, dark = (draw(summary, palette, titled=False) for palette in (LIGHT, DARK))
    picture, page = run_dir / "report.png", run_dir / "report.html"
    _write_whole(picture, draw(summary, LIGHT, titled=True))
    _write_whole(page, render_page(summary, records.num_skipped, light, dark).encode("utf-8"))
    return picture, page


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
