"""Each example runs as its first lines say, and learns."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

from paceline.monitor import StepFinished, read_log, select, summarise
from paceline.testing.processes import check_exits, run_processes

EXAMPLES = Path(__file__).parents[2] / "examples"

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (extra: examples)"
)


def train_gpt2(num_steps: int) -> None:
    sys.argv = ["gpt2_library.py", "--num-steps", str(num_steps)]
    runpy.run_path(str(EXAMPLES / "gpt2_library.py"), run_name="__main__")


def losses_of(directory: Path) -> list[float]:
    return [record.event.loss for record in select(read_log(directory / "events.jsonl"), StepFinished)]


@needs_transformers
@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gpt2_as_a_library_learns(monkeypatch, capfd, num_workers):
    if num_workers == 1:
        monkeypatch.setattr(sys, "argv", [])
        train_gpt2(8)
        output = capfd.readouterr().out
    else:
        results = run_processes(num_workers, train_gpt2, {"num_steps": 8})
        check_exits(results)
        output = results[0].output
    losses = dict(re.findall(r"^step (\d+): loss ([\d.]+)$", output, flags=re.MULTILINE))
    assert float(losses["1"]) == pytest.approx(5.5, abs=0.5)  # about the logarithm of 256: it knows nothing yet
    assert float(losses["8"]) < float(losses["1"]) - 1


@needs_transformers
@pytest.mark.timeout(120)
def test_gpt2_as_a_run_learns(tmp_path, monkeypatch, run_here):
    monkeypatch.chdir(tmp_path)
    done = run_here(
        *("train", f"{EXAMPLES / 'gpt2_run.py'}:run", "--workers", 2, "--out", "run"),
        *("--num_steps", 16, "--model.arguments.width", 64, "--model.arguments.num_layers", 2),
        *("--evaluate_samples", 16, "--loss.sample_tokens", 0),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = losses_of(tmp_path / "run")
    assert len(losses) == 16
    assert losses[-1] < losses[0] - 0.8


@pytest.mark.timeout(120)
def test_data_and_model_of_your_own_learn_to_tell_spirals_apart(tmp_path, monkeypatch, run_here):
    monkeypatch.chdir(tmp_path)
    done = run_here("train", EXAMPLES / "mine.py", "--out", "run", "--workers", 2, "--num_steps", 300)
    assert done.returncode == 0, done.stdout + done.stderr
    finish = summarise(read_log(tmp_path / "run" / "events.jsonl")).finish
    assert finish is not None
    assert finish.event.metrics["accuracy"] > 0.8  # guessing is 0.5
