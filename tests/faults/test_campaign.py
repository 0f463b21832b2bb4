"""The fault campaign: its judge, saves that are killed at every call, and a part of it with a fixed seed."""

import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import CheckpointStore, durable, store
from paceline.monitor.events import Restarted, RunFinished
from paceline.monitor.log import EventLog

TOOLS = Path(__file__).parents[2] / "tools" / "faults"


@pytest.fixture
def load(monkeypatch):
    """Return what imports a file of the campaign, whose files import each other as those of a script do."""
    monkeypatch.syspath_prepend(str(TOOLS))
    names = [path.stem for path in TOOLS.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def test_every_rule_kind_and_phase_is_drawn(load):
    scenarios = load("scenarios")
    drawn = [scenarios.draw(0, number) for number in range(300)]
    assert drawn == [scenarios.draw(0, number) for number in range(300)]
    assert {one.name for one in drawn} == set(scenarios.KINDS)
    killed = [one for one in drawn if one.name == "kill"]
    assert {one.rule for one in killed} == set(scenarios.RULES)
    assert {one.faults[0].phase for one in killed} == set(scenarios.PHASES)
    assert {one.faults[0].rank for one in killed} >= {0, 1, 2}


@pytest.mark.parametrize(
    ("rule", "total", "weight", "mean", "problem"),
    [
        ("local_sgd", 4.0, 2.0, 1.5, ""),
        ("local_sgd", 4.0, 3.0, 1.5, "weights of exchange"),
        ("local_sgd", 4.0, 2.0, 1.50001, "put in"),
        ("easgd", 1.0, 2.0, 6.0, ""),
        ("easgd", 1.0, 2.0, 1.5, "put in"),
    ],
)
def test_an_exchange_that_conserves_nothing_is_found(load, tmp_path, rule, total, weight, mean, problem):
    judging, scenarios = load("judging"), load("scenarios")
    first = {"weight": weight, "total": total, "sum": 2.0 * weight, "norm": 4.0}
    puts = [first, {"weight": 2.0, "total": total, "sum": 2.0, "norm": 2.0}]
    for number, put in enumerate(puts):
        exchange = {"epoch": 0, "name": "parameters", "number": 1, "step": 3}
        lines = [exchange | put, exchange | {"mean": mean}]
        (tmp_path / f"exchanges-{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = judging.Outcome(scenarios.Scenario(0, "kill", rule))
    judging._judge_exchanges(outcome, tmp_path)
    assert bool(outcome.problems) == bool(problem)
    assert all(problem in found for found in outcome.problems)


@pytest.mark.parametrize(
    ("rule", "num_restarts", "is_wrong"), [("dpsgd", 1, True), ("dpsgd", 0, False), ("ad_psgd", 1, False)]
)
def test_a_rule_that_starts_again_where_it_could_go_on_is_found(load, tmp_path, rule, num_restarts, is_wrong):
    judging, scenarios = load("judging"), load("scenarios")
    (tmp_path / "run").mkdir()
    with EventLog(tmp_path / "run" / "events.jsonl", run="r", rank=0) as log:
        for attempt in range(num_restarts):
            log.write(Restarted(attempt=attempt, reason="rank 0 exited with code 1"), step=3)
        log.write(RunFinished(held_out_loss=1.0, metrics={}, duration_s=1.0, samples_per_s=1.0), step=3)
    outcome = judging.Outcome(scenarios.Scenario(0, "kill", rule))
    judging._judge_log(outcome, tmp_path)
    assert outcome.problems == ["all started again, and did not go on without the lost worker"] * is_wrong


def save(folder, weight, position):
    with CheckpointStore(folder / "run" / "checkpoints") as checkpoints:
        document = {"loader": {"low_water": position, "done_above": []}}
        checkpoints.save({"model/weight": torch.tensor([1.0, weight])}, document, 24)


@pytest.mark.parametrize(
    ("rule", "weight", "position", "num_changes", "problem"),
    [
        ("every_step, exact", 2.0, 288, 1, ""),
        ("every_step, exact", 2.0001, 288, 1, "weights differ from"),
        ("every_step", 2.0001, 288, 1, ""),
        ("every_step", 2.0001, 288, 0, "weights differ from"),
        ("every_step", 2.001, 288, 1, "more than other sums explain"),
        ("dpsgd", 2.0, 276, 0, "used samples up to 276"),
        ("asgd", 3.0, 288, 0, ""),
    ],
)
def test_other_weights_and_lost_samples_are_found(load, tmp_path, rule, weight, position, num_changes, problem):
    judging, scenarios = load("judging"), load("scenarios")
    hit, straight = tmp_path / "hit", tmp_path / "straight"
    save(hit, weight, position)
    save(straight, 2.0, 288)
    outcome = judging.Outcome(scenarios.Scenario(0, "kill", rule), num_changes=num_changes)
    judging._judge_position(outcome, hit)
    judging._judge_weights(outcome, hit, straight)
    assert bool(outcome.problems) == bool(problem)
    assert all(problem in found for found in outcome.problems)


@pytest.mark.parametrize("incremental", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_save_that_is_killed_before_any_call_loses_nothing(load, tmp_path, incremental):
    found = load("saves").kill_saves(tmp_path, incremental)
    assert found.num_killed > 50
    assert 10 < found.num_new < found.num_killed - 10


def test_a_save_that_removes_the_old_checkpoint_first_is_found(load, tmp_path, monkeypatch):
    saves = load("saves")
    real = store.CheckpointStore._begin

    def begin(self, document, step, process_group):
        for old in self.list_checkpoints():
            durable.remove_checkpoint(old)
        return real(self, document, step, process_group)

    monkeypatch.setattr(store.CheckpointStore, "_begin", begin)
    with pytest.raises(AssertionError, match="no checkpoint is left"):
        saves.kill_saves(tmp_path, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_runs", "num_struck"), [(9, 7), pytest.param(14, 10, marks=pytest.mark.campaign)])
def test_some_runs_of_the_campaign_end_as_if_nothing_had_happened(tmp_path, num_runs, num_struck):
    command = [sys.executable, str(TOOLS / "campaign.py"), "--num_runs", str(num_runs), "--directory", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    outcomes = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert [one for one in outcomes if one["problems"]] == [], done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(outcomes) == num_runs
    assert sum(one["num_struck"] for one in outcomes) >= num_struck


@pytest.mark.parametrize("has_finished", [True, False])
def test_a_checkpoint_is_damaged_only_where_training_goes_on_from_it(load, tmp_path, monkeypatch, has_finished):
    campaign, scenarios = load("campaign"), load("scenarios")
    codes, damaged = iter([-9, 0]), []

    class KilledLauncher:
        def __init__(self, arguments, folder):
            (folder / "output.txt").touch()
            (folder / "run").mkdir(exist_ok=True)
            with EventLog(folder / "run" / "events.jsonl", run="r", rank=0) as log:
                if has_finished:
                    log.write(RunFinished(held_out_loss=1.0, metrics={}, duration_s=1.0, samples_per_s=1.0), step=24)

        def wait(self, timeout_s):
            return next(codes)

        def close(self):
            pass

    monkeypatch.setattr(campaign.warm, "Launcher", KilledLauncher)
    monkeypatch.setattr(campaign, "damage", lambda *arguments: damaged.append(arguments))
    scenario = scenarios._make_damage("damaged checkpoint", 158, random.Random(0))
    outcome = campaign.execute(scenario, tmp_path / "hit", seed=11)
    assert outcome.problems == []
    assert outcome.is_damaged == bool(damaged) == (not has_finished)
    load("judging")._judge_log(outcome, tmp_path / "hit")
    assert ("a damaged checkpoint was taken for a whole one" in outcome.problems) == (not has_finished)
