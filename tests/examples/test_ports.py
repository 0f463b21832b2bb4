"""Scripts of other libraries that were ported: few lines are new, and what is learnt is the same."""

import difflib
import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from paceline.testing.processes import run_processes

PORTS = Path(__file__).parents[2] / "examples" / "ports"
PAGE = PORTS.parents[1] / "docs" / "coming-from.md"
NUM_SAMPLES = 256


def read_lines(path):
    """Return lines without their indentation; empty ones are left out."""
    return [line.strip() for line in path.read_text().splitlines() if line.strip()]


@pytest.mark.parametrize(("name", "num_gone"), [("ddp", 12), ("accelerate", 8)])
def test_six_lines_are_new(name, num_gone):
    before, after = (read_lines(PORTS / f"{name}_{which}.py") for which in ("before", "after"))
    kinds = [line[0] for line in difflib.ndiff(before, after)]
    assert kinds.count("+") <= 6
    assert kinds.count("-") == num_gone
    page = " ".join(PAGE.read_text().split())
    assert f"{kinds.count('+')} lines are new, {num_gone} are gone" in page


def load(name):
    sys.path.insert(0, str(PORTS))
    return importlib.import_module(name)


def train_ddp(batch_size, path, *, is_before=False):
    """Train on digits that fill every batch: torch's sampler repeats some where they do not."""
    import torch.distributed as dist

    import paceline

    module = load("ddp_before" if is_before else "ddp_after")
    dataset = torch.utils.data.TensorDataset(*module.load_dataset()[:NUM_SAMPLES])
    module.load_dataset = lambda: dataset
    settings = {"num_epochs": 2, "batch_size": batch_size, "shuffle": False, "path": path}
    if is_before:
        dist.init_process_group("gloo")
        module.main(**settings)
        dist.destroy_process_group()
    else:
        with paceline.join():
            module.main(**settings)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_ported_ddp_script_learns_what_the_original_does(tmp_path):
    settings = {"before": {"batch_size": 16, "is_before": True}, "after": {"batch_size": 32}}
    for name, given in settings.items():
        for result in run_processes(2, train_ddp, {"path": str(tmp_path / name), **given}):
            assert result.exit_code == 0, result.output
    train_ddp(32, tmp_path / "alone")
    before, after, alone = (torch.load(tmp_path / name) for name in ("before", "after", "alone"))
    # Sums of floats in another order.
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(after, alone, rtol=1e-4, atol=1e-6)


def train_accelerate(batch_size, path, *, is_before=False):
    if is_before:  # as `accelerate launch --cpu` does; else workers know nothing of each other
        os.environ["ACCELERATE_USE_CPU"] = "1"
    module = load("accelerate_before" if is_before else "accelerate_after")
    model = module.main(num_epochs=1, batch_size=batch_size, shuffle=False)
    torch.save(getattr(model, "module", model).state_dict(), path)


@pytest.mark.timeout(120)
def test_the_ported_accelerate_script_learns_what_the_original_does(tmp_path):
    pytest.importorskip("transformers")
    settings = {"after": {"batch_size": 32}}
    if importlib.util.find_spec("accelerate") is not None:
        settings["before"] = {"batch_size": 16, "is_before": True}
    for name, given in settings.items():
        for result in run_processes(2, train_accelerate, {"path": str(tmp_path / name), **given}):
            assert result.exit_code == 0, result.output
    train_accelerate(32, tmp_path / "alone")
    after, alone = torch.load(tmp_path / "after"), torch.load(tmp_path / "alone")
    torch.testing.assert_close(after, alone, rtol=1e-3, atol=1e-4)  # AdamW steps as far for small gradients
    if "before" in settings:
        torch.testing.assert_close(torch.load(tmp_path / "before"), after, rtol=1e-3, atol=1e-4)


@pytest.mark.timeout(120)
def test_the_functions_of_a_lightning_module_run_as_they_stand(tmp_path, monkeypatch, run_here):
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "ported_module.py").write_text(block)
    done = run_here("train", "ported_module.py:run", "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(re.findall(r"finished: held-out loss [\d.]+, accuracy ([\d.]+)", done.stdout)[0]) > 0.8
