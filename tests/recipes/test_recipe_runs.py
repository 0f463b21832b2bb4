"""The recipes as a user starts them, made small: what they write, and that a killed run goes on as if unharmed."""

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forked_launcher import ForkedLauncher
from paceline.cli.prepare import make_run
from paceline.comm import LocalGroup
from paceline.monitor.events import Evaluated, RunFinished, RunStarted, Showcased, StepFinished, WorkersChanged
from paceline.monitor.log import EventLog
from paceline.monitor.reader import read_log, select
from paceline.training import train

SMALL = {
    "global_batch": "6",
    "num_steps": "12",
    "checkpoint_interval": "4",
    "evaluate_interval": "6",
    "evaluate_samples": "10",
    "schedule.warmup_steps": "2",
    "num_threads": "1",
}
RECIPES = {
    "bert": {
        "model.width": "32",
        "model.num_layers": "1",
        "model.num_heads": "2",
        "model.dropout": "0",
        "data.sequence_length": "32",
        "data.max_bytes": "60000",
    },
    "rnn": {"model.width": "16", "model.num_layers": "2"},
}


def train_here(name: str, directory: Path) -> None:
    run = make_run(name, [*SMALL.items(), *RECIPES[name].items()])
    directory.mkdir(exist_ok=True)

    def work(group: LocalGroup) -> bool:
        with EventLog(directory / "events.jsonl", run="run", rank=group.rank) as log:
            return train(run, directory, group, log, recipe=name)

    assert LocalGroup.run(2, work) == [True, True]


def read_losses(directory: Path) -> dict[int, float]:
    return {record.step: record.event.loss for record in select(read_log(directory / "events.jsonl"), StepFinished)}


def read_tensors(directory: Path) -> list[bytes]:
    (newest,) = directory.glob("checkpoints/step-00000012*")
    return sorted(path.read_bytes() for path in newest.glob("*.safetensors"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Neither masks nor order may depend on what was read before."""
    train_here(name, tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    for newer in [*(tmp_path / "resumed").glob("checkpoints/step-000000[01][82]*"), tmp_path / "resumed/events.jsonl"]:
        shutil.rmtree(newer) if newer.is_dir() else newer.unlink()
    train_here(name, tmp_path / "resumed")
    straight, resumed = read_losses(tmp_path / "straight"), read_losses(tmp_path / "resumed")
    assert min(resumed) == 5
    assert resumed == {step: straight[step] for step in range(5, 13)}
    assert read_tensors(tmp_path / "resumed") == read_tensors(tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_killed_worker_of_bert_is_replaced(tmp_path: Path, wait_for_step: Any) -> None:
    settings = {**SMALL, **RECIPES["bert"], "num_steps": "40", "evaluate_interval": "0"}
    overrides = [word for name, value in settings.items() for word in (f"--{name}", value)]
    directory = tmp_path / "run"
    log = directory / "events.jsonl"
    command = ["train", "bert", "--workers", "2", "--out", str(directory), *overrides]
    process = ForkedLauncher(command, tmp_path / "output.txt")
    try:
        wait_for_step(directory, 10, process)
        os.kill(find_worker(directory), signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
    finally:
        process.terminate()
    assert process.returncode == 0, output
    records = read_log(log)
    assert len(select(records, RunStarted)) == 1, "training goes on without a restart"
    assert select(records, WorkersChanged)[-1].event.num_workers == 2
    assert {record.step: record.event.position for record in select(records, StepFinished)} == {
        step: 6 * step for step in range(1, 41)
    }
    (finished,) = select(records, RunFinished)
    assert 0 < finished.event.metrics["accuracy"] < 1
    assert finished.event.held_out_loss < read_losses(directory)[1]
    (shown,) = select(records, Showcased)
    blotted, filled = shown.event.text.split("\n▸\n")
    assert blotted.count("▯") == 5, "15 of 100 of 32 bytes"
    assert "▯" not in filled
    assert not select(records, Evaluated)[:-1]


def find_worker(directory: Path) -> int:
    """Return a worker's process number: what it prints goes to a file in the run."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "fd" / "1").readlink().is_relative_to(directory / "workers"):
                return int(folder.name)
    raise AssertionError("the run has no worker")
