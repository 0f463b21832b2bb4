"""Signals that ask a run to stop while its workers build, and while they go on after a loss."""

import pytest

from forked_launcher import ForkedLauncher
from paceline.checkpoint.store import CheckpointStore
from paceline.comm.membership import PREEMPTED
from paceline.monitor.events import Preempted, StepFinished, WorkersChanged
from paceline.monitor.reader import read_log, select

RECIPE = """
import os, signal, time
from pathlib import Path

import torch
import paceline
from paceline.monitor.events import RunStarted, StepFinished

HERE = Path(__file__).parent
WHEN = {when!r}


def build():
    if WHEN == "build" and "RANK" in os.environ:  # not where the launcher looks at the model
        os.kill(os.getpid(), signal.SIGTERM)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def make_points():
    points = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(points, (points.sum(1) > 0).long())


def stop(event, training):
    if WHEN == "start" and isinstance(event, RunStarted):
        os.kill(os.getpid(), signal.SIGTERM)
    if WHEN == "loss" and isinstance(event, StepFinished) and training.step == 3 and not (HERE / "lost").exists():
        (HERE / "lost").touch()
        os.kill(int((training.directory / "workers" / "w1.pid").read_text()), signal.SIGKILL)
        time.sleep(0.03)
        os.kill(int((HERE / "launcher").read_text()), signal.SIGTERM)


def run():
    return paceline.Run(
        model=build, data=make_points, loss="classification", global_batch=8, num_steps=2000, callbacks=stop,
        checkpoint_interval=0, hash_interval=0, num_threads=1,
    )
"""


def write_recipe(folder, when):
    (folder / "mine.py").write_text(RECIPE.format(when=when))
    return f"{folder / 'mine.py'}:run"


def check_stopped(directory, at_most):
    """Check that the run was stopped soon, and that its newest checkpoint has each step that was made."""
    records = read_log(directory / "events.jsonl")
    assert len(select(records, Preempted)) == 1
    last = select(records, StepFinished)[-1].step
    assert last <= at_most, "it was stopped at once"
    assert CheckpointStore(directory / "checkpoints").find_newest_valid(print).step == last
    return records


@pytest.mark.parametrize(
    ("when", "options"), [("start", ["--workers", 1]), ("build", ["--workers", 2, "--layout.tensor", 2])]
)
def test_a_signal_that_comes_while_workers_build_stops_the_run(tmp_path, run_here, when, options):
    done = run_here("train", write_recipe(tmp_path, when), "--out", tmp_path / "run", *options)
    assert done.returncode == PREEMPTED, done.stdout + done.stderr
    check_stopped(tmp_path / "run", at_most=2)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_signal_just_after_a_loss_saves_what_ranks_of_a_layout_hold_in_memory(tmp_path):
    command = ["train", write_recipe(tmp_path, "loss"), "--out", tmp_path / "run"]
    options = ["--workers", "4", "--layout.data", "2", "--layout.sharded", "2"]
    process = ForkedLauncher([*command, *options], tmp_path / "output.txt")
    (tmp_path / "launcher").write_text(str(process.pid))
    output, _ = process.communicate(timeout=110)
    assert process.returncode == PREEMPTED, output
    (changed,) = select(check_stopped(tmp_path / "run", at_most=6), WorkersChanged)
    assert changed.step in (3, 4), "no step was made again"
