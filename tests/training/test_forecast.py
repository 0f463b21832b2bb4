"""What a plan predicts beside what steps take: compared as steps come, and in the report."""

import json

import pytest

from paceline.errors import SettingsError
from paceline.monitor.events import PlanCompared, Record, Warned
from paceline.monitor.reader import summarise
from paceline.monitor.report_sections import render_plan
from paceline.training.forecast import Forecast, PlanWatch

FORECAST = Forecast(
    step_s=1.0, step_s_low=0.8, step_s_high=1.25, memory_bytes=1e9, memory_bytes_low=8e8, memory_bytes_high=1.2e9,
    energy_j=5.0, basis="published",
)  # fmt: skip


def watch_steps(durations_s, num_steps=None):
    """Return (number of the step, event) of a training of steps that take so long."""
    watch, found = PlanWatch(FORECAST, "2 ranks of mine"), []
    for number, duration_s in enumerate(durations_s, 1):
        found += [
            (number, event) for event in watch.look(duration_s, is_last=number == (num_steps or len(durations_s)))
        ]
    return found


def test_steps_are_compared_at_powers_of_two_without_the_first_ones_and_at_the_end():
    found = watch_steps([9.0] * 3 + [1.1] * 40)
    assert [number for number, _ in found] == [11, 19, 35, 43]
    assert all(isinstance(event, PlanCompared) and event.is_within for _, event in found)
    first, last = found[0][1], found[-1][1]
    assert (first.num_steps, first.measured_s, first.predicted_s) == (8, 1.1, 1.0)
    assert (last.num_steps, last.machines) == (40, "2 ranks of mine")


def test_it_warns_once_when_they_part():
    found = watch_steps([1.0] * 12 + [2.0] * 60)
    warnings = [(number, event.message) for number, event in found if isinstance(event, Warned)]
    assert [number for number, _ in warnings] == [35]
    assert (
        "a step takes 2 s, 2 times as long, where the plan for 2 ranks of mine predicted 1 s (0.8 to 1.25)"
        in (warnings[0][1])
    )
    assert [event.is_within for _, event in found if isinstance(event, PlanCompared)] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_training_of_one_step_is_compared_too():
    ((number, event), (_, warned)) = watch_steps([0.5])
    assert (number, event.num_steps, event.is_within) == (1, 1, False)
    assert "50% of the time" in warned.message


def test_the_file_of_a_run_is_read_and_refused_if_it_is_none(tmp_path):
    assert PlanWatch.read(tmp_path) is None
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"predicted": FORECAST.model_dump(), "machines": {"words": "mine"}}))
    assert PlanWatch.read(tmp_path) is not None
    for text in ("{", "[]", '{"predicted": {"step_s": 0}, "machines": {"words": ""}}'):
        path.write_text(text)
        with pytest.raises(SettingsError, match="must be a plan"):
            PlanWatch.read(tmp_path)


def test_the_report_has_both_side_by_side():
    events = [event for _, event in watch_steps([2.0] * 12) if isinstance(event, PlanCompared)]
    records = [
        Record(event=event, run="r", rank=0, epoch=1, step=1, unix_s=0.0, time_s=float(number))
        for number, event in enumerate(events)
    ]
    page = render_plan(summarise(records))
    assert "predicted" in page
    assert "0.8 to 1.25 s" in page
    assert "outside the interval" in page
    assert "2 ranks of mine" in page
    assert render_plan(summarise([])) == ""
