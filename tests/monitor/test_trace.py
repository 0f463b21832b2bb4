"""The trace against the Trace Event Format, and what Perfetto asks beyond it: slices of one thread may only nest."""

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from story import make_bucket, make_record, make_start, make_step, make_timed_step, make_times

from paceline.errors import SettingsError, StorageError
from paceline.monitor import EventError, Record, export_trace, to_json
from paceline.monitor.timeline import find_timed_steps
from paceline.monitor.trace import make_trace

REQUIRED: dict[str, dict[str, type]] = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": int, "dur": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
}


def write_log(directory: Path, records: list[Record]) -> Path:
    (directory / "events.jsonl").write_text("".join(f"{to_json(record)}\n" for record in records))
    return directory


def check_trace(text: str) -> list[dict[str, Any]]:
    """Fail unless `text` is a trace that a viewer can show without guessing; return its slices."""
    trace = json.loads(text, parse_constant=pytest.fail)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    names: dict[tuple[str, int], str] = {}
    slices: list[dict[str, Any]] = []
    for event in trace["traceEvents"]:
        for key, kind in REQUIRED[event["ph"]].items():
            assert type(event[key]) is kind, (event, key)
        assert 0 <= event["pid"] < 2**32
        assert 0 < event["tid"] < 2**32
        if event["ph"] == "M":
            assert type(event["args"]["name"]) is str
            key = "pid" if event["name"] == "process_name" else "tid"
            assert names.setdefault((event["name"], event[key]), event["args"]["name"]) == event["args"]["name"]
        else:
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            slices.append(event)
    process_of: dict[int, int] = {}
    for one in slices:
        assert ("process_name", one["pid"]) in names
        assert ("thread_name", one["tid"]) in names
        assert process_of.setdefault(one["tid"], one["pid"]) == one["pid"]
    for tid in process_of:
        check_nesting([one for one in slices if one["tid"] == tid])
    return slices


def check_nesting(slices: list[dict[str, Any]]) -> None:
    ends: list[int] = []
    for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        began, ended = one["ts"], one["ts"] + one["dur"]
        while ends and ends[-1] <= began:
            ends.pop()
        assert not ends or ended <= ends[-1], one
        ends.append(ended)


def test_a_trace_shows_each_worker_where_its_time_went(tmp_path: Path) -> None:
    records = [
        make_record(make_start()),
        make_record(make_step(1), 1),
        *make_timed_step(20, num_buckets=3, rank=0, unix_s=5000.25),
        *make_timed_step(20, num_buckets=3, rank=1, unix_s=5000.75),
    ]
    out = tmp_path / "here.json"
    assert export_trace(write_log(tmp_path, records), out) == 2
    slices = check_trace(out.read_text())
    by_place = {(one["pid"], one["cat"], one["name"]): one for one in slices}
    assert len(by_place) == len(slices) == 2 * (4 + 1 + 3)
    step = by_place[1, "computing", "step 20"]
    assert (step["ts"], step["dur"]) == (500_000, 100_000)  # half a second after rank 0
    assert step["args"]["hidden_s"] == pytest.approx(0.02)
    backward = by_place[0, "computing", "backward"]
    assert (backward["ts"], backward["dur"]) == (31_000, 49_000)
    bucket = by_place[1, "exchange", "bucket 2"]
    assert (bucket["ts"], bucket["dur"]) == (560_000, 10_000)
    assert bucket["args"]["wire_bytes"] == 4_000_000
    wait = by_place[0, "waiting", "for bucket 2"]
    assert (wait["ts"], wait["dur"]) == (70_000, 10_000)


def test_exchanges_that_run_side_by_side_are_on_threads_of_their_own() -> None:
    buckets = [make_bucket(n, began_s=0.04 + 0.001 * n, ended_s=0.06 + 0.001 * n) for n in range(3)]
    later = make_bucket(3, began_s=0.07, ended_s=0.08)
    records = [make_record(event) for event in (*buckets, later, make_times())]
    slices = check_trace(json.dumps(make_trace(list(find_timed_steps(records)))))
    tids = {one["name"]: one["tid"] for one in slices if one["cat"] == "exchange"}
    assert len({tids[f"bucket {n}"] for n in range(3)}) == 3
    assert tids["bucket 3"] == tids["bucket 0"]


def test_buckets_that_land_in_the_next_step_stay_beside_it() -> None:
    late = make_bucket(0, ready_s=-0.02, began_s=-0.01, ended_s=0.02, landed_s=0.025, waited_s=0.005)
    records = [
        make_record(event, step)
        for step in (1, 2)
        for event in (
            late,
            make_times(began_unix_s=1e9 + 0.1 * step, optimizer_began_s=None, optimizer_ended_s=None),
        )
    ]
    slices = check_trace(json.dumps(make_trace(list(find_timed_steps(records)))))
    assert len(slices) == 2 * 5
    began = {(one["name"], one["args"].get("step")): one["ts"] for one in slices if one["cat"] == "exchange"}
    assert began == {("bucket 0", 1): 0, ("bucket 0", 2): 100_000}
    (first, _) = [one for one in slices if one["name"].startswith("step")]
    assert first["ts"] == 10_000


def test_two_steps_that_tell_of_the_same_moment_are_both_there() -> None:
    records = [record for step in (1, 2) for record in make_timed_step(step, num_buckets=2, unix_s=1e9)]
    slices = check_trace(json.dumps(make_trace(list(find_timed_steps(records)))))
    assert len(slices) == 2 * (4 + 1 + 2)


always = settings(deadline=None, derandomize=True)
TIMES = st.floats(0, 2.0)
MOMENTS = st.floats(-1.0, 2.0)


@st.composite
def told_steps(draw: st.DrawFn) -> list[Record]:
    """Steps with times that contradict each other, as of clocks that were set while they ran."""
    records = []
    for step in range(draw(st.integers(1, 4))):
        place = {"rank": draw(st.integers(0, 2)), "epoch": draw(st.integers(0, 1))}
        for number in range(draw(st.integers(0, 4))):
            names = ("ready_s", "began_s", "ended_s", "landed_s")
            bucket = make_bucket(number, waited_s=draw(TIMES), **{name: draw(MOMENTS) for name in names})
            records.append(make_record(bucket, step, **place))
        names = ("forward_ended_s", "backward_began_s", "backward_ended_s", "optimizer_began_s", "optimizer_ended_s")
        times = make_times(
            began_unix_s=draw(st.floats(1e9, 1e9 + 3)), duration_s=draw(TIMES), **{name: draw(TIMES) for name in names}
        )
        records.append(make_record(times, step, **place))
    return records


@always
@given(told_steps())
def test_whatever_the_clocks_said_a_trace_is_one(records: list[Record]) -> None:
    steps = list(find_timed_steps(records))
    slices = check_trace(json.dumps(make_trace(steps), allow_nan=False)) if steps else []
    assert sum(one["cat"] == "exchange" for one in slices) == sum(len(step.buckets) for step in steps)


def test_nesting_is_really_checked() -> None:
    with pytest.raises(AssertionError):
        check_nesting([{"ts": 0, "dur": 10}, {"ts": 5, "dur": 10}])
    check_nesting([{"ts": 0, "dur": 10}, {"ts": 2, "dur": 8}, {"ts": 10, "dur": 1}])


def test_an_existing_file_is_left_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    out.write_text("mine")
    write_log(tmp_path, make_timed_step())
    with pytest.raises(SettingsError, match=r"a trace must go to a new file, but .*trace\.json exists; choose another"):
        export_trace(tmp_path, out)
    assert out.read_text() == "mine"
    with pytest.raises(SettingsError, match=r"a file in a directory that exists, but got .*absent"):
        export_trace(tmp_path, tmp_path / "absent" / "trace.json")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(tmp_path, make_timed_step())

    def write_half(path: Path, content: bytes) -> int:
        path.open("wb").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(StorageError, match=r"trace\.json could not be written: No space left on device"):
        export_trace(tmp_path, tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


def test_a_run_without_sampled_steps_is_refused(run_dir: Path) -> None:
    with pytest.raises(EventError, match=re.escape("a run must have sampled steps to be traced")):
        export_trace(run_dir, run_dir / "trace.json")
    assert not (run_dir / "trace.json").exists()


def test_a_parameters_name_is_only_a_text(tmp_path: Path) -> None:
    name = 'layer\x1b[31m"}]\u2028\udcff'
    records = [make_record(make_bucket(0, first_parameter=name)), make_record(make_times())]
    export_trace(write_log(tmp_path, records), tmp_path / "trace.json")
    (bucket,) = [one for one in check_trace((tmp_path / "trace.json").read_text()) if one["cat"] == "exchange"]
    assert bucket["args"]["first_parameter"] == 'layer\\x1b[31m"}]\\u2028\\udcff'
