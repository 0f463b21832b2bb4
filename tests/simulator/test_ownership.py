"""Hosts that are bought beside rented ones: both cost the same where it says so."""

import json
from dataclasses import asdict

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.errors import SettingsError
from paceline.simulator.ownership import Ownership

GIVEN = {"capital": 100_000, "price_per_hour": 10, "idle_w": 1000, "load_w": 5000, "pue": 1.5, "lifetime_years": 5}


def test_costs_are_sums_of_what_is_given():
    answer = Ownership(**GIVEN, utilisation=0.5, electricity_per_kwh=0.2, resale_share=0.1, upkeep_share=0.1).compare()
    hours = 5 * 8766
    assert answer.work_hours == hours / 2
    assert answer.kwh == pytest.approx(1.5 * (1 + 0.5 * 4) * hours)
    assert answer.owned == pytest.approx(100_000 * (1 - 0.1 + 0.5) + 0.2 * answer.kwh)
    assert answer.rented == pytest.approx(10 * hours / 2)


def test_at_the_break_even_both_cost_the_same():
    first = Ownership(**GIVEN).compare()
    assert first.break_even_utilisation is not None
    same = Ownership(**GIVEN, utilisation=first.break_even_utilisation).compare()
    assert same.owned == pytest.approx(same.rented)
    assert same.break_even_months == pytest.approx(12 * 5)
    busy = Ownership(**GIVEN, utilisation=1.0).compare()
    hours = busy.break_even_months / 12 * 8766
    running = (busy.owned - 90_000) / busy.hours
    assert 10 * hours == pytest.approx(90_000 + running * hours)


def test_a_price_below_the_cost_of_running_is_never_met():
    answer = Ownership(**(GIVEN | {"price_per_hour": 0.5})).compare()
    assert (answer.break_even_utilisation, answer.break_even_months) == (None, None)
    lines = answer.describe()
    assert lines[2] == (
        "break-even: renting costs less at any utilisation; at 70% it has not paid for itself in 5 years"
    )


def test_power_and_price_come_from_the_instance_type():
    answer = Ownership(capital=330_000, instance="aws_p5_48xlarge").compare()
    assert (answer.idle_w, answer.load_w) == (1600 + 8 * 75, 2000 + 8 * 700)
    assert answer.rent_per_hour == 98.32
    assert "aws_p5_48xlarge in us-east-1, on demand, as of 2024-06-01" in answer.describe()[1]
    assert answer.describe()[3].startswith("warning: the price of aws_p5_48xlarge")
    assert Ownership(capital=330_000, instance="aws_p5_48xlarge", is_spot=True).compare().rent_per_hour == 39.33


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("capital", "capital must be given, the price of a host that is bought"),
        ("price_per_hour", "a price of rented hosts must be given"),
        ("load_w", "the power of a host must be known; give --idle_w and --load_w"),
    ],
)
def test_what_is_missing_is_asked_for(left_out, message):
    with pytest.raises(SettingsError, match=message):
        Ownership(**{name: value for name, value in GIVEN.items() if name != left_out}).compare()


def test_what_cannot_be_is_refused():
    with pytest.raises(ValidationError, match="load_w must be at least idle_w = 1000, but got 500"):
        Ownership(**(GIVEN | {"load_w": 500}))
    with pytest.raises(SettingsError, match="currency must be that of the price, usd, but got eur"):
        Ownership(capital=1, instance="aws_p5_48xlarge", currency="eur").compare()
    with pytest.raises(ValidationError, match="greater than 0"):
        Ownership(capital=-5)


def test_the_command_prints_units_and_assumptions_and_json(tmp_path):
    file = tmp_path / "out.json"
    options = [part for name, value in GIVEN.items() for part in (f"--{name}", str(value))]
    done = CliRunner().invoke(app, ["simulate", "ownership", *options, "--json", str(file)])
    assert done.exit_code == 0, done.output
    owned, rented, even = done.output.splitlines()
    for words in ("usd a host", "usd an hour of work", "PUE 1.5", "5,000 W for 70% of hours, else 1,000 W", "0.12 usd"):
        assert words in owned
    assert "10 usd an hour of work (as given; returned while there is no work; 30,681 hours of work)" in rented
    assert "owning costs less above a utilisation of" in even
    document = json.loads(file.read_text())
    assert document["break_even_utilisation"] == Ownership(**GIVEN).compare().break_even_utilisation
    assert document["owned"] == asdict(Ownership(**GIVEN).compare())["owned"]
