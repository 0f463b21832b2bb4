"""Tables of prices, grids and data centres: the shipped ones, one's own, and what is wrong with them."""

from datetime import date

import pytest
from pydantic import ValidationError

from paceline.errors import SettingsError
from paceline.registry import list_variants
from paceline.topology import Cluster, Joules, Site
from paceline.topology.site import guess_device
from paceline.topology.tables import TABLES, find_price, read_grid, read_overheads, read_prices, read_shipped

HEADER = "type,region,on_demand_per_hour,spot_per_hour,egress_per_gb,currency,as_of"


def write(tmp_path, *lines, header=HEADER):
    file = tmp_path / "mine.csv"
    file.write_text("\n".join([header, *lines]) + "\n")
    return str(file)


def test_what_is_shipped_can_be_read_and_each_row_says_when_and_whence():
    assert {price.type for price in read_prices()} <= set(list_variants(Cluster))
    assert all(factor.source and factor.kg_co2e_per_kwh > 0 for factor in read_grid())
    assert {"world", "fra", "usa"} <= {factor.zone for factor in read_grid()}
    assert {overhead.place for overhead in read_overheads()} >= {"none", "average", "aws"}
    for name in TABLES:
        assert "as_of" in read_shipped(name).splitlines()[0]
    with pytest.raises(SettingsError, match="a table must be one of prices, grid, pue, but got 'taxes'"):
        read_shipped("taxes")


def test_a_table_of_ones_own_is_read_with_its_units_and_its_age(tmp_path):
    file = write(tmp_path, "box,home,2.5,,,eur,2026-01-01", "box,away,3,1,0.1,eur,2026-06-30")
    prices = read_prices(file)
    assert [find_price(prices, "box", region).region for region in (None, "away")] == ["home", "away"]
    home, away = prices
    assert away.describe(is_spot=True) == "1 eur an hour a host (box in away, spot, as of 2026-06-30)"
    with pytest.raises(SettingsError, match="box in home must have a spot price, but has none"):
        home.per_hour(is_spot=True)
    assert away.warn_of_age(date(2026, 7, 30)) == ""
    assert "is 212 days old (as of 2026-01-01): prices change" in home.warn_of_age(date(2026, 8, 1))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("box,home,-1,,,eur,2026-01-01", "mine.csv, line 2: on_demand_per_hour must be greater than or equal to 0"),
        ("box,home,,,,eur,2026-01-01", "mine.csv, line 2: on_demand_per_hour must be"),
        ("box,home,1,,,eur,yesterday", "line 2: as_of must be"),
        ("box,home,1,-2,,eur,2026-01-01", "line 2: spot_per_hour must be greater than or equal to 0"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(tmp_path, line, message):
    with pytest.raises(SettingsError, match=message):
        read_prices(write(tmp_path, line))


def test_a_wrong_file_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"must be a CSV file that can be read, but got .*nowhere"):
        read_prices(tmp_path / "nowhere.csv")
    with pytest.raises(SettingsError, match="must have a row below its header, but has none"):
        read_prices(write(tmp_path))
    with pytest.raises(SettingsError, match=r"the header of .* must be as_of,type,region,.*, but got type,price"):
        read_prices(write(tmp_path, "box,1", header="type,price"))
    prices = read_prices()
    with pytest.raises(SettingsError, match="an instance type with a price must be a known name, but got 'aws_p5'"):
        find_price(prices, "aws_p5")
    with pytest.raises(SettingsError, match="a region of aws_p5_48xlarge must be a known name, but got 'mars'"):
        find_price(prices, "aws_p5_48xlarge", "mars")


def test_a_site_has_price_and_carbon_with_their_origins(tmp_path):
    site = Site(instance="aws_p4d_24xlarge", is_spot=True, zone="fra", place="aws")
    assert site.host_per_hour == find_price(read_prices(), "aws_p4d_24xlarge").spot_per_hour
    assert "aws_p4d_24xlarge in us-east-1, spot, as of" in site.describe_price()
    factor = next(one for one in read_grid() if one.zone == "fra").kg_co2e_per_kwh
    assert site.carbon_kg(2 * 3.6e6) == pytest.approx(2 * factor * 1.15)
    assert "kgCO2e/kWh (fra, 2023; " in site.describe_carbon()
    assert "PUE 1.15 (AWS" in site.describe_carbon()
    given = Site(price_per_hour=2.5, currency="eur", kg_co2e_per_kwh=0.1, pue=1.2)
    assert (given.host_per_hour, given.used_currency) == (2.5, "eur")
    assert given.describe_price() == "2.5 eur an hour a host (as given)"
    assert given.carbon_kg(3.6e6) == pytest.approx(0.12)
    assert given.describe_carbon() == "0.1 kgCO2e/kWh (as given), PUE 1.2 (as given)"
    assert (Site().host_per_hour, Site().describe_price()) == (None, "")
    own = Site(instance="box", prices=write(tmp_path, "box,home,2.5,,,eur,2026-01-01"))
    assert (own.host_per_hour, own.used_currency, own.preset) == (2.5, "eur", None)


def test_a_device_is_known_by_its_name_or_by_what_is_declared():
    assert Site().find_device("NVIDIA H100 80GB HBM3").load_w == 700
    assert Site(instance="aws_p4d_24xlarge").find_device("whatever").load_w == 400
    assert Site(device="p100", instance="aws_p4d_24xlarge").find_device("NVIDIA H100").load_w == 300
    assert guess_device("Radeon") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"instance": "nope"}, "an instance type with a price must be a known name, but got 'nope'"),
        ({"instance": "aws_p5_48xlarge", "region": "mars"}, "a region of aws_p5_48xlarge"),
        ({"zone": "atlantis"}, "a grid's zone must be a known name, but got 'atlantis'"),
        ({"place": "cellar"}, "a data centre's place must be a known name, but got 'cellar'"),
        ({"price_per_hour": -1}, "greater than or equal to 0"),
        ({"pue": 0.9}, "greater than or equal to 1"),
        ({"device": "abacus"}, "device must be a known name, but got 'abacus'"),
        ({"grid": "nowhere.csv"}, "nowhere.csv must be a CSV file that can be read"),
    ],
)
def test_a_site_that_cannot_be_is_refused(settings, message):
    with pytest.raises((ValidationError, SettingsError), match=message):
        Site(**settings)


@pytest.mark.parametrize(
    ("text", "joules"), [("5kWh", 18e6), ("300 Wh", 1.08e6), ("20MJ", 2e7), (7.5, 7.5), ("1e3J", 1e3), (".5kJ", 500.0)]
)
def test_an_energy_has_a_unit(text, joules):
    assert Joules.parse(text) == joules


@pytest.mark.parametrize("text", ["5", "5kwh", "0kWh", "-1J", "kWh", True, float("nan"), "1.2.3J", "5 kWh/s"])
def test_an_energy_without_a_unit_or_a_positive_number_is_refused(text):
    with pytest.raises(SettingsError, match="an energy must be like 5kWh, 300Wh or 20MJ, with its unit, and positive"):
        Joules.parse(text)
