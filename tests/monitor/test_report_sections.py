"""Sections of a report: memory, slow workers and shares, and what changed of batch and model."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from story import make_record, make_start, make_step

from paceline.monitor import (
    BatchChanged,
    CodecChanged,
    GradientNoiseMeasured,
    ModelGrown,
    Record,
    SharesChanged,
    SlowWorker,
    from_json,
    summarise,
    to_json,
    write_report,
)
from paceline.monitor.events import ExpertsUsed, MemoryEstimated, MemoryMeasured
from paceline.monitor.formatting import describe, describe_size
from paceline.monitor.report_sections import describe_stragglers, render_experts, render_memory, render_stragglers


def render_memory_of(estimates, measured):
    wrap = [[SimpleNamespace(event=event) for event in events] for events in (estimates, measured)]
    return render_memory(SimpleNamespace(memory_estimates=wrap[0], memory_measured=wrap[1]))


def test_estimate_and_measurement_stand_beside_each_other():
    estimate = MemoryEstimated(
        peak_bytes=3_000_000, bytes_of={"parameters": 1e6, "activations": 2e6}, available_bytes=10**9
    )
    measured = MemoryMeasured(peak_bytes=3_100_000, bytes_of={"parameters": 1e6, "activations": 2.1e6})
    page = render_memory_of([estimate], [measured])
    assert all(text in page for text in ("estimated", "measured", "2 MB", "2.1 MB", "3.1 MB", "1 GB"))
    assert "estimated" not in render_memory_of([], [measured])
    assert render_memory_of([], []) == ""


def test_experts_are_counted_over_the_run_without_what_was_undone() -> None:
    def used(step: int, *counts: int, dropped: int) -> Record:
        return make_record(ExpertsUsed(layers=["layers.0.mlp"], counts=[list(counts)], num_dropped=[dropped]), step)

    records = [
        make_record(make_start()),
        used(2, 30, 10, dropped=0),
        used(4, 999, 999, dropped=999),
        make_record(make_start(start_step=2), 2),
        used(4, 10, 30, dropped=20),
    ]
    page = render_experts(summarise(records))
    assert all(f"<td>{text}" in page or f">{text}<" in page for text in ("layers.0.mlp", "80", "20", "20%", "1")), page
    assert render_experts(summarise(records[:1])) == ""


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


def noise(step, scale):
    return make_record(GradientNoiseMeasured(noise_scale=scale, trace=2.0, squared_norm=0.1, num_steps=5), step)


@pytest.mark.parametrize(
    ("num_layers", "width", "words"), [(4, None, "4 layers"), (None, 64, "width 64"), (4, 64, "4 layers of width 64")]
)
def test_a_size_has_what_the_model_knows_of_itself(num_layers, width, words):
    assert describe_size(num_layers, width) == words


def test_the_report_tells_what_changed_and_forgets_what_was_undone(tmp_path: Path) -> None:
    grown = make_record(ModelGrown(num_layers=4, num_parameters=16016, method="stack"), 20)
    reason = "at 20 Mbit/s and 0.2 ms a message: one_bit 30 ms a step; none 270 ms a step"
    changed = make_record(CodecChanged(codec="one_bit", before="none", codec_of="step", reason=reason), 30)
    records = [
        make_record(make_start()),
        make_record(make_step(1), 1),
        noise(5, 20.0),
        noise(10, None),
        make_record(BatchChanged(global_batch=16, start=80), 10),
        make_record(BatchChanged(global_batch=9999, start=90), 12),
        make_record(make_start(start_step=10)),
        grown,
        changed,
    ]
    changes = summarise(records).changes
    assert [record.step for record in changes] == [5, 10, 10, 20, 30]
    (tmp_path / "events.jsonl").write_text("".join(f"{to_json(record)}\n" for record in records))
    page = write_report(tmp_path)[1].read_text()
    assert "gradient noise scale 20 samples" in page
    assert "gradient noise scale too large to be measured" in page
    assert "16 samples a step, from sample 80 on" in page
    assert "4 layers with 16,016 parameters, by stack" in page
    assert f"codec one_bit of steps in place of none, {reason}" in page
    assert describe(changed) == "step 30: codec one_bit in place of none, at 20 Mbit/s and 0.2 ms a message"
    assert "9,999 samples a step" not in page
    assert describe(grown) == "step 20: the model has grown to 4 layers, 16,016 parameters"


def test_of_many_measurements_the_newest_are_shown(tmp_path: Path) -> None:
    records = [make_record(make_start()), *(noise(step, float(step)) for step in range(1, 31))]
    (tmp_path / "events.jsonl").write_text("".join(f"{to_json(record)}\n" for record in records))
    page = write_report(tmp_path)[1].read_text()
    assert "10 earlier ones are not shown." in page
    assert "noise scale 30 samples" in page
    assert "noise scale 10 samples" not in page


def test_a_run_that_stays_as_it_is_has_no_such_section(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(f"{to_json(make_record(make_start()))}\n")
    assert "Batch and model" not in write_report(tmp_path)[1].read_text()
