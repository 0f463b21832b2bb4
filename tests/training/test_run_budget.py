"""Budgets: where a run stops, that nothing is lost, and what a resume says."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from paceline.cli.main import main
from paceline.cli.prepare import prepare_new
from paceline.comm import LocalGroup
from paceline.errors import BudgetError
from paceline.launch.exit_codes import ExitCode
from paceline.launch.processes import Ended
from paceline.launch.verdict import judge
from paceline.launch.worker import work
from paceline.monitor import BudgetSpent, EventLog, ResourcesUsed, StepFinished, Warned, read_log, select, summarise
from paceline.monitor.formatting import describe
from paceline.monitor.report import write_report
from paceline.topology import Site
from paceline.training import usage
from paceline.training.budget import Budget, BudgetGuard, Spent, check_resumed
from paceline.training.run_file import RunFile
from plain_functions import losses_of, make_points_run, parameters_of, read, train_here

J_PER_STEP = 10


class PerStep:
    """A meter of a host: the steps in the log of a run use as much energy each."""

    part, source, interval_s = "cpu", "scripted", None

    def __init__(self, directory):
        self.log = directory / "events.jsonl"
        self.before = self.count()

    def count(self):
        return len({record.step for record in select(read_log(self.log), StepFinished)}) if self.log.exists() else 0

    def read_j(self):
        return float(J_PER_STEP * (self.count() - self.before))


@pytest.fixture
def metered(monkeypatch, tmp_path):
    """Let the first worker of runs in this folder use 10 J a step."""

    def find_meters(site, device, place_here, num_here):
        return ([PerStep(tmp_path)] if place_here == 0 else []), {}

    monkeypatch.setattr(usage, "find_meters", find_meters)
    return tmp_path


def train_until_spent(run, directory, num_workers=1):
    """Train, and return what the error says."""
    with pytest.raises(BudgetError) as raised:
        train_here(run, directory, num_workers)
    return str(raised.value)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_run_stops_at_the_last_step_that_is_paid_for_and_loses_nothing(metered, tmp_path_factory, num_workers):
    settings = {"num_steps": 9, "checkpoint_interval": 0}
    said = train_until_spent(make_points_run(budget={"energy": 65}, **settings), metered, num_workers)
    assert said == "60 of 65 J are spent"
    (spent,) = read(metered, BudgetSpent)
    assert (spent.step, spent.event.spent, spent.event.limit, spent.event.unit) == (6, 60, 65, "J")
    assert spent.event.checkpoint.endswith("step-00000006")
    assert summarise(read_log(metered / "events.jsonl")).state == "over_budget"
    assert "ended at step 6: 60 of 65 J are spent, which leaves too little for a step" in describe(spent)
    train_here(make_points_run(budget={"energy": 1000}, **settings), metered, num_workers)
    whole = tmp_path_factory.mktemp("whole")
    train_here(make_points_run(**settings), whole, num_workers)
    assert losses_of(metered) == losses_of(whole)
    ours, theirs = parameters_of(metered), parameters_of(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert sum(record.event.energy_j for record in read(metered, ResourcesUsed)) == 90


@pytest.mark.parametrize("sync", ["local_sgd", "asgd", "dpsgd", "ad_psgd"])
def test_rules_whose_workers_part_stop_together(metered, sync):
    train_until_spent(make_points_run(budget={"energy": 45}, num_steps=9, sync=sync), metered, 2)
    (spent,) = read(metered, BudgetSpent)
    assert spent.event.spent <= 45 + J_PER_STEP
    assert list(metered.glob("checkpoints/step-*"))


def test_warnings_come_before_the_end(metered):
    train_until_spent(make_points_run(budget={"energy": 165, "warn_share": 0.9}, num_steps=40), metered)
    first, second = (record.event.message for record in read(metered, Warned) if "spent" in record.event.message)
    assert first.startswith("the budget will end near step 16 of 40: ")
    assert second == "150 of 165 J are spent at step 15 of 40; the run stops when they are used up"


def guard(budget, before=None, currency="eur", price=3600.0):
    now = SimpleNamespace(s=0.0)
    site = Site(price_per_hour=price, currency=currency)
    made = BudgetGuard(budget, site, before or Spent(), lambda: (now.s, 0.0, now.s), lambda: now.s)
    return made, now


def test_hours_and_money_count_from_all_attempts():
    made, now = guard(Budget(hours=1, money=5000), Spent(money=4000, hours=0.5))
    made.begin(10, LocalGroup())
    now.s = 900
    assert made.check(11, 100, LocalGroup()).reached == "money", "100 more are left, and a step costs 900"
    made, now = guard(Budget(hours=1), Spent(hours=0.5))
    made.begin(10, LocalGroup())
    now.s = 900
    assert not made.check(11, 100, LocalGroup()).reached, "it pays for exactly one more"
    now.s = 1800
    verdict = made.check(12, 100, LocalGroup())
    assert (verdict.reached, verdict.spent, verdict.unit) == ("hours", 1.0, "h")


def test_checks_come_closer_as_the_budget_ends():
    made, now = guard(Budget(money=100))
    made.begin(0, LocalGroup())
    checked = []
    for step in range(1, 2000):
        now.s = 0.1 * step
        if step == made.next_step:
            checked.append(step)
            if made.check(step, 2000, LocalGroup()).reached:
                break
    assert 998 <= checked[-1] <= 1000
    assert len(checked) < 40
    none, _ = guard(Budget())
    none.begin(0, LocalGroup())
    assert none.next_step is None


def test_all_workers_come_to_the_verdict_of_the_first_ones_clock_and_log():
    def worker(group):
        made, now = guard(Budget(hours=1), Spent(hours=0.9) if group.rank == 0 else Spent())
        now.s = 1000.0 * group.rank
        made.begin(group.rank, group)
        now.s += 360
        return made.next_step, made.check(1, 10, group).reached

    assert LocalGroup.run(3, worker) == [(1, "hours")] * 3


def spend(directory, limit=2.0, money=1.9):
    with EventLog(directory / "events.jsonl", run="r", rank=0) as log:
        used = ResourcesUsed(duration_s=10.0, energy_j=5.0, money=money, currency="usd", price="p")
        log.write(used, step=3)
        log.write(BudgetSpent(checkpoint="c", name="money", spent=money, limit=limit, unit="usd"), step=3)


def test_a_resume_with_the_same_budget_says_that_it_is_spent(tmp_path):
    log, site = tmp_path / "events.jsonl", Site(price_per_hour=1)
    check_resumed(Budget(money=1), site, log)
    spend(tmp_path)
    for limit in (2.0, 1.5):
        with pytest.raises(BudgetError, match=rf"1.9 of {limit:.4g} usd are spent; give more \(--budget.money"):
            check_resumed(Budget(money=limit), site, log)
    check_resumed(Budget(money=2.5), site, log)
    check_resumed(Budget(), site, log)
    with pytest.raises(BudgetError, match="5 of 4 J are spent; give more"):
        check_resumed(Budget(energy=4), site, log)


def test_the_exit_code_is_its_own_on_the_command_line_and_for_the_launcher(metered, monkeypatch, capsys):
    out = metered / "run"
    monkeypatch.setattr(usage, "find_meters", lambda *_: ([PerStep(out)], {}))
    overrides = [("num_steps", "9"), ("data.max_bytes", "20000"), ("evaluate_samples", "4"), ("global_batch", "2")]
    small = [("model.width", "16"), ("model.num_layers", "1"), ("budget.energy", "45J")]
    prepare_new("transformer_lm", 1, out, overrides + small)
    assert work(out, RunFile.load(out), LocalGroup(), 0) is ExitCode.BUDGET_SPENT == 77
    records = read_log(out / "events.jsonl")
    assert judge(records, Ended({}), False, out).code is ExitCode.BUDGET_SPENT
    monkeypatch.setattr(sys, "argv", ["paceline", "train", "--resume", str(out)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 77
    assert "40 of 45 J are spent; give more (--budget.energy 90J), or none" in capsys.readouterr().err
    _, page = write_report(out)
    text = page.read_text()
    assert "over budget" in text
    assert "Energy and cost" in text
    assert json.loads((out / "run.json").read_text())["run"]["budget"]["energy"] == 45.0
