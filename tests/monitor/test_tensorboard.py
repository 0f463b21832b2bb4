import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from story import make_record, make_step

from paceline.errors import MissingExtraError
from paceline.monitor import (
    Evaluated,
    EventError,
    StalenessMeasured,
    export_tensorboard,
    read_log,
    summarise,
    to_json,
)


def read_back(out_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(out_dir), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_back_what_the_log_says(run_dir: Path, tmp_path: Path) -> None:
    num_scalars = export_tensorboard(run_dir, tmp_path / "board")
    summary = summarise(read_log(run_dir / "events.jsonl"))
    board = read_back(tmp_path / "board")
    losses = board.Scalars("loss/train")
    assert [one.step for one in losses] == list(range(1, 401))
    assert [one.value for one in losses] == pytest.approx([step.event.loss for step in summary.steps])
    assert [one.wall_time for one in losses] == [step.unix_s for step in summary.steps]
    held_out = [(one.step, one.value) for one in board.Scalars("loss/held_out")]
    assert held_out == [(one.step, pytest.approx(one.event.loss)) for one in summary.evaluations]
    assert len(board.Scalars("held_out/accuracy")) == 10
    tags = board.Tags()["scalars"]
    assert {"optimizer/learning_rate", "optimizer/gradient_norm", "speed/samples_per_s"} < set(tags)
    assert sum(len(board.Scalars(tag)) for tag in tags) == num_scalars
    (showcase,) = board.Tensors("showcase")
    assert b"What light" in showcase.tensor_proto.string_val[0]
    assert len(board.Tensors("settings")) == 2


def test_an_export_replaces_the_former_one_and_nothing_else(run_dir: Path, tmp_path: Path) -> None:
    board = tmp_path / "board"
    board.mkdir()
    foreign = board / "events.out.tfevents.0000000001.other"
    foreign.write_bytes(b"")
    for _ in range(2):
        export_tensorboard(run_dir, board)
        assert foreign.exists()
        assert len(list(board.iterdir())) == 2
    foreign.unlink()
    assert len(read_back(board).Scalars("loss/train")) == 400


def test_what_is_not_finite_or_not_known_is_exported_as_it_is(tmp_path: Path) -> None:
    metrics = {"odd \ud800 name": 1.0}
    evaluated = Evaluated(loss=math.inf, metrics=metrics, num_samples=1, duration_s=0.1, unaveraged={"loss": 0.5})
    steps = [make_step(1, loss=math.nan, gradient_norm=None, duration_s=0.0), make_step(2, loss=1e300)]
    stale = [
        StalenessMeasured(delays=[1], counts=[2], num_dropped=0, mean=mean, largest=largest)
        for mean, largest in ((None, None), (1.5, 3))
    ]
    records = [make_record(event, 1 + at) for at, event in enumerate([*steps, evaluated, *stale])]
    (tmp_path / "events.jsonl").write_text("".join(to_json(record) + "\n" for record in records))
    export_tensorboard(tmp_path, tmp_path / "board")
    delays = [read_back(tmp_path / "board").Scalars(f"workers/{which}_delay") for which in ("mean", "largest")]
    assert [[(one.step, one.value) for one in curve] for curve in delays] == [[(5, 1.5)], [(5, 3.0)]]
    board = read_back(tmp_path / "board")
    first, second = board.Scalars("loss/train")
    assert math.isnan(first.value)
    assert second.value == math.inf
    assert [one.step for one in board.Scalars("optimizer/gradient_norm")] == [2]
    assert [one.step for one in board.Scalars("speed/samples_per_s")] == [2]
    assert board.Scalars("loss/held_out")[0].value == math.inf
    assert board.Scalars("held_out_unaveraged/loss")[0].value == 0.5


def test_without_tensorboard_the_pip_line_is_printed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'paceline[tensorboard]'")):
        export_tensorboard(run_dir, run_dir / "board")


def test_a_directory_without_a_log_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    with pytest.raises(EventError, match="a log must be a file"):
        export_tensorboard(tmp_path, tmp_path / "board")
    assert list(tmp_path.iterdir()) == []
