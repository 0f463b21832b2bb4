"""What a report says of pipelines."""

import math
from pathlib import Path
from typing import Any

import pytest
from story import make_record, make_start, make_step
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.monitor import PipelineMeasured, Record, summarise, to_json, write_report
from paceline.monitor.pipeline import describe_pipeline, find_pipeline_steps, render_pipeline, typical_pipeline_step

UNIT_S = 0.010


def measured(place: int, step: int = 20, *, idle_s: float = 0.0, **changes: Any) -> Record:
    """Two micro-batches through two ranks, gpipe; forward 1 unit and backward 2: of 9 units 3 are idle."""
    moments = [[(0, 1), (1, 2), (5, 7), (7, 9)], [(0, 1), (1, 2), (2, 4), (4, 6)]][place]
    fields: dict[str, Any] = {
        "order": "gpipe",
        "ranks": [4, 6],
        "num_micro_batches": 2,
        "stages_per_rank": 1,
        "formula": 1 / 3,
        "began_unix_s": 1000.0 + place * UNIT_S,
        "works": ["forward", "forward", "backward", "backward"],
        "stages": [place] * 4,
        "micro_batches": [0, 1, 0, 1],
        "began_s": [UNIT_S * began + (idle_s if began >= 5 else 0) for began, _ in moments],
        "ended_s": [UNIT_S * ended + (idle_s if began >= 5 else 0) for began, ended in moments],
    }
    return make_record(PipelineMeasured(**{**fields, **changes}), step, rank=[4, 6][place])


def test_the_bubble_is_what_is_idle_between_the_first_begin_and_the_last_end() -> None:
    (step,) = find_pipeline_steps([measured(1), measured(0)])
    assert step.duration_s == pytest.approx(9 * UNIT_S)
    assert step.busy_s == pytest.approx([6 * UNIT_S, 6 * UNIT_S])
    assert step.bubble == pytest.approx(1 / 3)


def test_the_typical_step_is_the_median_of_those_like_the_newest() -> None:
    story = [
        measured(place, step, idle_s=idle_s) for step, idle_s in ((1, 0.0), (2, 0.09), (3, 0.03)) for place in (0, 1)
    ]
    other = [measured(place, 0, order="1f1b", idle_s=0.5) for place in (0, 1)]
    typical = typical_pipeline_step(list(find_pipeline_steps([*other, *story])))
    assert typical is not None
    assert typical.step == 3
    assert typical.bubble == pytest.approx(1 - 12 / 24)


@pytest.mark.parametrize(
    "damage",
    [
        {"began_s": [0.0, math.nan, 0.05, 0.07]},
        {"ended_s": [0.01, 0.02, 1e300, 0.09]},
        {"began_s": [0.05, 0.01, 0.05, 0.07]},
        {"began_unix_s": math.inf},
        {"works": []},
        {"ranks": [4, 5]},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_a_step_that_was_not_told_whole_is_left_out(damage: dict[str, Any]) -> None:
    assert list(find_pipeline_steps([measured(0), measured(1, **damage)])) == []


def test_the_report_shows_the_bubble_beside_theory(tmp_path: Path) -> None:
    records = [make_record(make_start()), make_record(make_step(1), 1), *(measured(i, idle_s=0.03) for i in (0, 1))]
    (tmp_path / "events.jsonl").write_text("".join(f"{to_json(record)}\n" for record in records))
    sentence = (
        "Pipeline of 2 ranks, 2 micro-batches, order gpipe: ranks are idle for 50% of a typical step of 0.12 s "
        "(33% by the formula for equal stages)."
    )
    assert describe_pipeline(summarise(records).pipeline_steps) == sentence
    _, page = write_report(tmp_path)
    text = page.read_text()
    assert sentence in text
    assert "<h2>Pipeline</h2>" in text
    assert "<td class=n>60.00</td><td class=n>50%</td><td class=n>10.00</td><td class=n>20.00</td><td>1</td>" in text
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG")
    said = CliRunner().invoke(app, ["report", str(tmp_path)]).output
    assert sentence in said
    assert "pipeline.png" in said


def test_where_no_formula_is_known_the_report_says_so() -> None:
    steps = list(find_pipeline_steps([measured(0, formula=None), measured(1, formula=None)]))
    assert "(no formula is known for so few micro-batches)." in describe_pipeline(steps)


def test_a_run_without_a_pipeline_says_nothing_of_it(tmp_path: Path) -> None:
    assert describe_pipeline([]) == render_pipeline([], None) == ""
    (tmp_path / "events.jsonl").write_text(f"{to_json(make_record(make_start()))}\n")
    _, page = write_report(tmp_path)
    assert "<h2>Pipeline</h2>" not in page.read_text()
    assert not (tmp_path / "pipeline.png").exists()
