import json
import math
import shutil

import pytest
import torch
from pydantic import ValidationError

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.errors import CommunicationError, SettingsError
from paceline.monitor import EventLog
from paceline.monitor.events import CheckpointIntervalChosen, CheckpointSaved, Restarted, RunStarted, StepFinished
from paceline.simulator.failures import find_optimal_interval_s
from paceline.training.save_interval import SaveInterval, estimate_failures_per_day
from plain_functions import build_linear, make_points_run, parameters_of, read, train_here


@pytest.mark.parametrize(("save_s", "failure_s"), [(0.1, 86400.0), (30.0, 3600.0), (60.0, 600.0)])
def test_the_optimum_loses_less_time_than_its_neighbours(save_s, failure_s):
    """By Daly's own model of a run with failures at random instants, without a time to restart."""

    def lost(interval_s):
        return math.expm1((interval_s + save_s) / failure_s) * failure_s / interval_s

    best = find_optimal_interval_s(save_s, failure_s)
    least = min(lost(best * factor) for factor in (0.25, 0.5, 0.8, 1.25, 2, 4))
    assert lost(best) < least


def test_youngs_rule_is_its_limit_for_cheap_checkpoints_and_dear_ones_are_as_rare_as_failures():
    assert find_optimal_interval_s(1e-3, 1e6) == pytest.approx(math.sqrt(2 * 1e-3 * 1e6), rel=1e-3)
    assert find_optimal_interval_s(300.0, 100.0) == 100.0


def test_fixed_steps_are_multiples():
    every = SaveInterval(4, 1.0)
    assert [step for step in range(1, 13) if every.is_due(step)] == [4, 8, 12]
    assert [every.next_after(step) for step in (0, 3, 4)] == [4, 4, 8]
    none = SaveInterval(0, 1.0)
    assert not any(none.is_due(step) for step in range(1, 13))
    assert none.next_after(3) is None


def test_chosen_steps_follow_cost_speed_and_failures(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def choose(failures_per_day, save_s=2.0, write_s=0.0):
        chosen, now[0] = SaveInterval("auto", failures_per_day), 0.0
        for step in range(1, 12):
            if chosen.is_due(step):
                break
            now[0] += 0.5
        assert step == 11
        now[0] += save_s
        interval = chosen.choose(step, save_s, write_s)
        event = chosen.follow(step, interval, save_s)
        assert (event.interval, event.save_s, event.step_s) == (interval, save_s, pytest.approx(0.5))
        assert chosen.next_after(step) == step + interval
        assert not chosen.is_due(step + interval - 1)
        assert chosen.is_due(step + interval)
        assert chosen.follow(step, interval, save_s) is None, "told once"
        return interval

    assert choose(24.0) == round(find_optimal_interval_s(2.0, 3600.0) / 0.5)
    assert choose(2400.0) < choose(24.0) < choose(1.0)
    assert choose(24.0, save_s=0.1) < choose(24.0)
    assert choose(2400.0, save_s=1e-3, write_s=40.0) == 80, "the one before must be written first"


def test_the_rate_of_failures_is_that_of_the_log(tmp_path):
    assert estimate_failures_per_day(tmp_path / "absent") == 1
    with EventLog(tmp_path / "log", run="r", rank=-1) as log:
        for attempt in (1, 2, 3):
            log.write(Restarted(attempt=attempt, reason="lost"), step=-1)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    lines[-1]["unix_s"] = lines[0]["unix_s"] + 86400
    (tmp_path / "log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert estimate_failures_per_day(tmp_path / "log") == 2


def test_a_run_chooses_its_interval_and_says_why(tmp_path):
    run = make_points_run(num_steps=40, checkpoint_interval="auto", failures_per_day=1e9, keep_checkpoints=None)
    train_here(run, tmp_path, 2)
    chosen = read(tmp_path, CheckpointIntervalChosen)
    assert chosen[0].step == 11
    assert chosen[0].event.failures_per_day == 1e9
    assert chosen[0].event.interval >= 1
    saved = [Checkpoint.open(path).step for path in CheckpointStore(tmp_path / "checkpoints").list_checkpoints()][::-1]
    assert saved[0] == 11
    assert saved[1] == 11 + chosen[0].event.interval or saved[1] == 40
    assert saved[-1] == 40


def test_workers_at_their_own_pace_need_a_number():
    with pytest.raises((ValidationError, SettingsError), match="checkpoint_interval must be a number of steps with"):
        make_points_run(checkpoint_interval="auto", sync="asgd")


@pytest.mark.parametrize("sync", ["every_step", "local_sgd"])
def test_workers_go_on_from_their_peers_memory_where_it_is_newer_than_the_disk(tmp_path, sync):
    """The power fails at step 7, after a checkpoint at 4 and a copy at 6; memory stays, as it does for a process."""
    (tmp_path / "memory").mkdir()
    kept = {"interval": 6, "num_data": 2, "folder": str(tmp_path / "memory")}
    settings = {"num_steps": 12, "checkpoint_interval": 4, "sync": sync, "peer_memory": kept, "keep_checkpoints": None}
    straight = make_points_run(**settings | {"peer_memory": {}})
    train_here(straight, tmp_path / "straight", 3)
    with pytest.raises((RuntimeError, CommunicationError), match="the power must be on"):
        train_here(make_points_run(**settings, callbacks=[fail_at_seven]), tmp_path / "cut", 3)
    (folder,) = (tmp_path / "memory").iterdir()
    assert folder.stat().st_mode & 0o077 == 0, "for its owner alone"
    shutil.rmtree(folder / "rank-00000")
    train_here(make_points_run(**settings), tmp_path / "cut", 3)
    first, second = read(tmp_path / "cut", RunStarted)
    assert (first.event.start_step, second.event.start_step) == (0, 6)
    assert second.event.resumed_from.endswith("step-00000006")
    expected, actual = parameters_of(tmp_path / "straight"), parameters_of(tmp_path / "cut")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert list((tmp_path / "memory").iterdir()) == []


def fail_at_seven(event, training):
    if isinstance(event, StepFinished) and training.step == 7:
        raise RuntimeError("the power must be on")


def build_mostly_frozen():
    module = build_linear()
    module.register_parameter("frozen", torch.nn.Parameter(torch.arange(1000.0), requires_grad=False))
    return module


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_run_writes_incremental_checkpoints(tmp_path, num_workers):
    settings = {"num_steps": 4, "checkpoint_interval": 1, "keep_checkpoints": None, "incremental_checkpoints": 2}
    train_here(make_points_run(**settings, model=build_mostly_frozen), tmp_path, num_workers)
    saved = sorted(read(tmp_path, CheckpointSaved), key=lambda record: record.event.path)
    assert [record.event.shared_bytes >= 4000 for record in saved] == [False, True, True, False]
    assert saved[1].event.num_bytes < saved[0].event.num_bytes - 4000
    for path in CheckpointStore(tmp_path / "checkpoints").list_checkpoints():
        Checkpoint.open(path).verify()
