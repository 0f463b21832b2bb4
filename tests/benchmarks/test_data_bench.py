"""`bench data` on a few small images."""

import json
import sys

import pytest

from paceline.benchmarks import data_sides
from paceline.benchmarks.data import DataBenchmark, Numbers, make_loader, write_images
from paceline.errors import SettingsError

FEW = {"num_images": 64, "batch": 8, "num_steps": 2, "num_rounds": 2}


def test_each_case_has_its_rows(tmp_path):
    rows = DataBenchmark(cases=("resume", "stall"), folder=tmp_path, **FEW).measure()
    assert [row.metric for row in rows] == ["first batch at 9M", "data stall", "data stall"]
    assert all(row.ratio >= 0 for row in rows)
    assert "slowest stage decode" in rows[1].case  # which sleeps; what is slowest on a busy machine is its own affair
    assert "slowest stage" in rows[2].case


def test_our_side_and_a_data_loader_decode_the_same_images(tmp_path, capsys):
    write_images(tmp_path / "images", 64)
    for side in ("paceline", "dataloader"):
        batch = next(data_sides.SIDES[side](tmp_path, 8, 0))
        images = batch.inputs if side == "paceline" else batch[0]
        assert images.shape == (8, 3, data_sides.CROP, data_sides.CROP)
        assert images.min() >= -1
        assert images.max() <= 1
    data_sides.main("paceline", tmp_path, 8, 2, 0)
    assert json.loads(capsys.readouterr().out)["samples_per_s"] > 0


def test_a_python_without_the_peers_is_refused(tmp_path):
    bench = DataBenchmark(cases=("decode",), folder=tmp_path, peers_python=sys.executable, **FEW)
    write_images(tmp_path / "images", 64)
    pytest.importorskip("PIL")
    with pytest.raises(SettingsError, match=r"(?s)a Python that has webdataset, .*make data-peers"):
        bench._start("webdataset", tmp_path, 0)


def test_a_loader_resumes_in_the_middle_of_ten_million():
    loader = make_loader(Numbers(10_000_000), 4)
    loader.load_state_dict({**loader.state_dict(), "low_water": 9_000_000})
    batch = next(iter(loader))
    assert batch.interval.start == 9_000_000
    assert batch.data.tolist() == loader.order.samples_at(batch.interval).tolist()
