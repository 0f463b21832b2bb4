"""A file of a person's own, with functions and no class of Paceline's, from the command line."""

import json
import sys

import pytest

from paceline.cli.main import main
from paceline.monitor.events import RunFinished, StepFinished
from paceline.monitor.reader import read_log, select

MINE = """
import torch
from torch import nn

import paceline


def build(width: int, depth: int = 1):
    layers = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def make_datasets(held_out: float = 0.2):
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(10, (1798,), generator=generator)
    inputs = nn.functional.one_hot(targets, 64) + 0.2 * torch.randn(1798, 64, generator=generator)
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    return torch.utils.data.random_split(dataset, [1 - held_out, held_out])


def compute_loss(model, batch):
    inputs, targets = batch.data
    return nn.functional.cross_entropy(model(inputs), targets)


def measure(output, batch):
    return {"accuracy": ((output.argmax(-1) == batch.targets).sum(), len(output))}


def run():
    return paceline.Run(
        model=build, data=make_datasets, loss=compute_loss, metrics=measure, global_batch=64, num_epochs=1
    )
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain_file.py").write_text(MINE)
    yield tmp_path
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]
    sys.modules.pop("plain_file", None)


@pytest.mark.timeout(120)
def test_functions_alone_make_a_run(here, run_here):
    settings = ("--model.arguments.width", 32, "--data.arguments.held_out", 0.1, "--optimizer.learning_rate", 0.01)
    done = run_here("train", "plain_file.py", "--out", "out", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    saved = json.loads((here / "out" / "run.json").read_text())["run"]
    assert saved["model"] == {"name": "function", "path": f"{here}/plain_file.py:build", "arguments": {"width": 32}}
    assert saved["loss"] == {"name": "function", "path": f"{here}/plain_file.py:compute_loss", "arguments": {}}
    log = read_log(here / "out" / "events.jsonl")
    assert len(select(log, StepFinished)) == -(-1618 // 64)
    (finish,) = select(log, RunFinished)
    assert finish.event.metrics["accuracy"] > 0.5
    more = run_here("train", "--resume", here / "out", "--num_epochs", 2, "--workers", 1)
    assert more.returncode == 0, more.stdout + more.stderr
    assert select(read_log(here / "out" / "events.jsonl"), StepFinished)[-1].step == 2 * -(-1618 // 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "must be given all arguments that have no default, but 'width' is missing; give --model.arguments.width"),
        ("--model.arguments.widht 3", "did you mean 'width'? known: depth, width"),
        ("--model.arguments.width wide", "--model.arguments.width must be a valid integer"),
        ("--model.arguments.width 8 --num_steps 3", "set one to none"),
        (
            "--model.arguments.width 8 --loss plain_file.py:build",
            "parameter of {here}/plain_file.py:build must be called",
        ),
        ("--model.arguments.width 8 --loss classifcation", "loss must be a known name, but got 'classifcation'; did"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_made(here, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["paceline", "train", "plain_file.py", *arguments.split()])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert message.format(here=here) in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_arguments_of_functions_are_listed(here, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["paceline", "recipes", "plain_file.py"])
    with pytest.raises(SystemExit):
        main()
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "--model.arguments.depth" in line]
    assert line == "--model.arguments.depth <int> [1]"
    assert "--data.arguments.held_out <float> [0.2]" in lines
