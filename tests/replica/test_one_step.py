"""The plainest step can be read in few files."""

import sys
import threading

import torch
import torch.nn.functional as F

import paceline
from paceline.testing.processes import run_processes

MOST_FILES = 20
MARK = "/src/paceline/"


def enter_files():
    """Return the files of ours that one step of the own loop enters, the reading of its batch among them."""
    entered: set[str] = set()
    is_on = False

    def note(frame, event, _):
        if is_on and event == "call" and MARK in frame.f_code.co_filename:
            entered.add(frame.f_code.co_filename.rpartition(MARK)[2])

    threading.setprofile(note)
    with paceline.join():
        torch.manual_seed(0)
        inputs = torch.randn(64, 8)
        dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
        sys.setprofile(note)
        for batch in paceline.Loader(dataset, 16, num_steps=12):
            replica.backward(F.mse_loss(replica(batch.inputs), batch.targets), weight=batch.count())
            replica.update()
            is_on = replica.num_updates == 8
        sys.setprofile(None)
    threading.setprofile(None)
    return sorted(entered)


def test_a_step_enters_few_files():
    files = run_processes(2, enter_files)[0].value
    # A guard against a count of nothing: these are the heart of a step.
    assert {"replica/replica.py", "replica/buckets.py", "replica/reduction.py", "data/loader.py"} <= set(files)
    assert len(files) <= MOST_FILES, "\n".join(files)
