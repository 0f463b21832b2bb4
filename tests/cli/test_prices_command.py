import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.errors import SettingsError
from paceline.topology.tables import read_prices


def invoke(*arguments):
    return CliRunner().invoke(app, ["prices", *map(str, arguments)])


def test_tables_are_listed_with_source_date_and_a_warning_of_age():
    shown = invoke().output
    for words in ("aws_p5_48xlarge", "98.32 usd", "kgCO2e/kWh", "0.475", "Our World in Data", "1.58", "Uptime"):
        assert words in shown
    assert "warning: the price of aws_p5_48xlarge in us-east-1 is" in shown


def test_what_is_printed_as_csv_is_a_table_of_ones_own(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(invoke("--csv", "prices").output.replace("98.32", "55.04").replace("2024-06-01", "2999-01-01"))
    assert {price.type: price for price in read_prices(file)}["aws_p5_48xlarge"].on_demand_per_hour == 55.04
    shown = invoke("--table", file).output
    assert "55.04 usd" in shown
    assert "warning" not in shown
    refused = invoke("--csv", "taxes")
    assert isinstance(refused.exception, SettingsError)
    with pytest.raises(SettingsError, match="a table must be one of prices, grid, pue"):
        raise refused.exception
