"""The best checkpoint, and ending early. A parameter goes down by 1 a step, so that every evaluation is foreseen."""

import json
import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from paceline.checkpoint import CheckpointStore
from paceline.errors import DataError, SettingsError, UnknownNameError
from paceline.monitor.events import Evaluated, Preempted, RunFinished, StepFinished, StoppedEarly, Warned
from paceline.optim import SGD
from paceline.training import Evaluation, Run
from paceline.training.best import BestSoFar
from paceline.training.callbacks import Callback
from plain_functions import make_points_run, parameters_of, read, train_here

NUM_STEPS = 12


class Countdown(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, inputs):
        return self.value.expand(len(inputs))


def fall(output, batch):
    return output.mean()


def judge(output, batch, goal=-5.0):
    """Return the distance to a goal: the same one step before it and one step after."""
    distance = (output.mean() - goal).abs()
    return {"distance": distance, "nearness": (100 - distance, 1), "never": (0.0, 0.0)}


def make_countdown(**changes):
    settings = {
        "model": Countdown,
        "loss": fall,
        "metrics": judge,
        "optimizer": SGD(learning_rate=1.0, momentum=0.0),
        "schedule": "constant",
        "clip_norm": None,
        "num_steps": NUM_STEPS,
        "evaluate_interval": 2,
        "checkpoint_interval": 5,
        "keep_checkpoints": 1,
    }
    return make_points_run(**(settings | changes))


def list_steps(directory):
    return sorted(int(path.parent.name[5:13]) for path in directory.glob("checkpoints/step-*/COMMITTED"))


def find_best(directory):
    path = CheckpointStore(directory / "checkpoints").find_best()
    return path.name if path else None


def best_steps(directory):
    return [record.step for record in read(directory, Evaluated) if record.event.is_best]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("sync", ["every_step", "local_sgd"])
@pytest.mark.parametrize("measure", ["min:distance", "max:nearness"])
def test_the_best_checkpoint_stays_beside_the_newest(tmp_path, num_workers, sync, measure):
    train_here(make_countdown(keep_best=measure, sync=sync), tmp_path, num_workers)
    assert best_steps(tmp_path) == [2, 4], "the first of two that are alike"
    assert find_best(tmp_path) == "step-00000004"
    assert list_steps(tmp_path) == [4, 12]


def test_the_lowest_loss_is_the_best_and_the_last_step_counts(tmp_path):
    train_here(make_countdown(keep_best="loss", num_steps=5), tmp_path, 2)
    assert best_steps(tmp_path) == [2, 4, 5]
    assert find_best(tmp_path) == "step-00000005"
    assert len(read(tmp_path, Evaluated)) == 3, "the last evaluation is that of the end"


@pytest.mark.parametrize("stopped_at", [1, 3, 6, 11])
def test_a_resumed_run_knows_the_best(tmp_path, stopped_at):
    run = make_countdown(keep_best="min:distance", evaluate_interval=2, checkpoint_interval=1)
    train_here(make_countdown(num_steps=stopped_at, keep_best="min:distance", checkpoint_interval=1), tmp_path)
    for later in range(stopped_at + 1, NUM_STEPS + 1):
        assert later not in list_steps(tmp_path)
    (tmp_path / "events.jsonl").unlink()
    train_here(Run.model_validate(run.model_dump(mode="json")), tmp_path, 2)
    assert find_best(tmp_path) == "step-00000004"
    assert best_steps(tmp_path) == [step for step in (2, 4) if step > stopped_at]
    assert float(parameters_of(tmp_path)["model/value"]) == -NUM_STEPS


def stop_after_step(event, training, step):
    if isinstance(event, StepFinished) and training.step == step and training.rank == training.num_workers - 1:
        training._session.membership.request_stop("SIGTERM")


def leave_out_times(records):
    return [(record.step, replace(record.event, duration_s=0.0)) for record in records]


@pytest.mark.parametrize("sync", ["every_step", "diloco", "asgd"])
@pytest.mark.parametrize("asked_in", [3, 4, 7])
def test_an_evaluation_that_a_signal_puts_off_is_made_at_the_resume(tmp_path, sync, asked_in):
    """Told in step 3, all workers stop after step 4, the best; in step 7, after step 8, whose evaluation ends it."""
    asked = Callback(path=stop_after_step, arguments={"step": asked_in}, all_workers=True)
    run = make_countdown(keep_best="min:distance", stop_after=2, sync=sync)
    num_workers = 1 if sync == "asgd" else 2
    train_here(run, tmp_path / "straight", num_workers)
    stopped = run.model_copy(update={"callbacks": (asked,)})
    assert not all(train_here(stopped, tmp_path / "stopped", num_workers))
    assert len(read(tmp_path / "stopped", Preempted)) == 1
    assert all(train_here(run, tmp_path / "stopped", num_workers))
    for kind in (StepFinished, StoppedEarly):
        assert [r.step for r in read(tmp_path / "stopped", kind)] == [r.step for r in read(tmp_path / "straight", kind)]
    made, expected = (leave_out_times(read(tmp_path / name, Evaluated)) for name in ("stopped", "straight"))
    assert made == expected
    assert find_best(tmp_path / "stopped").startswith("step-00000004")
    same = parameters_of(tmp_path / "straight")
    assert all((parameters_of(tmp_path / "stopped")[name] == tensor).all() for name, tensor in same.items())


def test_what_was_trained_already_can_be_the_best(tmp_path):
    """As after a signal in the last evaluation."""
    train_here(make_countdown(num_steps=5), tmp_path)
    assert find_best(tmp_path) is None
    train_here(make_countdown(num_steps=5, keep_best="min:distance"), tmp_path)
    assert find_best(tmp_path) == "step-00000005"


@pytest.mark.parametrize("num_workers", [1, 3])
def test_training_ends_when_nothing_has_improved_for_long(tmp_path, num_workers):
    run = make_countdown(keep_best="min:distance", stop_after=2)
    assert train_here(run, tmp_path, num_workers) == [True] * num_workers
    (ended,) = read(tmp_path, StoppedEarly)
    assert ended.step == 8
    assert ended.event.reason == "distance has not improved for 2 evaluations: the best is 1 at step 4"
    assert list_steps(tmp_path) == [4, 8]
    assert len(read(tmp_path, RunFinished)) == 1
    assert [record.step for record in read(tmp_path, Evaluated)] == [2, 4, 6, 8]
    train_here(run, tmp_path, num_workers)
    assert len(read(tmp_path, StepFinished)) == 8, "it is over"
    train_here(run.model_copy(update={"stop_after": 3}), tmp_path, num_workers)
    assert [record.step for record in read(tmp_path, StoppedEarly)] == [8, 10]


def test_the_count_of_evaluations_outlives_a_restart(tmp_path):
    run = make_countdown(keep_best="min:distance", stop_after=2, checkpoint_interval=1)
    train_here(run.model_copy(update={"num_steps": 7}), tmp_path)
    train_here(run, tmp_path)
    # The last evaluation of the first start counts too: after steps 6, 7.
    assert [record.step for record in read(tmp_path, Evaluated) if not record.event.is_best][:2] == [6, 7]
    assert read(tmp_path, StepFinished)[-1].step == 7


def test_without_keep_best_the_loss_counts_and_nothing_is_marked(tmp_path):
    rising = make_countdown(stop_after=1, optimizer=SGD(learning_rate=1.0, momentum=0.0), loss=rise)
    train_here(rising, tmp_path)
    assert [record.step for record in read(tmp_path, StoppedEarly)] == [4]
    assert find_best(tmp_path) is None


def rise(output, batch):
    """Return what falls when it is trained and rises when it is judged."""
    return output.mean() if torch.is_grad_enabled() else -output.mean()


def test_a_resumed_run_that_has_ended_early_says_so(tmp_path, monkeypatch):
    from paceline.cli.prepare import prepare_resumed
    from paceline.training.run_file import RunFile

    run = make_countdown(keep_best="min:distance", stop_after=2)
    train_here(run, tmp_path)
    file = RunFile(recipe=f"{__name__}:make_countdown", num_workers=1, run=run.model_dump(mode="json"))
    file.save(tmp_path)
    with pytest.raises(SettingsError, match=r"has ended: distance has not improved .* more --stop_after"):
        prepare_resumed(tmp_path, None, [])
    assert prepare_resumed(tmp_path, None, [("stop_after", "5")])[1].run["stop_after"] == 5


def test_a_metric_that_is_not_there_is_told_before_the_first_step(tmp_path):
    with pytest.raises(UnknownNameError, match=r"metric of keep_best must be a known name, but got 'nearnes'; did"):
        train_here(make_countdown(keep_best="max:nearnes"), tmp_path, 2)
    assert not read(tmp_path, StepFinished)


def break_down(output, batch):
    raise ZeroDivisionError("mine")


def test_metrics_that_fail_do_so_before_the_first_step(tmp_path):
    with pytest.raises(ZeroDivisionError, match="mine"):
        train_here(make_countdown(metrics=break_down), tmp_path)
    assert not read(tmp_path, StepFinished)


def count_nothing(output, batch):
    return output.mean(), (1.0 if torch.is_grad_enabled() else 0.0)


def test_held_out_data_that_count_for_nothing_are_refused(tmp_path):
    with pytest.raises(DataError, match="must have targets that count in the loss, but its 10 samples have none"):
        train_here(make_countdown(loss=count_nothing), tmp_path, 2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"keep_best": "accuracy"}, "must be loss, or min: or max: and a metric's name, but got 'accuracy'"),
        ({"keep_best": "max:"}, "but got 'max:'"),
        ({"stop_after": 0}, "greater than or equal to 1"),
        ({"stop_after": 2, "evaluate_interval": 0}, "evaluate_interval must be more than 0 with stop_after"),
    ],
)
def test_what_cannot_work_is_refused(changes, problem):
    with pytest.raises(ValidationError) as caught:
        make_countdown(**changes)
    assert problem in str(caught.value)


def make_no_held_out():
    return torch.utils.data.TensorDataset(torch.zeros(20, 1))


def test_the_best_of_nothing_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="keep_best and stop_after must come with held-out data"):
        train_here(make_countdown(data=make_no_held_out, metrics=None, keep_best="loss"), tmp_path)


def make_evaluation(loss):
    return Evaluation(loss, 1.0, {}, 1, 0.0)


def judge_badly(output, batch):
    return {"lost": (0.0 * output.mean() + math.nan, 1)}


def test_a_metric_that_is_nan_is_told_once(tmp_path):
    train_here(make_countdown(metrics=judge_badly, keep_best="max:lost"), tmp_path, 2)
    assert [record.event.message for record in read(tmp_path, Warned)] == [
        "lost must be a number for keep_best and stop_after, but it is NaN after step 2; an evaluation with NaN is "
        "never the best: look at the metric and its samples"
    ]


def test_nan_is_never_the_best():
    best = BestSoFar("loss", 2)
    assert not best.note(make_evaluation(math.nan), 1)
    assert best.note(make_evaluation(3.0), 2)
    assert not best.note(make_evaluation(math.nan), 3)
    assert not best.note(make_evaluation(3.0), 4)
    again = BestSoFar("loss", 2)
    again.load(json.loads(json.dumps(best.state())))
    assert (again.end_reason, again.step) == (best.end_reason, 2)
    assert "for 2 evaluations: the best is 3 at step 2" in again.end_reason
    other = BestSoFar("min:other", 2)
    other.load(best.state())
    assert other.value is None, "of another measure nothing is known"
