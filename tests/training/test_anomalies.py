"""Spikes of the loss and what is not finite: found before the update, and reported, skipped, undone or fatal."""

import json
import math
import random

import pytest
import torch
from test_loop import losses_of, make_run, read_tensors, train_here

from paceline.errors import CheckpointError, NonFiniteError, SpikeError
from paceline.monitor.events import AnomalyFound, RolledBack
from paceline.monitor.reader import read_log, select
from paceline.optim import SGD
from paceline.registry import register
from paceline.schedules import Constant
from paceline.training import Anomalies, Callback
from paceline.training.anomalies import AnomalyGuard, SpikeDetector


@register("test_slip")
class Slip(Constant):
    """A constant rate, but for one step."""

    at: int

    def factor(self, step, total_steps):
        return 1e4 if step == self.at else 1.0


def run_with(anomalies, *, slip_at=40, **changes):
    settings = {"num_steps": 60, "optimizer": SGD(learning_rate=0.01), "schedule": Slip(at=slip_at)}
    settings |= {"evaluate_interval": 0, "checkpoint_interval": 10, "anomalies": anomalies, "clip_norm": None}
    return make_run(**(settings | changes))


def found_in(directory):
    return select(read_log(directory / "events.jsonl"), AnomalyFound)


@pytest.mark.parametrize("kind", ["falling", "noisy", "near zero", "below zero", "heavy tails"])
def test_what_changes_as_losses_do_is_no_spike(kind):
    draw = random.Random(3)
    values = {
        "falling": lambda n: 3 * math.exp(-n / 300) + 1 + draw.gauss(0, 0.02),
        "noisy": lambda n: 3 + draw.gauss(0, 0.6),
        "near zero": lambda n: math.exp(draw.gauss(-7, 1.5)),
        "below zero": lambda n: draw.gauss(-1, 2),
        "heavy tails": lambda n: math.exp(draw.gauss(0, 0.7)),
    }[kind]
    detector = SpikeDetector(100, 10.0)
    for number in range(2000):
        value = values(number)
        assert value <= detector.find_limit(), number
        detector.add(value)


def test_a_spike_stands_out_also_after_others():
    draw = random.Random(3)
    detector = SpikeDetector(100, 10.0)
    for number in range(200):
        value = 9.0 if number % 5 == 4 else 3 + draw.gauss(0, 0.05)
        assert (value > detector.find_limit()) == (number % 5 == 4 and number >= 20), number
        detector.add(value)


@pytest.mark.parametrize("deviation", [0.01, 0.1, 0.37, 0.7])
@pytest.mark.parametrize("threshold", [10.0, 20.0])
def test_hundreds_of_medians_are_a_spike_whatever_is_usual(threshold, deviation):
    draw = random.Random(3)
    detector = SpikeDetector(100, threshold)
    for number in range(500):
        value = 4.2 * math.exp(draw.gauss(0, deviation))
        assert value <= detector.find_limit(), number
        detector.add(value)
        assert number < 100 or detector.find_limit() < 200 * detector.median


@pytest.mark.parametrize("share", [0.5, 0.75, 0.95])
def test_a_loss_that_is_often_0_is_no_spike_where_it_is_not(share):
    draw = random.Random(3)
    detector = SpikeDetector(100, 10.0)
    for number in range(2000):
        value = 0.0 if draw.random() < share else 0.05 * draw.random()
        assert value <= detector.find_limit(), number
        detector.add(value)
    assert detector.find_limit() < 100


def test_values_of_which_most_are_the_same_have_the_mean_distance_as_their_scale():
    detector = SpikeDetector(100, 10.0)
    for number in range(100):
        value = 1.0 if number % 5 < 3 else 2.0
        assert value <= detector.find_limit()
        detector.add(value)
    assert 2 < detector.find_limit() < 100
    assert SpikeDetector(100, 10.0).find_limit() == math.inf


def test_two_kinds_of_batches_are_told_of_a_few_times_and_a_real_spike_always():
    draw = random.Random(3)
    guard, found = AnomalyGuard(Anomalies()), []
    for step in range(1000):
        guard.begin(step)
        value = 500.0 if step == 700 else (5 if draw.random() < 0.1 else 1) * math.exp(draw.gauss(0, 0.05))
        guard.judge("loss", value)
        found += [(step, one.value) for one in guard.end()]
    assert (700, 500.0) in found
    assert len(found) < 10


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_spike_is_reported_and_training_goes_on(tmp_path, num_workers):
    train_here(run_with(Anomalies()), tmp_path, num_workers)
    first = found_in(tmp_path)[0]
    assert first.step == 41, "the slip of step 40 shows in the loss of the next"
    assert (first.event.quantity, first.event.reaction) == ("loss", "report")
    assert first.event.value > first.event.limit > first.event.median
    assert len(losses_of(tmp_path)) == 60


def test_a_run_that_is_to_stop_says_where_and_keeps_its_parameters(tmp_path):
    with pytest.raises(SpikeError, match=r"the loss must stay near those before, but at step 41 it is .*, above"):
        train_here(run_with(Anomalies(loss_spike="stop")), tmp_path, 2)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_skipped_update_changes_nothing_and_too_many_end_the_run(tmp_path, num_workers):
    """Parameters that a slip has spoilt stay so, whatever is skipped after it."""
    with pytest.raises(SpikeError):
        train_here(run_with(Anomalies(loss_spike="skip", patience=3)), tmp_path, num_workers)
    steps = [record.step for record in found_in(tmp_path)]
    assert steps[:4] == [41, 42, 43, 44]
    losses = losses_of(tmp_path)
    assert {41, 42, 43, 44} <= set(losses)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_going_back_leaves_the_update_out_that_led_astray(tmp_path, num_workers):
    train_here(run_with(Anomalies(loss_spike="roll_back")), tmp_path / "slip", num_workers)
    (went,) = select(read_log(tmp_path / "slip" / "events.jsonl"), RolledBack)
    assert (went.step, went.event.from_step, went.event.skipped_steps) == (40, 41, [40, 41])
    assert went.event.checkpoint.endswith("step-00000040") or "step-00000040" in went.event.checkpoint
    losses = losses_of(tmp_path / "slip")
    assert len(losses) == 60
    assert max(list(losses.values())[45:]) < max(list(losses.values())[:10])
    assert all(tensor.isfinite().all() for tensor in read_tensors(tmp_path / "slip", 60).values())


def test_going_back_to_nothing_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="there must be a checkpoint to go back to"):
        train_here(run_with(Anomalies(loss_spike="roll_back"), checkpoint_interval=0), tmp_path)


@pytest.mark.parametrize("reaction", ["skip", "stop"])
def test_a_gradient_that_is_not_finite_on_one_worker_is_skipped_on_all_or_ends_the_run(tmp_path, reaction):
    """Fault 18: NaN in one replica's gradient."""
    run = run_with(Anomalies(non_finite=reaction), slip_at=-1, callbacks=(Callback(path=poison, all_workers=True),))
    if reaction == "stop":
        with pytest.raises(NonFiniteError, match="gradients must be finite, but at step 30"):
            train_here(run, tmp_path, 2)
        return
    train_here(run, tmp_path, 2)
    (found,) = found_in(tmp_path)
    assert (found.step, found.event.reaction) == (30, "skip")
    assert found.event.quantity == "gradient"
    assert "gradients must be finite, but at step 30" in found.event.message
    assert all(tensor.isfinite().all() for tensor in read_tensors(tmp_path, 60).values())


def poison(event, training):
    """Let rank 1's gradient of step 30 be NaN once."""
    if training.rank != 1 or training.step != 30 or type(event).__name__ != "StepFinished":
        return
    parameter = next(training.module.parameters())
    hook = parameter.register_hook(lambda gradient: (hook.remove(), gradient * math.nan)[1])


def test_going_back_leaves_out_a_loss_that_is_not_finite_however_often_it_comes(tmp_path):
    run = run_with(
        Anomalies(non_finite="roll_back"), slip_at=-1, callbacks=(Callback(path=spoil_loss, all_workers=True),)
    )
    train_here(run, tmp_path, 2)
    (went,) = select(read_log(tmp_path / "events.jsonl"), RolledBack)
    assert (went.step, went.event.from_step, went.event.skipped_steps) == (30, 33, [32, 33])
    assert len(losses_of(tmp_path)) == 60
    assert all(tensor.isfinite().all() for tensor in read_tensors(tmp_path, 60).values())


def spoil_loss(event, training):
    """Let rank 1's loss of step 33 be NaN each time."""
    if training.rank == 1 and training.step == 33 and type(event).__name__ == "StepFinished":
        hook = training.module.register_forward_hook(lambda _, __, output: (hook.remove(), output * math.nan)[1])


@pytest.mark.parametrize("reaction", ["skip", "roll_back"])
def test_samples_that_are_not_finite_leave_no_trace_in_statistics(tmp_path, reaction):
    """Also where a going back runs forward on them once more."""
    run = run_with(
        Anomalies(non_finite=reaction), slip_at=-1, callbacks=(Callback(path=spoil_samples, all_workers=True),)
    )
    train_here(run, tmp_path, 2)
    assert len(losses_of(tmp_path)) == 60
    tensors = read_tensors(tmp_path, 60)
    assert any(name.endswith("running_var") for name in tensors)
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def spoil_samples(event, training):
    """Let rank 1's samples of step 33 be NaN each time."""
    if training.rank == 1 and training.step == 33 and type(event).__name__ == "StepFinished":
        hook = training.module.register_forward_pre_hook(lambda _, args: (hook.remove(), (args[0] * math.nan,))[1])


def test_statistics_that_are_not_finite_are_not_saved(tmp_path):
    run = run_with(Anomalies(), slip_at=-1, callbacks=(Callback(path=spoil_statistics, all_workers=True),))
    with pytest.raises(NonFiniteError, match=r"buffers must be finite to be saved, but at step 40 \S+running_mean is"):
        train_here(run, tmp_path)


def spoil_statistics(event, training):
    """Let a statistic be NaN after step 33."""
    if training.step == 33 and type(event).__name__ == "StepFinished":
        next(b for name, b in training.module.named_buffers() if "running_mean" in name)[0] = math.nan


def pass_losses(guard, first_step, losses):
    """Let steps make their updates, none of which is refused."""
    for step, loss in enumerate(losses, first_step):
        guard.begin(step)
        guard.judge("loss", loss)
        guard.end()


def test_going_back_skips_all_that_was_high_and_the_update_before():
    guard = AnomalyGuard(Anomalies(loss_spike="roll_back"))
    pass_losses(guard, 1, [1.0] * 30)
    pass_losses(guard, 31, [1.16, 1.16])  # above half of what makes a spike: the third in a row is one
    guard.begin(33)
    with pytest.raises(SpikeError, match=r"at step 33 it is 1\.16") as raised:
        guard.judge("loss", 1.16)
    assert guard.choose_reaction(raised.value) == "roll_back"
    assert guard.skipped_steps == {30, 31, 32, 33}


def test_a_guard_that_is_loaded_judges_as_the_uninterrupted_one():
    draw = random.Random(3)
    straight = AnomalyGuard(Anomalies(loss_spike="roll_back", non_finite="skip", patience=2))
    pass_losses(straight, 0, [1 + draw.gauss(0, 0.05) for _ in range(40)])
    straight.begin(40)
    with pytest.raises(SpikeError) as raised:
        straight.judge("loss", 50.0)
    assert straight.choose_reaction(raised.value) == "roll_back"
    straight.begin(41)
    straight.choose_reaction(NonFiniteError("the loss must be finite"))
    loaded = AnomalyGuard(straight.settings)
    loaded.load(json.loads(json.dumps(straight.state())))
    assert loaded.skipped_steps == {39, 40}
    for guard in (straight, loaded):
        guard.begin(42)
        with pytest.raises(SpikeError, match=r"above 1\.\d+"):
            guard.judge("loss", 60.0)
        assert guard.choose_reaction(NonFiniteError("the loss must be finite")) == "skip"
        assert guard.choose_reaction(NonFiniteError("the loss must be finite")) == "stop", "the third in a row"
    assert loaded.found[0].limit == straight.found[0].limit


def test_a_run_that_goes_on_judges_as_the_uninterrupted_one(tmp_path):
    """Fewer steps than make a history lie between the checkpoint and the spike."""
    run = run_with(Anomalies(loss_spike="skip", patience=50), num_steps=46)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train_here(run, straight)
    train_here(run.model_copy(update={"num_steps": 30}), broken)
    train_here(run, broken)
    assert [found.event for found in found_in(broken)] == [found.event for found in found_in(straight)]
    assert len(found_in(straight)) == 5
    expected, tensors = read_tensors(straight, 46), read_tensors(broken, 46)
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())


def test_patience_counts_skipped_updates_in_a_row():
    guard = AnomalyGuard(Anomalies(non_finite="skip", patience=2))

    def refuse(step):
        guard.begin(step)
        return guard.choose_reaction(NonFiniteError("the loss must be finite"))

    for step in range(1, 10, 3):
        assert [refuse(step), refuse(step + 1)] == ["skip", "skip"]
        pass_losses(guard, step + 2, [1.0])
    assert [refuse(step) for step in (10, 11, 12)] == ["skip", "skip", "stop"]


def test_reactions_need_workers_that_skip_together():
    with pytest.raises(ValueError, match=r"anomalies.loss_spike must be report or stop with sync diloco"):
        run_with(Anomalies(loss_spike="skip"), sync={"name": "diloco"})
