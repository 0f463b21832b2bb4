"""Runs of models with BatchNorm: over all workers as in one process, and refused where a batch would be too small."""

import pytest
import torch
from test_loop import Points, losses_of, make_run, read_tensors, train_here
from torch import nn

from paceline.errors import CommunicationError, DataError
from paceline.monitor.events import Evaluated
from paceline.monitor.reader import read_log, select
from paceline.optim import SGD
from paceline.registry import register
from paceline.training import Model


@register("test_normed_vectors")
class NormedVectors(Model):
    """Cannot learn from one sample."""

    def build(self, spec):
        return nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def make_normed_run(**changes):
    """Return a run of 50 samples an epoch in batches of 12: the fifth has 2."""
    return make_run(**({"model": NormedVectors(), "optimizer": SGD(learning_rate=0.05)} | changes))


def evaluations_of(directory):
    return [record.event.loss for record in select(read_log(directory / "events.jsonl"), Evaluated)]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_run_equals_one_of_one_worker_and_goes_on_bit_for_bit(tmp_path, num_workers):
    """Of 3 workers one has no sample of the epoch's last batch."""
    run = make_normed_run(batch_norm="global")
    alone, straight, broken = (tmp_path / name for name in ("alone", "straight", "broken"))
    train_here(run, alone)
    train_here(run, straight, num_workers)
    assert list(losses_of(straight).values()) == pytest.approx(list(losses_of(alone).values()), abs=1e-5)
    assert evaluations_of(straight) == pytest.approx(evaluations_of(alone), abs=1e-5)
    expected, tensors = read_tensors(alone, 14), read_tensors(straight, 14)
    assert expected.keys() == tensors.keys(), "statistics that all workers share are saved once"
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, atol=1e-5, rtol=1e-5)
    with pytest.raises((DataError, CommunicationError), match="the power must be on"):
        train_here(make_normed_run(batch_norm="global", data=Points(fail_at=9)), broken, num_workers)
    train_here(run, broken, num_workers)
    assert losses_of(broken) == losses_of(straight)
    resumed = read_tensors(broken, 14)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in tensors.items())
