"""The plan for an hour with a GPU, without one: it is whole, it goes on where it stopped, and says what it left out."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

TOOL = Path(__file__).parents[2] / "tools" / "gpu_hour.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("gpu_hour", TOOL)
    made = importlib.util.module_from_spec(spec)
    sys.modules["gpu_hour"] = made  # dataclasses look there
    spec.loader.exec_module(made)
    yield made
    del sys.modules["gpu_hour"]


@pytest.mark.slow
def test_the_plan_is_ready(tool):
    assert tool.rehearse(tool.PLAN) == []


def test_a_broken_plan_is_noticed(tool, monkeypatch):
    monkeypatch.setattr(tool, "collect", lambda _: (5, "tests/test_package.py::test_one\nno tests ran"))
    stages = [
        tool.Stage("throughput", ("throughput", "--sequence_lenght", "4"), 1),
        tool.Stage("memory", ("memory", "--workers.num_workers", "0"), 1),
        tool.Stage("test-none", ("tests/test_registry.py",), 1),
    ]
    found = "\n".join(tool.rehearse(stages))
    for word in (
        "sequence_lenght",
        "num_workers",
        "does not collect: tests/test_package.py",
        "no test of tests/test_registry.py is marked gpu",
    ):
        assert word in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a CUDA device")
def test_without_a_gpu_it_says_so(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_hour.py"])
    assert tool.main() == 1
    assert "needs a CUDA device, and here is none" in capsys.readouterr().out


def test_it_goes_on_where_it_stopped(tool, monkeypatch, tmp_path):
    (tmp_path / tool.RESULTS).mkdir(parents=True)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    names = ("first", "second", "third")
    codes = {"first": 0, "second": 1, "third": 0}
    monkeypatch.setattr(
        tool.Stage, "command", lambda stage: [sys.executable, "-c", f"print('{stage.name}'); exit({codes[stage.name]})"]
    )
    plan = [tool.Stage(name, (), 30, num_gpus=2 if name == "third" else 1) for name in names]

    def outcomes():
        stages = json.loads((tmp_path / tool.RESULTS / "gpu-plan.json").read_text())["stages"]
        return {name: stage["outcome"] for name, stage in stages.items()}

    assert tool.run(plan, 1, "a GPU", 1000) == 1
    assert outcomes() == {"first": "done", "second": "failed", "third": "left out"}
    codes |= {"first": 1, "second": 0}  # the first is not run again
    assert tool.run(plan, 2, "a GPU", 1000) == 0
    assert set(outcomes().values()) == {"done"}
    codes["first"] = 0
    assert tool.run(plan, 2, "another GPU", 0) == 0  # no time is left for what another device has not done
    assert set(outcomes().values()) == {"done"}


def test_a_stage_that_does_not_end_is_cut_off(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool.Stage, "command", lambda stage: [sys.executable, "-c", "import time; time.sleep(600)"])
    found = tool.run_stage(tool.Stage("endless", (), 1), 0.5)
    assert found["outcome"] == "failed"
    assert "did not end within" in found["why"]
