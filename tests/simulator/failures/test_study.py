"""Studies of failures: mechanisms beside each other, their intervals, and settings of a run that does so."""

import json

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.cli.overrides import apply_overrides
from paceline.errors import SettingsError
from paceline.recipes import find_recipe
from paceline.simulator.failures import MECHANISMS, Exponential, FailureStudy, Never, Weibull

FEW = {"num_trials": 300}


def test_without_failures_goodput_is_one_and_nothing_is_saved():
    for answer in FailureStudy(failures=Never(), mechanisms=("disk", "peer_memory"), **FEW).answer_all():
        assert (answer.goodput, answer.num_failures, answer.down_share) == (1.0, 0.0, 0.0)
        assert answer.overrides in ({"checkpoint_interval": 0}, {"peer_memory.interval": 0})


def test_saves_without_cost_are_made_all_the_time():
    answer = FailureStudy(save_s=0, failures=Exponential(mtbf_hours=100), **FEW).answer("disk")
    assert (answer.interval_s, answer.interval_young_s, answer.interval_daly_s) == (0.0, 0.0, 0.0)
    assert answer.overrides == {"checkpoint_interval": 1}


def test_mechanisms_are_ordered_by_what_they_save():
    study = FailureStudy(num_steps=150_000, num_hosts=256, failures=Exponential(mtbf_hours=1000), **FEW)
    answers = study.answer_all()
    assert [answer.mechanism for answer in answers] == [
        "hot_replacement", "erasure", "peer_memory", "incremental", "disk",
    ]  # fmt: skip
    assert {answer.mechanism for answer in answers} == set(MECHANISMS)
    goodput = [answer.goodput for answer in answers]
    assert goodput == sorted(goodput, reverse=True)
    for answer in answers:
        assert answer.daly_excess <= 0.02
        assert answer.young_excess <= 0.02
        assert answer.quantiles_s["p5"] <= answer.quantiles_s["p50"] <= answer.quantiles_s["p95"]
        assert answer.money is None
    assert answers[-1].save_s == 50.0
    assert answers[-2].save_s == 12.5


def test_where_the_closed_form_is_not_the_best_the_best_is_taken():
    """Where most hosts fail while they are new, those that have lived need fewer saves."""
    study = FailureStudy(
        num_steps=100_000, num_hosts=1, failures=Weibull(mtbf_hours=2, shape=0.35), save_s=60, restart_s=30, **FEW
    )
    answer = study.answer("disk")
    assert answer.daly_excess > 0.001
    assert answer.interval_s == answer.interval_simulated_s != answer.interval_daly_s


def test_an_interval_of_ones_own_is_answered_as_it_is():
    study = FailureStudy(interval_s=100, step_s=2.0, failures=Exponential(mtbf_hours=100), **FEW)
    answer = study.answer("disk")
    assert (answer.interval_s, answer.overrides) == (100, {"checkpoint_interval": 50})
    best = FailureStudy(step_s=2.0, failures=Exponential(mtbf_hours=100), **FEW).answer("disk")
    assert best.goodput > answer.goodput


def test_spot_hosts_cost_less_and_a_deadline_costs_more():
    spot = {"preemptions": Exponential(mtbf_hours=60), "price_per_hour": 10, "spot_per_hour": 3, **FEW}
    owned = FailureStudy(price_per_hour=10, **FEW).answer("disk")
    free = FailureStudy(**spot).answer("disk")
    bound = FailureStudy(**spot, deadline_hours=30).answer("disk")
    assert owned.money == pytest.approx(16 * 10 * owned.mean_s / 3600)
    assert free.money < bound.money < owned.money
    assert free.money_p95 >= free.money
    assert (free.on_demand_share, owned.on_demand_share) == (0.0, 1.0)
    assert bound.late_share <= bound.num_failures, "only a failure of a host can make it late"
    assert FailureStudy(**spot, failures=Never(), deadline_hours=30).answer("disk").late_share == 0
    assert bound.on_demand_share > 0
    table = FailureStudy(instance="aws_p4d_24xlarge", preemptions=Exponential(mtbf_hours=60), **FEW)
    assert table.find_prices() == (32.77, 11.57, "usd")
    given = FailureStudy(instance="aws_p4d_24xlarge", price_per_hour=10, spot_per_hour=3, currency="eur")
    assert given.find_prices() == (10, 3, "eur")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mechanisms": ("tape",)}, "a mechanism must be a known name, but got 'tape'"),
        ({"deadline_hours": 20}, r"deadline_hours must be at least num_steps x step_s = 27.78 h, but got 20"),
        ({"instance": "nope"}, "an instance type with a price must be a known name, but got 'nope'"),
        (
            {"instance": "aws_p4d_24xlarge", "price_per_hour": 10, "currency": "eur"},
            "currency must be that of the table, usd, where it has one of the two prices, but got eur",
        ),
        ({"price_per_hour": -1}, "greater than or equal to 0"),
        ({"failures": "meteor"}, "failure process must be a known name, but got 'meteor'"),
        ({"failures": {"name": "weibull", "shape": 0}}, "greater than 0"),
        ({"state": "much"}, "a size must be like 100MB"),
        ({"num_hosts": 0}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises((ValidationError, SettingsError), match=message):
        FailureStudy(**settings)


def test_the_settings_that_it_names_are_those_of_a_run():
    run = find_recipe("transformer_lm")()
    for answer in FailureStudy(failures=Exponential(mtbf_hours=500), **FEW).answer_all():
        changed = apply_overrides(run, [(path, str(value)) for path, value in answer.overrides.items()])
        assert (changed != run) == bool(answer.overrides)


def invoke(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_the_command_prints_a_table_its_assumptions_and_json(tmp_path):
    file = tmp_path / "out.json"
    options = ["--failures.mtbf_hours", 500, "--num_trials", 200, "--instance", "aws_p4d_24xlarge", "--json", file]
    done = invoke("failures", "--preemptions", "exponential", "--preemptions.mtbf_hours", 300, *options)
    assert done.exit_code == 0, done.output
    for words in (
        "hot_replacement",
        "100,000 steps of 1 s = 27 h 46 min of work on 16 hosts; a failure every 31 h 15 min on average (exponential)",
        "a preemption every 18 h 45 min on average",
        "cost: 32.77 usd an hour a host on demand, 11.57 spot; hosts that nobody offers are not paid",
        "warning: the price of aws_p4d_24xlarge",
    ):
        assert words in done.output
    document = json.loads(file.read_text())
    assert {answer["mechanism"] for answer in document["answers"]} == set(MECHANISMS)
    assert document["settings"]["failures"] == {"name": "exponential", "mtbf_hours": 500.0}
    again = invoke("failures", "--json", file)
    assert "--json must be a new file" in str(again.exception)
    assert "mtbf" in str(invoke("failures", "--failures.mtbf", 3).exception)


def test_an_endless_interval_is_null_in_json(tmp_path):
    file = tmp_path / "out.json"
    assert invoke("failures", "--failures", "never", "--num_trials", 10, "--json", file).exit_code == 0
    by_name = {answer["mechanism"]: answer for answer in json.loads(file.read_text())["answers"]}
    assert by_name["disk"]["interval_s"] is None
    assert by_name["disk"]["goodput"] == 1.0
