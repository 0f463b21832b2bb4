"""Runs that judge moving averages of their parameters."""

import pytest
import torch
from pydantic import ValidationError
from test_best import best_steps, find_best, make_countdown

from paceline.monitor.events import Evaluated, RunFinished
from paceline.training import Run
from paceline.training.memory_fit import estimate
from plain_functions import losses_of, make_points_run, parameters_of, read, train_here

DECAY = 0.5


def average_after(num_steps):
    """Return the average of -1, -2, ... which is what the parameter goes down by."""
    average = -1.0
    for step in range(2, num_steps + 1):
        average = DECAY * average + (1 - DECAY) * -step
    return average


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("sync", ["every_step", "local_sgd"])
def test_the_held_out_loss_is_that_of_the_averages(tmp_path, num_workers, sync):
    run = make_countdown(ema=DECAY, keep_best="min:distance", sync=sync)
    train_here(run, tmp_path, num_workers)
    for record in read(tmp_path, Evaluated):
        assert record.event.loss == pytest.approx(average_after(record.step))
        assert record.event.unaveraged["loss"] == -record.step
        assert record.event.unaveraged["distance"] == abs(5 - record.step)
        assert record.event.metrics["distance"] == pytest.approx(abs(5 + average_after(record.step)))
    assert read(tmp_path, RunFinished)[0].event.held_out_loss == pytest.approx(average_after(12))
    # Averages are a step behind.
    assert best_steps(tmp_path)[-1] == 6
    assert find_best(tmp_path) == "step-00000006"
    saved = parameters_of(tmp_path)
    assert float(saved["ema/value"]) == pytest.approx(average_after(12))
    assert float(saved["model/value"]) == -12


@pytest.mark.parametrize("sync", ["every_step", "diloco", "asgd", "ad_psgd"])
def test_averages_go_on_where_they_were(tmp_path, sync):
    """Bit for bit where a run does; and among another number of workers from their mean."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    run = make_points_run(ema=0.9, sync=sync, num_steps=8)
    train_here(run, straight, 2)
    train_here(run.model_copy(update={"num_steps": 4}), resumed, 2)
    halfway = parameters_of(resumed)["ema/0.weight"]
    train_here(Run.model_validate(run.model_dump(mode="json")), resumed, 2)
    if sync in ("every_step", "diloco"):
        assert losses_of(resumed) == losses_of(straight)
        saved = parameters_of(resumed)
        assert all(torch.equal(saved[name], tensor) for name, tensor in parameters_of(straight).items())
        ours, theirs = (read(folder, Evaluated)[-1].event for folder in (resumed, straight))
        assert (ours.loss, ours.unaveraged) == (theirs.loss, theirs.unaveraged)
    assert not torch.equal(parameters_of(resumed)["ema/0.weight"], halfway)
    train_here(run.model_copy(update={"num_steps": 9}), resumed, 3)
    moved = (parameters_of(resumed)["ema/0.weight"] - parameters_of(resumed)["model/0.weight"]).abs().max()
    assert moved > 0


def build_wide():
    return torch.nn.Linear(4, 1, dtype=torch.float64)


def test_memory_for_averages_is_estimated():
    run = make_points_run(model=build_wide)
    splits = run.open_data()
    device = torch.device("cpu")
    plain = estimate(run, splits, 1, device).peak_bytes
    averaged = estimate(run.model_copy(update={"ema": 0.9}), splits, 1, device).peak_bytes
    assert averaged - plain == sum(parameter.nbytes for parameter in build_wide().parameters())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ema": 1.0}, "less than 1"),
        ({"ema": 0.0}, "greater than 0"),
        ({"landing": "next_forward", "clip_norm": None}, "landing must be update, but got next_forward with ema"),
        ({"growth": {"steps": [3]}}, "ema must be none for a model that grows, but got 0.9"),
    ],
)
def test_what_cannot_be_is_refused(changes, problem):
    with pytest.raises(ValidationError, match=problem):
        make_points_run(**{"ema": 0.9} | changes)
