"""Each example runs as its first lines say, and learns."""

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.monitor import StepFinished, read_log, select, summarise

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (extra: examples)"
)


def run(directory: Path, *command: object) -> str:
    """Run Python with `command` in `directory` and return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses_of(directory: Path) -> list[float]:
    return [record.event.loss for record in select(read_log(directory / "events.jsonl"), StepFinished)]


@needs_transformers
@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_alone", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["alone", "two_workers"])
def test_gpt2_as_a_library_learns(tmp_path, monkeypatch, capfd, is_alone):
    script = str(EXAMPLES / "gpt2_library.py")
    if is_alone:
        monkeypatch.setattr(sys, "argv", [script, "--num-steps", "8"])
        runpy.run_path(script, run_name="__main__")
        output = capfd.readouterr().out
    else:
        output = run(tmp_path, *TORCHRUN, script, "--num-steps", 8)
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
