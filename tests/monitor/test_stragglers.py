"""What a report says of slow workers and of shares."""

import math
from pathlib import Path

import pytest
from story import make_record, make_start, make_step

from paceline.monitor import Record, SharesChanged, SlowWorker, from_json, summarise, to_json, write_report
from paceline.monitor.stragglers import describe_stragglers, render_stragglers


def slow(step: int, rank: int = 2, factor: float = 3.0) -> Record:
    event = SlowWorker(slow_rank=rank, factor=factor, samples_per_s=12.0, others_samples_per_s=12.0 * factor)
    return make_record(event, step)


def changed(step: int, *shares: int) -> Record:
    speeds = [3.0 * share for share in shares[:-1]]
    return make_record(
        SharesChanged(shares=list(shares), start=40 * step + 120, samples_per_s=[*speeds, math.nan]), step
    )


@pytest.mark.parametrize(
    ("shares", "cure"),
    [("measured", "its share follows its speed"), (None, "--shares measured would give it fewer samples")],
)
def test_the_report_names_who_is_slow_and_says_what_helps(tmp_path: Path, shares: str | None, cure: str) -> None:
    records = [make_record(make_start(settings={"shares": shares})), make_record(make_step(1), 1), slow(30)]
    (tmp_path / "events.jsonl").write_text("".join(f"{to_json(record)}\n" for record in records))
    sentence = "rank 2 computes 3.0 times slower than the others: 12 samples/s while it computes, the others 36"
    assert list(describe_stragglers(summarise(records))) == [f"{sentence} (found at step 30; {cure})."]
    _, page = write_report(tmp_path)
    assert sentence in page.read_text()


def test_of_each_worker_the_newest_finding_counts() -> None:
    records = [make_record(make_start()), slow(30), slow(30, rank=5), slow(60, factor=4.0)]
    sentences = list(describe_stragglers(summarise(records)))
    assert [sentence[:31] for sentence in sentences] == [
        "rank 2 computes 4.0 times slowe",
        "rank 5 computes 3.0 times slowe",
    ]


def test_the_report_tells_the_shares() -> None:
    section = render_stragglers(summarise([make_record(make_start()), changed(15, 12, 12, 4, 12)]))
    assert "Shares changed once, to follow the speed of workers." in section
    assert ">12, 12, 4, 12<" in section
    assert ">36, 36, 12, nan<" in section
    many = render_stragglers(summarise([changed(step, step, 1) for step in range(1, 26)]))
    assert "Shares changed 25 times, to follow the speed of workers; the newest 20 changes are shown." in many
    assert (">6, 1<" in many, ">5, 1<" in many) == (True, False)


def test_a_run_without_stragglers_says_nothing_of_them() -> None:
    assert render_stragglers(summarise([make_record(make_start()), make_record(make_step(1), 1)])) == ""
    assert render_stragglers(summarise([])) == ""


def test_a_restart_undoes_the_shares_that_came_after_its_start() -> None:
    records = [make_record(make_start()), changed(10, 3, 1), changed(20, 2, 2)]
    records += [make_record(make_start(start_step=15), 15), changed(25, 1, 3)]
    assert [one.event.shares for one in summarise(records).share_changes] == [[3, 1], [1, 3]]


def test_speeds_that_are_not_known_survive_the_log() -> None:
    speeds = from_json(to_json(changed(1, 2, 1))).event.samples_per_s  # type: ignore[attr-defined]
    assert speeds[0] == 6.0
    assert math.isnan(speeds[1])
