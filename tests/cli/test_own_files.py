"""What a person writes into a file of their own, from the command line."""

import sys

import pytest

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
    return paceline.Run(model=build, data=OwnPoints(), objective=Classification(), global_batch=8, num_steps=4)
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
