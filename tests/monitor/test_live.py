import io
import math
import re
import threading
from pathlib import Path

import pytest
from rich.console import Console
from story import make_bucket, make_record, make_start, make_step, make_times

from paceline.monitor import (
    BadSampleFound,
    CheckpointSaved,
    CheckpointSkipped,
    Evaluated,
    Event,
    EventLog,
    Failed,
    LiveView,
    Preempted,
    Restarted,
    RunFinished,
    SharesChanged,
    Showcased,
    SlowWorker,
    StoppedEarly,
    UnusedParameters,
    Warned,
    read_log,
)

FINISH = RunFinished(held_out_loss=1.5, metrics={"accuracy": 0.541}, duration_s=63.0, samples_per_s=512.34)


def show(*events: Event, terminal: bool = False, width: int = 100, rank: int = 0, step: int = 5) -> str:
    shown = io.StringIO()
    view = LiveView(Console(file=shown, force_terminal=terminal, width=width, color_system=None))
    for event in events:
        view.show(make_record(event, step, rank=rank))
    view.close()
    return shown.getvalue()


def test_without_a_terminal_only_lines_that_matter_are_printed() -> None:
    evaluated = Evaluated(loss=2.0, metrics={"accuracy": 0.5}, num_samples=1000, duration_s=1.2)
    saved = CheckpointSaved(path="step-5", num_bytes=1, duration_s=0.1)
    start = make_start(start_step=2, resumed_from="step-2")
    shown = show(start, make_step(5), saved, evaluated, make_step(6), Showcased(text="a\nb"), FINISH)
    assert shown.splitlines() == [
        "transformer_lm: 4,816,128 parameters, 2 workers on cpu, steps 2 to 100, 64 samples each, resumed from step-2",
        "step 5: held-out loss 2, accuracy 0.5 (1,000 samples in 1.2 s)",
        "finished: held-out loss 1.5, accuracy 0.541, 1 min 03 s, 512.3 samples/s",
        "    a",
        "    b",
    ]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    ("event", "line"),
    [
        (CheckpointSkipped(path="step-4", reason="damaged"), "checkpoint step-4 is skipped: damaged"),
        (UnusedParameters(names=["a.weight", "b"]), "parameters that no rank used: a.weight, b"),
        (
            SlowWorker(slow_rank=2, factor=3.04, samples_per_s=12.0, others_samples_per_s=36.5),
            "step 5: rank 2 computes 3.0 times slower than the others: 12 samples/s while it computes, the others 36.5",
        ),
        (
            SharesChanged(shares=[12, 4], start=640, samples_per_s=[36.5, math.nan]),
            "step 5: shares follow speed: 12, 4 samples of a global batch",
        ),
        (
            BadSampleFound(sample=7, path="a.tar", key="cat/7", reason="truncated", action="skip"),
            "step 5: sample 7 (a.tar cat/7) is bad, skip: truncated",
        ),
        (Warned(message="two\nlines"), "warning: two lines"),
        (Restarted(attempt=2, reason="rank 1 was killed"), "restart 2: rank 1 was killed"),
        (
            Evaluated(
                loss=1.5,
                metrics={"accuracy": 0.25},
                num_samples=10,
                duration_s=2.0,
                is_best=True,
                unaveraged={"loss": 2.0},
            ),
            "step 5: held-out loss 1.5, accuracy 0.25, without averages 2, the best so far (10 samples in 2 s)",
        ),
        (StoppedEarly(reason="good enough"), "ended after step 5: good enough"),
        (
            Preempted(checkpoint="step-5", signal="SIGTERM"),
            "stopped by SIGTERM at step 5; a new start resumes from step-5",
        ),
        (Failed(error="OSError", message="no", traceback="..."), "rank 3 failed at step 5 with OSError: no"),
    ],
)
def test_what_matters_gets_one_line(event: Event, line: str, terminal: bool) -> None:
    shown = show(make_start(), event, rank=3, terminal=terminal)
    assert line in [one.strip("\r") for one in shown.split("\n")] or f"{line}\n" in shown


def show_failures(*failures: tuple[int, Event]) -> list[str]:
    shown = io.StringIO()
    view = LiveView(Console(file=shown, width=100, color_system=None))
    for rank, event in failures:
        view.show(make_record(event, 5, rank=rank))
    view.close()
    return shown.getvalue().splitlines()


def test_an_error_that_several_ranks_have_is_shown_once() -> None:
    lost, own = Failed(error="OSError", message="no", traceback=""), Failed(error="E", message="m", traceback="")
    again = Restarted(attempt=1, reason="why")
    shown = show_failures(
        (2, lost), (0, lost), (1, own), (3, lost), (-1, again), (0, lost), (0, make_start()), (0, lost)
    )
    assert shown[:3] == [
        "rank 0, 2, 3 failed at step 5 with OSError: no",
        "rank 1 failed at step 5 with E: m",
        "restart 1: why",
    ]
    assert shown[-1] == "rank 0 failed at step 5 with OSError: no"
    assert len(shown) == 5


def test_a_warning_that_several_ranks_have_is_shown_once() -> None:
    shown = io.StringIO()
    view = LiveView(Console(file=shown, width=100))
    for step, rank, message in (
        (-1, 0, "no index"),
        (-1, 1, "no index"),
        (5, 0, "slow"),
        (9, 1, "slow"),
        (9, 0, "slow"),
    ):
        view.show(make_record(Warned(message=message), step, rank=rank))
    assert shown.getvalue().splitlines() == ["warning: no index", "warning: slow", "warning: slow"]


def test_an_error_that_another_rank_quotes_is_told_once() -> None:
    full = Failed(error="StorageError", message="step-4 could not be written: the disk is full", traceback="")
    lost = Failed(
        error="CommunicationError",
        message=f"lost its peers: rank 0 stopped: {full.error}: {full.message}",
        traceback="",
    )
    assert show_failures((0, full), (1, lost)) == [
        "rank 0 failed at step 5 with StorageError: step-4 could not be written: the disk is full",
        "rank 1 failed at step 5 with CommunicationError: lost its peers: rank 0 stopped: StorageError",
    ]


def test_an_error_begins_with_the_line_it_came_from() -> None:
    own = Failed(error="E", message="m", traceback="", place="mine.py:3")
    assert show_failures((0, own)) == ["mine.py:3: rank 0 failed at step 5 with E: m"]


def test_an_error_is_not_held_back_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may need minutes to notice that they wait for who has failed."""
    shown, stop = io.StringIO(), threading.Event()
    view = LiveView(Console(file=shown, width=100))
    with EventLog(tmp_path / "log", run="r", rank=1) as log:
        log.write(Failed(error="E", message="m", traceback=""), step=5)
    thread = threading.Thread(target=view.run, args=(tmp_path / "log", stop))
    thread.start()
    while "rank 1 failed" not in shown.getvalue():
        assert thread.is_alive()
        thread.join(0.05)
    stop.set()
    thread.join()


def test_a_failure_of_the_launcher_names_no_rank() -> None:
    assert show(Failed(error="E", message="m", traceback=""), rank=-1, step=-1) == "failed with E: m\n"


def test_a_showcase_is_shown_once_whichever_comes_first() -> None:
    assert show(make_start(), FINISH, Showcased(text="after")).splitlines()[-1] == "    after"
    assert show(make_start(), Showcased(text="before"), FINISH).count("before") == 1
    assert "early" not in show(make_start(), Showcased(text="early"))


def test_in_a_terminal_a_bar_shows_the_latest_numbers() -> None:
    evaluated = Evaluated(loss=1.75, metrics={}, num_samples=10, duration_s=0.1)
    shown = io.StringIO()
    view = LiveView(Console(file=shown, force_terminal=True, width=100, color_system=None))
    view.show(make_record(make_start(total_steps=200)))
    view.show(make_record(evaluated, 0))
    for step in range(1, 51):
        view.show(make_record(make_step(step), step, time_s=step * 0.5))
    assert view._live is not None
    view._live.refresh()
    bar, numbers = shown.getvalue().splitlines()[-2:]
    assert "step 50/200 ━" in bar
    assert bar.endswith(" 25%, 1 min 15 s left")
    assert numbers == "loss 2   held-out 1.75   640 samples/s   communication 20%"
    view.close()
    assert "\x1b[?25h" in shown.getvalue()  # the cursor is back


def test_the_loss_in_the_bar_is_smoothed_and_a_nan_shows_at_once() -> None:
    def shown_loss(*losses: float) -> str:
        steps = [make_step(1, loss=loss) for loss in losses]
        frames = show(make_start(), *steps, Warned(message="x"), terminal=True)
        return frames[frames.rindex("loss ") :].split()[1]

    assert shown_loss(1.0, 2.0) == "1.1"
    assert shown_loss(1.0, math.nan) == "nan"
    assert shown_loss(1.0, math.nan, 3.0) == "3"
    assert shown_loss(1.0, math.inf) == "inf"


@pytest.mark.parametrize("width", [1, 2, 5, 17, 40, 80, 300])
def test_no_width_breaks_the_bar(width: int) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=width, color_system=None)
    view = LiveView(console)
    view.show(make_record(make_start(total_steps=0)))
    for step, resized in enumerate((width, 2 * width, max(1, width // 2))):
        console.width = resized
        view.show(make_record(make_step(step, loss=math.nan, duration_s=0.0), step, time_s=math.inf))
        shown.truncate(0)
        assert view._live is not None
        view._live.refresh()
        lines = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", shown.getvalue()).splitlines()
        assert len(lines) >= 2
        assert all(len(line.strip("\r\x00")) <= max(1, resized - 1) for line in lines)
    view.show(make_record(FINISH))


def test_a_dumb_terminal_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in show(make_start(), make_step(1), FINISH, terminal=True)


@pytest.mark.parametrize("terminal", [False, True])
def test_texts_are_neither_markup_nor_commands_to_the_terminal(terminal: bool) -> None:
    evil = "[red]x[/red] [/] \x1b]0;owned\x07 \x9b31m \r \u202e \ud800 \x00 é"
    shown = show(make_start(recipe=evil), Warned(message=evil), Showcased(text=evil), FINISH, terminal=terminal)
    assert shown.count(r"[red]x[/red] [/] \x1b]0;owned\x07 \x9b31m \r \u202e \ud800 \x00 é") == 3
    assert "\x07" not in shown
    assert "\x1b]" not in shown


def test_an_output_that_is_not_unicode_gets_escapes() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    view = LiveView(Console(file=file, force_terminal=True, width=60, color_system=None))
    view.show(make_record(make_start(recipe="é")))
    view.show(make_record(make_step(50), 50))
    assert view._live is not None
    view._live.refresh()
    view.show(make_record(Showcased(text="▸")))
    view.show(make_record(FINISH))
    file.flush()
    shown = raw.getvalue().decode("ascii")
    assert r"\xe9: 4,816,128" in shown
    assert "#####-----" in shown
    assert r"\u25b8" in shown


def test_a_whole_run_is_followed_to_its_end(run_dir: Path) -> None:
    shown, stop = io.StringIO(), threading.Event()
    stop.set()
    LiveView(Console(file=shown, force_terminal=False)).run(run_dir / "events.jsonl", stop)
    lines = shown.getvalue().splitlines()
    assert lines[0].startswith("transformer_lm")
    assert sum(line.startswith("step ") for line in lines) == 6 + 5
    assert lines[-1] == "    through yonder <script>alert(1)</script>"


def test_an_offset_leaves_out_what_was_before(tmp_path: Path) -> None:
    path, shown, stop = tmp_path / "log", io.StringIO(), threading.Event()
    with EventLog(path, run="first", rank=0) as log:
        log.write(Warned(message="old"), step=1)
        offset = path.stat().st_size
        log.write(Warned(message="new"), step=2)
    stop.set()
    LiveView(Console(file=shown, force_terminal=False)).run(path, stop, offset=offset)
    assert shown.getvalue() == "warning: new\n"
    assert len(read_log(path)) == 2


def test_sampled_steps_change_nothing_in_the_view() -> None:
    sampled = [make_bucket(number) for number in range(50)] + [make_times()]
    for terminal in (False, True):
        without = show(make_start(), make_step(1), make_step(2), FINISH, terminal=terminal)
        assert show(make_start(), make_step(1), *sampled, make_step(2), FINISH, terminal=terminal) == without
