"""Runs of a recipe with experts: over an expert axis as on one worker, resumed in another layout, and told of."""

from pathlib import Path
from typing import Any

import pytest

from paceline.monitor import ExpertsUsed, RunFinished, StepFinished, read_log, select

SETTINGS = {
    "model.num_experts": 4,
    "model.capacity_factor": 1.0,
    "model.balance": 0.1,
    "model.width": 16,
    "model.num_layers": 2,
    "data.sequence_length": 16,
    "data.max_bytes": 20_000,
    "loss.sample_tokens": 0,
    "schedule": "constant",
    "evaluate_interval": 2,
    "evaluate_samples": 16,
    "checkpoint_interval": 4,
}
TOLERANCE = 2e-5  # sums of float32 in another order, over a few steps


def train(run_here: Any, out: Path, *arguments: object, resumes: bool = False) -> Any:
    settings = [] if resumes else [each for name, value in SETTINGS.items() for each in (f"--{name}", value)]
    begin = ["--resume", out] if resumes else ["transformer_lm", "--out", out]
    return run_here("train", *begin, *settings, *arguments)


def read(out: Path) -> tuple[list[float], list[ExpertsUsed], float]:
    records = read_log(out / "events.jsonl")
    losses = {record.step: record.event.loss for record in select(records, StepFinished)}
    used = {record.step: record.event for record in select(records, ExpertsUsed)}
    held_out = select(records, RunFinished)[-1].event.held_out_loss
    assert held_out is not None
    return list(losses.values()), list(used.values()), held_out


@pytest.mark.timeout(120)
def test_a_run_over_an_expert_axis_is_that_of_one_worker_and_goes_on_in_another_layout(
    run_here: Any, tmp_path: Path
) -> None:
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    done = train(run_here, shared, "--layout.expert", 2, "--num_steps", 4)
    assert done.returncode == 0, done.stderr
    assert "uses of experts were dropped" in done.stdout + done.stderr
    assert "Experts" in (shared / "report.html").read_text()
    resumed = train(run_here, shared, "--layout.expert", 1, "--workers", 1, "--num_steps", 6, resumes=True)
    assert resumed.returncode == 0, resumed.stderr
    whole = train(run_here, alone, "--workers", 1, "--num_steps", 6)
    assert whole.returncode == 0, whole.stderr

    losses, used, held_out = read(shared)
    expected, expected_used, expected_held_out = read(alone)
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    assert held_out == pytest.approx(expected_held_out, abs=TOLERANCE)
    assert used == expected_used
    assert [sum(map(sum, each.counts)) + sum(each.num_dropped) for each in used] == [2 * 2 * 8 * 16 * 2] * 3
    assert sum(used[0].num_dropped) > 0


def test_wrong_numbers_of_workers_and_experts_are_refused(run_here: Any, tmp_path: Path) -> None:
    wrong = train(run_here, tmp_path / "run", "--layout.expert", 2, "--workers", 3)
    assert "must be a multiple of sharded(1) * expert(2), but got 3; give --workers 4" in wrong.stderr
    wrong = train(run_here, tmp_path / "run", "--layout.expert", 3)
    assert "but layers.0.mlp.experts has 4 = 3 * 1 + 1" in wrong.stderr
    wrong = train(run_here, tmp_path / "run", "--layout.expert", 2, "--layout.tensor", 2)
    assert "put these ranks on the expert axis" in wrong.stderr
    wrong = train(run_here, tmp_path / "run", "--model.experts_per_token", 5)
    assert "experts_per_token must be at most num_experts(4), but got 5" in wrong.stderr
