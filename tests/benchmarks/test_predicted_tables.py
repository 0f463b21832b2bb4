"""Published tables that are predicted: our numbers against what is known of them, and the page of all."""

import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from paceline.benchmarks.reproductions import (
    AllReduceTable,
    Bandwidth,
    CompressionRatios,
    Configurations,
    GPT3OnTPU,
    ResNet65s,
    ResNetEpochs,
    ScalingEfficiency,
)
from paceline.benchmarks.reproductions.all_tables import list_predicted
from paceline.benchmarks.reproductions.predicted import RESNET50, Steps
from paceline.cli.main import app
from paceline.errors import SettingsError
from paceline.simulator.training import answer_rows
from paceline.simulator.training.contract import read_row
from paceline.topology import Switch

PAGE = Path(__file__).parents[2] / "docs" / "reproductions.md"


def by_name(rows):
    return {row.what: row for row in rows}


def test_predicted_steps_are_the_answers_of_the_contract_and_ratios_are_surer_than_they():
    rows = [
        {"model": RESNET50, "sample": {"image": [3, 224, 224]}, "num_ranks": number, "device": "v100_16gb",
         "cluster": {"name": "dgx1"}, "micro_batch": 64.0, "global_batch": 64.0 * number, "precision": "fp16"}
        for number in (1, 64)
    ]  # fmt: skip
    steps = Steps(rows)
    answers = answer_rows([read_row({"id": "", **row}, "row") for row in rows])["rows"]
    for place, answer in enumerate(answers):
        wanted = [answer["step_s"], answer["step_s_low"], answer["step_s_high"]]
        assert steps.times(place) == pytest.approx(wanted, rel=1e-6)
        assert steps.memory_bytes(place) == pytest.approx(answer["memory_bytes"])
    ratio, times = steps.ratio(0, 1), steps.times(0)
    assert ratio[0] == pytest.approx(answers[0]["step_s"] / answers[1]["step_s"])
    assert 1 < ratio[2] / ratio[0] < times[2] / times[0]
    assert steps.ratio(1, 1) == pytest.approx((1, 1, 1))
    rate = steps.rate(1, 3.0)
    assert rate == pytest.approx((3 / steps.times(1)[0], 3 / steps.times(1)[2], 3 / steps.times(1)[1]))


def test_steps_and_bytes_of_all_reduces_are_counted_and_efficiency_follows_from_the_closed_form():
    cluster = Switch(bandwidth="100gbit", latency_s=1e-5, message_s=0.0, reduce_speed="1000000000GB/s")
    table = AllReduceTable(num_nodes=(16,), counted_nodes=(16,), cluster=cluster, num_bytes=1e9, compute_s=0.2)
    rows = by_name(table.reproduce())
    ring = rows["ring on 16 nodes: efficiency"]
    waiting_s = 2 * 15 / 16 * 1e9 / 12.5e9 + 30 * 1e-5
    assert ring.ours == pytest.approx(0.2 / (0.2 + waiting_s), rel=1e-3)
    assert ring.low < ring.ours < ring.high
    steps = {name: rows[f"{name} on 16 nodes: steps"] for name in ("naive", "ring", "double_tree")}
    assert [row.ours for row in steps.values()][:2] == [16, 30]
    assert [row.published for row in steps.values()] == ["15", "30", "8"]
    assert (steps["ring"].note, steps["naive"].note) == ("", "one step more sends the sum back")
    sent = rows["naive on 16 nodes: buffers sent by the busiest rank"]
    assert sent.ours == 15
    assert sent.note == "the busiest rank sends 8 times as much"
    assert rows["ring on 16 nodes: buffers sent by the busiest rank"].ours == pytest.approx(2 * 15 / 16)


def test_a_slower_link_is_never_more_efficient_and_more_nodes_are_not_either():
    rows = by_name(Bandwidth(num_nodes=(2, 64)).reproduce())
    for nodes in (2, 64):
        found = [rows[f"{link}, {nodes} nodes: efficiency"].ours for link in ("25gbit", "100gbit", "200gbit")]
        assert found == sorted(found)
        assert 0 < found[0] < found[-1] <= 1
    for link in ("25gbit", "100gbit"):
        assert rows[f"{link}, 64 nodes: efficiency"].ours <= rows[f"{link}, 2 nodes: efficiency"].ours


def test_the_search_finds_a_pair_that_gives_numbers_of_ours_and_says_when_none_does(monkeypatch):
    from paceline.benchmarks.reproductions import scaling_efficiency

    table = ScalingEfficiency(links=("25gbit", "100gbit"))
    (pair,) = table._try("ResNet-50", "weak", [(64, "100gbit")])
    published = {"ResNet-50": tuple(ours[0] for ours in pair.efficiency)}
    monkeypatch.setattr(scaling_efficiency, "_PUBLISHED", published)
    rows = table.reproduce()
    assert len(rows) == 8
    assert rows[0].note.startswith("64 a device, 100gbit gives all four; alone: 64 a device, 100gbit gives ")
    assert [row.ours for row in rows[:4]] == pytest.approx(published["ResNet-50"])
    monkeypatch.setattr(scaling_efficiency, "_PUBLISHED", {"ResNet-50": (0.95, 0.89, 0.78, 0.3)})
    assert table.reproduce()[0].note.startswith("no pair gives all four; nearest: ")


def test_what_65_seconds_need_of_one_device_is_more_than_it_does():
    rows = by_name(ResNet65s().reproduce())
    one, many = rows["one V100: images/s"], rows["1,024 V100: s for 90 epochs"]
    assert one.published == f"{90 * 1281167 / (65 * 1024 * 0.907):,.0f}"
    assert one.high < 1900
    assert "16.8 h on one for 90 epochs" in one.note
    efficiency = rows["1,024 V100: efficiency"].ours
    assert many.ours == pytest.approx(90 * 1281167 / (1024 * one.ours * efficiency), rel=1e-6)
    epochs = rows["1,024 V100: epochs in 65 s"]
    assert epochs.ours == pytest.approx(90 * 65 / many.ours)
    assert epochs.low < epochs.ours < epochs.high


def test_epochs_at_the_published_rate_are_those_published_for_one_and_nearly_for_more():
    rows = by_name(ResNetEpochs().reproduce())
    assert rows["1 V100: minutes of an epoch at 97 images/s of one"].ours == pytest.approx(220)
    assert 27.5 < rows["8 V100: minutes of an epoch at 97 images/s of one"].ours < 30
    assert "outside of our interval" in rows["1 V100: minutes of an epoch"].note
    assert rows["8 V100: speed-up"].note == ""


def test_nine_days_on_a_pod_need_more_than_its_chips_have():
    rows = by_name(GPT3OnTPU().reproduce())
    assert rows["share of 420 petaflop/s that 9.2 days need"].ours == pytest.approx(3.14e23 / (9.2 * 86400 * 420e15))
    assert "126 petaflop/s, not 420: impossible" in rows["share of the peak of 1,024 chips that 9.2 days need"].note
    days, share = rows["days on 1,024 chips"], rows["share of the peak of 1,024 chips"]
    assert days.ours * share.ours == pytest.approx(3.14e23 / (86400 * 1024 * 123e12))
    assert days.low > 9.2
    assert share.high < 1


def test_peaks_add_up_but_for_those_that_do_not():
    rows = by_name(Configurations().reproduce())
    for name, flops in (("DGX A100", 2496), ("DGX-2H", 2000), ("SuperPOD of 1,024 A100", 319488)):
        assert rows[f"{name}: fp16 Tflop/s"].ours == pytest.approx(flops)
        assert rows[f"{name}: fp16 Tflop/s"].note == ""
    assert rows["DGX-2H: most W"].note.startswith("10,000 W is of DGX-2's data sheet")
    assert rows["TPU v3, one chip: bf16 Tflop/s"].note.startswith("420 is of a board of four chips")
    assert all(row.low is None for row in rows.values())


@pytest.mark.parametrize(
    ("table", "field"), [(AllReduceTable, "num_nodes"), (Bandwidth, "num_nodes"), (CompressionRatios, "num_workers")]
)
def test_fewer_than_two_exchange_nothing(table, field):
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        table(**{field: (1,)})


def test_ratios_of_codecs_count_indices_and_gathering():
    rows = by_name(CompressionRatios(num_workers=(2, 8)).reproduce())
    assert rows["none, 8 workers: ratio"].ours == 1
    assert rows["top-k, 1 %, 2 workers: ratio"].ours == pytest.approx(50, rel=0.01)
    assert rows["top-k, 1 %, 8 workers: ratio"].ours == pytest.approx(50 * 2 / 8, rel=0.01)
    assert "gathered from all 8 workers" in rows["top-k, 1 %, 8 workers: ratio"].note
    assert rows["1 bit, 8 workers: ratio"].note == ""


def test_the_page_has_each_table_that_is_predicted():
    text = PAGE.read_text()
    assert all(f"## {name}\n\n`paceline reproduce {name}`: " in text for name in list_predicted())


@pytest.mark.slow
def test_all_tables_are_written_as_the_page_that_the_documentation_has(tmp_path):
    page, rows = tmp_path / "page.md", tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["reproduce", "all", "--markdown", str(page), "--json", str(rows)])
    assert result.exit_code == 0, result.output
    tables = {row["table"] for row in json.loads(rows.read_text())}
    assert tables == set(list_predicted())

    def read(path):
        """Return all but numbers of ours, whose last digits depend on the machine."""
        lines = [line.split(" | ") for line in path.read_text().splitlines()]
        return [(cells[0], cells[3]) if len(cells) == 5 else cells for cells in lines]

    assert read(page) == read(PAGE), "write the page anew"
    ours = [
        float(line.split(" | ")[1].replace(",", ""))
        for line in PAGE.read_text().splitlines()
        if "counted" in line and line.count(" | ") == 4
    ]
    assert len(ours) > 30
    assert all(map(math.isfinite, ours))
    again = CliRunner().invoke(app, ["reproduce", "all", "--markdown", str(page)])
    assert isinstance(again.exception, SettingsError)
    assert "--markdown must be a new file" in str(again.exception)
