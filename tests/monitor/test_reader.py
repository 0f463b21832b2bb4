import threading
import time
from pathlib import Path

import pytest
from story import make_record, make_start, make_step, tell_run

from paceline.monitor import (
    CheckpointSaved,
    Evaluated,
    Event,
    EventError,
    EventLog,
    Failed,
    Preempted,
    Record,
    Restarted,
    RunFinished,
    Showcased,
    UnusedParameters,
    Warned,
    follow,
    read_log,
    summarise,
    to_json,
)
from paceline.monitor.events import RolledBack
from paceline.monitor.reader import find_last_step

FINISH = RunFinished(held_out_loss=0.5, metrics={}, duration_s=9.0, samples_per_s=10.0)


def evaluated(loss: float) -> Evaluated:
    return Evaluated(loss=loss, metrics={}, num_samples=10, duration_s=0.1)


def test_a_last_line_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    lines = [to_json(make_record(make_step(step), step)) for step in range(3)]
    (tmp_path / "log").write_text("\n".join(lines)[:-9])
    records = read_log(tmp_path / "log")
    assert [record.step for record in records] == [0, 1]
    assert records.num_skipped == 0


def test_lines_that_are_no_event_are_counted(tmp_path: Path) -> None:
    good = to_json(make_record(make_step(4), 4)).encode()
    future = good.replace(b"step_finished", b"step_dreamt_of")
    (tmp_path / "log").write_bytes(b"\n".join([good, future, b"", b"\xff\x00\xfe", good[:50], good, b""]))
    records = read_log(tmp_path / "log")
    assert [record.step for record in records] == [4, 4]
    assert records.num_skipped == 3


def test_no_log_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(EventError, match=r"a log must be a file, but got .*absent; give the directory of a run"):
        read_log(tmp_path / "absent")


def test_following_waits_for_the_file_and_for_the_rest_of_a_line(tmp_path: Path) -> None:
    path, stop = tmp_path / "log", threading.Event()
    seen: list[Record] = []
    follower = threading.Thread(target=lambda: seen.extend(follow(path, stop, poll_s=0.005)))
    follower.start()
    line = to_json(make_record(make_step(1), 1))
    time.sleep(0.02)
    with path.open("w") as file:
        for piece in (line[:30], line[30:] + "\n", "no event\n", to_json(make_record(make_step(2), 2))):
            file.write(piece)
            file.flush()
            time.sleep(0.02)
    stop.set()
    follower.join(30)
    assert [record.step for record in seen] == [1]


def test_following_reads_what_was_written_before_the_stop(tmp_path: Path) -> None:
    stop = threading.Event()
    with EventLog(tmp_path / "log", run="first", rank=0) as log:
        records = follow(tmp_path / "log", stop, poll_s=0.005)
        log.write(make_step(1), step=1)
        assert next(records).step == 1
        log.write(make_step(2), step=2)
        log.write(make_step(3), step=3)
        stop.set()
        assert [record.step for record in records] == [2, 3]


def test_following_goes_on_in_a_file_that_takes_the_place_of_the_first(tmp_path: Path) -> None:
    stop = threading.Event()
    with EventLog(tmp_path / "log", run="first", rank=0) as log:
        records = follow(tmp_path / "log", stop, poll_s=0.005, offset=0)
        log.write(make_step(1), step=1)
        assert next(records).step == 1
        log.write(make_step(2), step=2)
        (tmp_path / "log").rename(tmp_path / "old")
        log.write(make_step(3), step=3)
        stop.set()
        assert [record.step for record in records] == [2, 3]


def test_following_nothing_ends_with_the_stop(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert list(follow(tmp_path / "absent", stop)) == []


def test_a_restart_undoes_the_steps_after_its_start() -> None:
    summary = summarise(
        [
            make_record(make_start(), 0),
            *(make_record(make_step(step, loss=1.0), step) for step in range(1, 7)),
            make_record(evaluated(0.9), 2),
            make_record(evaluated(0.8), 5),
            make_record(Restarted(attempt=1, reason="a worker died"), 6),
            make_record(make_start(start_step=3, resumed_from="step-3"), 3),
            *(make_record(make_step(step, loss=2.0), step) for step in range(4, 6)),
        ]
    )
    assert [(one.step, one.event.loss) for one in summary.steps] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert [one.step for one in summary.evaluations] == [2]
    assert summary.num_lost_steps == 3
    assert [one.event.reason for one in summary.restarts] == ["a worker died"]
    assert [one.event.start_step for one in summary.starts] == [0, 3]
    assert summary.state == "unfinished"


def test_of_a_step_that_was_made_twice_the_last_counts() -> None:
    summary = summarise([make_record(make_step(1, loss=loss), 1) for loss in (3.0, 4.0)])
    assert [one.event.loss for one in summary.steps] == [4.0]
    assert summary.num_lost_steps == 1


def test_a_run_that_goes_on_after_its_finish_is_not_finished() -> None:
    showcase = make_record(Showcased(text="old"), 3)
    records = [
        make_record(make_start()),
        showcase,
        make_record(FINISH, 3),
        make_record(make_start(start_step=3), 3),
    ]
    assert summarise(records[:3]).state == "finished"
    assert summarise(records[:3]).showcase == showcase
    summary = summarise(records)
    assert (summary.state, summary.finish, summary.showcase) == ("unfinished", None, None)


@pytest.mark.parametrize(
    ("last", "state"),
    [
        (FINISH, "finished"),
        (Failed(error="ValueError", message="no", traceback=""), "failed"),
        (Preempted(checkpoint="step-3", signal="SIGTERM"), "preempted"),
        (Restarted(attempt=1, reason="x"), "unfinished"),
        (make_step(3), "unfinished"),
    ],
)
def test_the_state_is_what_was_said_last(last: Failed, state: str) -> None:
    assert summarise([make_record(make_start()), make_record(last, 3)]).state == state
    assert summarise([]).state == "empty"


def test_speed_counts_the_median_step_and_all_the_time_spent() -> None:
    durations_s = [4.0, 0.5, 0.5, 0.5, 0.0]
    steps = [make_step(1 + at, duration_s=took, communication_s=took / 4) for at, took in enumerate(durations_s)]
    records = [make_record(make_start(), unix_s=100.0)]
    records += [make_record(step, 1 + at, unix_s=101.0 + at) for at, step in enumerate(steps)]
    records += [make_record(Warned(message="another host's clock"), 5, rank=1, unix_s=9999.0)]
    records += [
        make_record(make_start(start_step=5), 5, unix_s=5000.0),
        make_record(FINISH, 5, unix_s=5003.0),
    ]
    summary = summarise(records)
    assert summary.samples_per_s == (64 / 0.5 + 64 / 0.5) / 2
    assert summary.elapsed_s == 5.0 + 3.0
    assert summary.samples_per_s_overall == 5 * 64 / 8.0
    assert summary.communication_share == pytest.approx(0.25)
    assert summary.held_out_loss == 0.5


def test_a_summary_of_nothing_knows_nothing() -> None:
    summary = summarise([])
    assert summary.samples_per_s is None
    assert summary.samples_per_s_overall is None
    assert summary.communication_share is None
    assert summary.held_out_loss is None


def test_a_summary_lists_what_else_was_said() -> None:
    saved = CheckpointSaved(path="step-1", num_bytes=10, duration_s=0.1)
    records = [make_record(event, 1) for event in (saved, Warned(message="w"), evaluated(0.7))]
    records += [make_record(UnusedParameters(names=names), 1) for names in (["b", "a"], ["a"])]
    summary = summarise(records)
    assert [one.event for one in summary.checkpoints] == [saved]
    assert [one.event.message for one in summary.warnings] == ["w"]
    assert summary.unused_parameters == ["a", "b"]
    assert summary.held_out_loss == 0.7


def test_a_whole_run_can_be_summarised(tmp_path: Path) -> None:
    tell_run(tmp_path / "log", total_steps=80)
    summary = summarise(read_log(tmp_path / "log"))
    assert [one.step for one in summary.steps] == list(range(1, 81))
    assert [one.step for one in summary.evaluations] == list(range(8, 81, 8))
    assert summary.num_lost_steps == 10
    assert summary.state == "finished"


@pytest.mark.parametrize(
    ("events", "step"),
    [
        ([], -1),
        ([(make_start(), 0)], 0),
        ([(make_start(), 0), (make_step(1, loss=1.0), 1), (make_step(2, loss=1.0), 2), (evaluated(1.0), 2)], 2),
        ([(make_step(9, loss=1.0), 9), (make_start(start_step=4, resumed_from="step-4"), 4)], 4),
        ([(make_step(9, loss=1.0), 9), (RolledBack(checkpoint="step-4", from_step=9, skipped_steps=[]), 4)], 4),
    ],
)
def test_a_log_goes_on_after_its_last_step(tmp_path: Path, events: list[tuple[Event, int]], step: int) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, run="r", rank=0) as log:
        for event, at in events:
            log.write(event, step=at)
    with path.open("a") as file:
        file.write('{"kind": "step_fin')
    assert find_last_step(path) == step
    path.unlink()
    assert find_last_step(path) == -1, "who takes over the log goes on without one"
