"""What a person writes into a file of their own, from the command line."""

import json
import sys

import pytest

from paceline.cli.main import main
from paceline.monitor.events import RunFinished
from paceline.monitor.reader import read_log, select


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


OWN_DATA = """
import torch

import paceline
from own_helper import Shift
from paceline.data import Source, Spec, Splits
from paceline.training import Classification


def stack(samples):
    return torch.stack([inputs for inputs, _ in samples]), torch.stack([target for _, target in samples])


class Points(Source):
    def __init__(self, num_samples):
        self.spec = Spec(num_classes=2, input_shape=(2,))
        self.num_samples = num_samples
        self.transform = lambda point: Shift(1.0)(point)

    def __len__(self):
        return self.num_samples

    def read(self, indices):
        is_probe = len(indices) == 1 or self.num_samples == 8
        assert is_probe or torch.utils.data.get_worker_info() is not None
        return stack([(self.transform(torch.full((2,), float(i))), torch.tensor(i % 2)) for i in indices])


@paceline.register("own_points")
class OwnPoints(paceline.Data):
    def open(self):
        return Splits(train=Points(64), held_out=Points(8))


def build():
    return torch.nn.Linear(2, 2)


def run():
    return paceline.Run(model=build, data=OwnPoints(), loss=Classification(), global_batch=8, num_steps=4)
"""


@pytest.mark.timeout(120)
def test_data_of_ones_own_is_read_by_loader_processes(here, run_here):
    (here / "own_data.py").write_text(OWN_DATA)
    (here / "own_helper.py").write_text(
        "class Shift:\n"
        "    def __init__(self, by):\n"
        "        self.by = by\n"
        "    def __call__(self, point):\n"
        "        return point + self.by\n"
    )
    done = run_here("train", "own_data.py", "--out", "out", "--num_data_processes", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(select(read_log("out/events.jsonl"), RunFinished)) == 1


def refuse(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code, capsys.readouterr().err


BASE = "from paceline.recipes.transformer_lm import run as base\nimport paceline\n"


@pytest.mark.parametrize(
    ("text", "code", "first_line"),
    [
        ("import torch\nimport no_such_thing\n", 1, "2: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("def run(:\n    pass\n", 1, "1: SyntaxError: invalid syntax"),
        ("def run():\n    return [][3]\n", 1, "2: IndexError: list index out of range"),
        (
            "import paceline\nRUN = paceline.Run(modle=3)\n",
            2,
            "2: a field of Run must be a known name",
        ),
        (f"{BASE}def run():\n    return paceline.Run(modle=3)\n", 2, "4: recipe {file}:run must return a valid run"),
        ("from paceline.errors import DataError\ndef run():\n    raise DataError('no')\n", 2, "3: no"),
    ],
    ids=["import", "syntax", "run", "settings at the top", "settings in run", "refused"],
)
def test_an_error_in_a_file_begins_with_its_line(here, monkeypatch, capsys, text, code, first_line):
    file = here / "own_mistake.py"
    file.write_text(text)
    found, error = refuse(monkeypatch, capsys, "train", "own_mistake.py")
    assert found == code
    shown = error.removeprefix("paceline: ")
    assert shown.startswith("own_mistake.py:" + first_line.format(file=file)), error
    assert "src/paceline" not in error, "our own stack is no help"
    sys.modules.pop("own_mistake", None)


def test_an_error_in_a_neighbour_of_the_file_begins_with_the_neighbours_line(here, monkeypatch, capsys):
    (here / "own_neighbour.py").write_text("def find():\n    return {}['x']\n")
    (here / "own_asking.py").write_text("from own_neighbour import find\n\n\ndef run():\n    return find()\n")
    _, error = refuse(monkeypatch, capsys, "train", "own_asking.py")
    assert error.startswith("own_neighbour.py:2: KeyError: 'x'\n")
    assert error.index("own_asking.py") < error.index("own_neighbour.py", 10)


def test_an_error_of_ours_is_not_blamed_on_anybody(monkeypatch):
    monkeypatch.setattr("paceline.recipes.find_function", json.loads)
    monkeypatch.setattr(sys, "argv", ["paceline", "train", "own.py"])
    with pytest.raises(json.JSONDecodeError):
        main()


OWN_MODEL = f"""{BASE}import os
import pathlib
import time

import torch


class Broken(torch.nn.Embedding):
    def forward(self, tokens):
        if torch.is_grad_enabled():
            pathlib.Path("here" + os.environ["RANK"]).touch()
            while len(list(pathlib.Path().glob("here*"))) < 3:  # none shall wait for one that has failed
                time.sleep(0.01)
            raise KeyError("width")
        return super().forward(tokens)


def build():
    return Broken(256, 256)


def run():
    return base().model_copy(update={{"model": paceline.Model.model_validate(build)}})
"""


@pytest.mark.timeout(120)
def test_an_error_of_all_workers_is_shown_once_with_its_line_and_where_they_print(here, run_here):
    (here / "own_model.py").write_text(OWN_MODEL)
    settings = ("--data.max_bytes", 100_000, "--memory.check", "false")
    done = run_here("train", "own_model.py", "--workers", 3, "--out", "out", *settings)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "KeyError" in line]
    assert line == "own_model.py:16: rank 0, 1, 2 failed at step 0 with KeyError: 'width'"
    assert done.stderr.count("Traceback") == 1
    assert "Terminating" not in done.stderr
    assert "KeyError: 'width'" in (here / "out" / "workers" / "rank2.err").read_text()
