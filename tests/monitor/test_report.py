import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from story import make_bucket, make_record, make_start, make_step, make_timed_step, make_times, tell_run

from paceline.errors import MissingExtraError, StorageError
from paceline.monitor import (
    CheckpointSkipped,
    Evaluated,
    EventError,
    Failed,
    Record,
    Showcased,
    StalenessMeasured,
    UnusedParameters,
    Warned,
    summarise,
    to_json,
    write_report,
)
from paceline.monitor.curves import as_floats, ratio_in_bins, smooth, thin
from paceline.monitor.gantt import draw_gantt
from paceline.monitor.html_elements import Pictures
from paceline.monitor.html_page import render_page
from paceline.monitor.picture import draw
from paceline.monitor.plot_style import DARK

EVIL = "<script>alert('x')</script>\"&\x1b[31m"
NO_METRICS = Evaluated(loss=math.nan, metrics={}, num_samples=0, duration_s=0.0)


class Page(HTMLParser):
    """What a browser would see: tags, what they point to, and text; it fails on tags that do not match."""

    VOID = ("meta", "img", "source", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "srcset", "href", "action", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def render(records: list[Record]) -> Page:
    summary = summarise(records)
    picture = draw(summary, DARK, titled=True)
    assert picture.startswith(b"\x89PNG")
    gantt = [draw_gantt(step, DARK) for step in summary.typical_steps[:1]]
    return Page(render_page(summary, 0, Pictures(picture, picture), Pictures(*gantt, *gantt) if gantt else None, None))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with a report, and two lines in its log that are no event."""
    directory = tmp_path_factory.mktemp("told")
    tell_run(directory / "events.jsonl", total_steps=400)
    with (directory / "events.jsonl").open("a") as log:
        log.write("{}\n{}\n")
    assert write_report(directory) == (directory / "report.png", directory / "report.html")
    return directory


def test_the_page_needs_nothing_but_itself(told: Path) -> None:
    text = (told / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    links = Page(text).links
    assert len(links) == 2
    assert all(link.startswith("data:image/png;base64,iVBOR") for link in links)
    assert re.findall(r"https?:|@import|url\(", text) == []


def test_the_picture_is_one_and_has_curves(told: Path) -> None:
    from PIL import Image

    with Image.open(told / "report.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24) or []}
        assert picture.size == (1760, 1104)
    assert {(0x3F, 0x57, 0xD6), (0xE0, 0x6A, 0x10)} < colours  # the training and the held-out curve


def test_the_page_tells_the_run(told: Path) -> None:
    text = Page((told / "report.html").read_text(encoding="utf-8")).text
    for expected in (
        "transformer_lm finished",
        "run first · started 20",
        "held-out loss1.56",
        "accuracy0.541",
        "50 steps were undone",
        "steps400of 400",
        "2 threads share one core",
        "restart 1: rank 1 was killed by SIGKILL",
        "rank 1 failed at step 250 with PeerTimeoutError: rank 0 is gone",
        "resumed from step-200",
        "checkpoints/step-400",
        "57.8 MB",
        "model.num_layers4",
        "sync.nameevery_step",
        "through yonder <script>alert(1)</script>",
        "2 lines of the log could not be read",
    ):
        assert expected in text


def test_nothing_in_a_text_becomes_markup() -> None:
    start = make_start(recipe=EVIL, device=EVIL, settings={EVIL: [EVIL]}, resumed_from=EVIL)
    page = render(
        [
            make_record(start, run=EVIL),
            make_record(CheckpointSkipped(path=EVIL, reason=EVIL)),
            make_record(Evaluated(loss=1.0, metrics={EVIL: 1.0}, num_samples=1, duration_s=0.1)),
            make_record(UnusedParameters(names=[EVIL])),
            make_record(Warned(message=EVIL)),
            make_record(Showcased(text=EVIL)),
            make_record(Failed(error=EVIL, message=EVIL, traceback=EVIL)),
        ]
    )
    assert "script" not in page.tags
    assert page.text.count("<script>alert('x')</script>\"&\\x1b[31m") >= 12
    assert "\x1b" not in page.text


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], "The log has no start."),
        ([make_record(make_start())], "unfinished"),
        ([make_record(make_start()), make_record(make_step(1), 1)], "steps1of 100"),
        ([make_record(make_step(step, loss=math.nan, learning_rate=math.inf), step) for step in (1, 2)], "–"),
        ([make_record(make_step(step, duration_s=0.0), step) for step in (1, 2)], "samples/s–"),
        ([make_record(make_step(1, loss=1e300), 1), make_record(make_step(2, loss=-1e300), 2)], "unfinished"),
        ([make_record(make_step(1), 1), make_record(NO_METRICS, 1)], "held-out lossnan"),
        (
            [make_record(Evaluated(loss=1.0, metrics={}, num_samples=1, duration_s=0.1), 9)],
            "held-out loss1best 1",
        ),
        ([make_record(make_start(recipe="名前 $x^2$ " + "long" * 99))], "名前 $x^2$"),
        ([make_record(make_start(), unix_s=math.nan), make_record(make_step(1), 1)], "at an unknown time"),
        ([make_record(Failed(error="E", message="m", traceback="t"), -1, rank=-1)], "failed with E: m"),
    ],
)
def test_a_run_of_which_little_is_known_has_a_report(records: list[Record], expected: str) -> None:
    assert expected in render(records).text


def test_a_directory_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EventError, match=r"a log must be a file, but got .*events\.jsonl"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_fails_leaves_the_former_one(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir / "report.png").write_bytes(b"former")

    def write_half(path: Path, content: bytes) -> int:
        path.open("wb").close()
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(StorageError, match="disk full"):
        write_report(run_dir)
    assert (run_dir / "report.png").read_bytes() == b"former"
    assert sorted(path.name for path in run_dir.iterdir()) == ["events.jsonl", "report.png"]


def test_without_matplotlib_the_pip_line_is_printed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'paceline[report]'")):
        write_report(run_dir)


def test_smoothing_has_no_lag_and_passes_over_what_is_missing() -> None:
    line = np.arange(100.0)
    np.testing.assert_allclose(smooth(line, 10)[:90], line[:90])
    np.testing.assert_allclose(smooth(as_floats([1.0, math.nan, math.inf, 3.0, None]), 5), [1, 1, 2, 3, 3])
    assert np.isnan(smooth(as_floats([None, None]), 1)).all()


def test_thinning_keeps_the_extremes() -> None:
    values = np.sin(np.arange(100_000.0))
    values[[777, 40_000]] = [50.0, -50.0]
    values[90_000:] = np.nan
    steps, thinned = thin(np.arange(100_000.0), values, max_bins=100)
    assert len(steps) <= 200
    assert (np.nanmax(thinned), np.nanmin(thinned)) == (50.0, -50.0)
    assert steps[-1] >= 99_000
    assert (np.diff(steps) > 0).all()


def test_a_ratio_in_bins_is_one_of_sums() -> None:
    steps, part, whole = np.arange(4.0), np.array([1.0, 0.0, 3.0, np.nan]), np.array([1.0, 3.0, 4.0, 5.0])
    at, shares = ratio_in_bins(steps, part, whole, max_bins=2)
    np.testing.assert_array_equal(at, [0, 2])
    np.testing.assert_array_equal(shares, [0.25, 0.75])
    assert np.isnan(ratio_in_bins(steps[:1], part[:1], np.zeros(1))[1]).all()


def tell_sampled_run(slower: tuple[float, ...] = (1.0,), num_buckets: int = 5) -> list[Record]:
    steps = [
        record
        for step in (20, 40)
        for rank, factor in enumerate(slower)
        for record in make_timed_step(step, num_buckets, factor, rank=rank)
    ]
    return [make_record(make_start()), make_record(make_step(1, wire_bytes=20_000_000), 1), *steps]


def test_the_page_says_what_communication_cost() -> None:
    page = render(tell_sampled_run(slower=(1.0, 1.5)))
    for expected in (
        "Communication",
        "A typical step of rank 0 takes 0.1 s: 90 ms computing, and 10 ms (10.0%) waiting",
        "The exchange takes 50 ms, of which 40 ms (80%) are hidden behind computing. (medians of 2 sampled steps.)",
        "sent20 MB200 MB/s, by rank 0",
        "416 MB4 MB78.002.0010.00400 MB/s10.00layers.5.weight and 1 more",  # the last bucket
        "1150.00135.0075.0060.0015.0020 MB",  # the other worker
    ):
        assert expected in page.text
    assert len(page.links) == 4


@pytest.mark.parametrize("num_buckets", [0, 1, 400])
def test_any_number_of_buckets_can_be_shown(num_buckets: int) -> None:
    page = render(tell_sampled_run(num_buckets=num_buckets))
    assert ("bucketgradients" in page.text) == (num_buckets > 0)
    assert "rankstep, ms" not in page.text  # one worker needs no comparison


def test_buckets_that_left_in_the_step_before_can_be_shown() -> None:
    early = make_bucket(0, ready_s=-0.03, began_s=-0.02, ended_s=0.01, landed_s=0.01, waited_s=0.005)
    times = make_times(waited_s=0.005, optimizer_began_s=None, optimizer_ended_s=None)
    assert "-30.0010.0030.00133 MB/s5.00" in render([make_record(early), make_record(times)]).text


def test_a_step_that_took_no_time_can_be_shown() -> None:
    assert "takes 0 s" in render([*make_timed_step(1, slower=0.0)]).text


def test_a_log_that_tells_nothing_of_communication_has_no_section(told: Path) -> None:
    page = Page((told / "report.html").read_text(encoding="utf-8"))
    assert "Communication" not in page.text
    assert "by rank 0" not in page.text
    assert not (told / "timeline.png").exists()


def test_a_parameters_name_becomes_no_markup() -> None:
    evil = [make_record(make_bucket(0, first_parameter=EVIL)), make_record(make_times())]
    assert "script" not in render(evil).tags


def test_the_timeline_is_written_beside_the_report(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("".join(f"{to_json(record)}\n" for record in tell_sampled_run()))
    write_report(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "events.jsonl",
        "report.html",
        "report.png",
        "timeline.png",
    ]
    from PIL import Image

    with Image.open(tmp_path / "timeline.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24) or []}
    assert {(0xE0, 0x6A, 0x10), (0xCF, 0x2F, 0x3F)} < colours  # the exchange, and waiting


def test_the_staleness_of_gradients_is_a_curve_of_its_mean_and_its_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(step: int, mean: float | None, largest: int | None) -> Record:
        event = StalenessMeasured(delays=[0, 2], counts=[3, 1], num_dropped=0, mean=mean, largest=largest)
        return make_record(event, step)

    records = [
        make_record(make_start()),
        *(make_record(make_step(step), step) for step in range(1, 7)),
        measured(2, 0.5, 2),
        measured(4, None, None),
        measured(6, 9.0, 9),
        make_record(make_start(start_step=4), 4),  # which undoes the last
        *(make_record(make_step(step), step) for step in range(5, 9)),
        measured(8, 1.5, 3),
    ]
    monkeypatch.setattr("paceline.monitor.picture.to_png", lambda figure: figure)
    figure: Any = draw(summarise(records), DARK, titled=True)
    (axes,) = [one for one in figure.axes if "delay of gradients" in one.get_title(loc="left") + one.get_title()]
    curves = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    assert curves["mean"] == ([2, 8], [0.5, 1.5])
    assert curves["largest"] == ([2, 8], [2, 3])
    without: Any = draw(summarise(records[:3]), DARK, titled=True)
    assert len(without.axes) == 4
