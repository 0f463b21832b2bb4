"""Functions that are called with events, and may end the training."""

import threading

import pytest

import plain_functions as mine
from paceline.monitor.events import (
    Evaluated,
    Event,
    Failed,
    Preempted,
    ResourcesUsed,
    RunFinished,
    RunStarted,
    StepFinished,
    StoppedEarly,
)
from paceline.monitor.reader import read_log, select
from paceline.training import Callback, Run
from plain_functions import losses_of, make_points_run, make_run, parameters_of, read, train_here

HEARD: list[tuple[int, int, Event]] = []
ASKED = threading.Event()


@pytest.fixture(autouse=True)
def nothing_heard():
    HEARD.clear()
    ASKED.clear()


def note(event, training):
    HEARD.append((training.rank, training.step, event))


def end_at(event, training, step=5, rank=0):
    if not isinstance(event, StepFinished) or training.step < step:
        return
    if training.rank != rank:
        assert ASKED.wait(60)  # workers at their own pace: this one leaves some samples to the other
    else:
        assert training.num_steps == 9
        assert training.run.global_batch == 8
        assert training.directory.is_dir()
        assert sum(parameter.numel() for parameter in training.module.parameters()) > 0
        training.request_stop(f"{training.num_workers} workers are tired")
        ASKED.set()


def preempt_at(event, training):
    if isinstance(event, StepFinished) and training.step == 5 and training.rank == 1:
        training._session.membership.request_stop("SIGTERM")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_callback_hears_on_rank_0_what_the_log_has(tmp_path, num_workers):
    train_here(make_run(callbacks=note, timeline_interval=0), tmp_path, num_workers)
    heard = [(step, event) for rank, step, event in HEARD]
    assert {rank for rank, *_ in HEARD} == {0}
    # What each worker uses is not known to all, and no event for callbacks.
    records = [one for one in read_log(tmp_path / "events.jsonl") if not isinstance(one.event, ResourcesUsed)]
    assert heard == [(record.step, record.event) for record in records]
    assert {type(event) for _, event in heard} >= {RunStarted, StepFinished, Evaluated, RunFinished}


def test_every_worker_is_told_if_all_are_asked(tmp_path):
    train_here(make_run(callbacks=[Callback(path=note, all_workers=True), note]), tmp_path, 3)
    steps = [(rank, step) for rank, step, event in HEARD if isinstance(event, StepFinished)]
    assert sorted(steps) == sorted([(rank, step) for rank in (0, 0, 1, 2) for step in range(1, 10)])


@pytest.mark.parametrize("sync", ["every_step", "asgd"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_callback_ends_the_training_on_all_workers(tmp_path, sync, rank):
    """After a checkpoint, as a finished run: from there it may go on as if nothing had been."""
    end = Callback(path=end_at, arguments={"rank": rank}, all_workers=True)
    run = make_points_run(callbacks=[end], sync=sync)
    assert train_here(run, tmp_path, 2) == [True, True]
    (ended,) = read(tmp_path, StoppedEarly)
    assert ended.event.reason == "2 workers are tired"
    assert len(read(tmp_path, RunFinished)) == 1
    assert read(tmp_path, Evaluated)[-1].step == ended.step
    assert not read(tmp_path, Preempted)
    if sync == "every_step":
        # What was asked for in a step is told with the next, and all end after that.
        assert ended.step == 6
        assert len(losses_of(tmp_path)) == 6
        straight = tmp_path / "straight"
        train_here(make_points_run(), straight, 2)
        train_here(Run.model_validate(make_points_run().model_dump(mode="json")), tmp_path, 2)
        assert losses_of(tmp_path) == losses_of(straight)
        assert all((parameters_of(tmp_path)[n] == t).all() for n, t in parameters_of(straight).items())


def test_a_signal_is_stronger_than_a_callback(tmp_path):
    """Whoever sent it would have the run go on later."""
    run = make_run(callbacks=[Callback(path=preempt_at, all_workers=True), end_at])
    assert train_here(run, tmp_path, 2) == [False, False]
    assert not read(tmp_path, RunFinished)
    assert len(read(tmp_path, Preempted)) == 1


def raise_at(event, training):
    if isinstance(event, mine.StepFinished):
        raise ZeroDivisionError("mine")


def test_an_error_of_a_callback_ends_the_run(tmp_path):
    with pytest.raises(ZeroDivisionError, match="mine"):
        train_here(make_run(callbacks=raise_at), tmp_path)


def fail_at_start(event, training):
    if isinstance(event, RunStarted):
        raise ZeroDivisionError("mine")


def fail_at_a_step(event, training):
    if isinstance(event, StepFinished) and training.step == 3:
        raise ZeroDivisionError("mine")


@pytest.mark.parametrize(("fail", "step"), [(fail_at_start, -1), (fail_at_a_step, 3)])
def test_a_failure_is_logged_at_its_step_and_at_none_before_the_first(tmp_path, fail, step):
    with pytest.raises(ZeroDivisionError):
        train_here(make_run(callbacks=fail), tmp_path, 1)
    (failed,) = select(read_log(tmp_path / "events.jsonl"), Failed)
    assert failed.step == step
