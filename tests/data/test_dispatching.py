"""Workers at their own pace: every sample is learnt from once, whoever takes it, and steps are counted in samples."""

import threading

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.comm import LocalGroup
from paceline.data import Loader
from paceline.data.order import GlobalOrder


class Counter:
    """Hands out positions of a loader's ledger up to a boundary."""

    def __init__(self, boundary):
        self.boundary = boundary
        self.lock = threading.Lock()
        self.ledger = None

    def claim(self, num_samples):
        with self.lock:
            left = self.boundary - self.ledger._ledger.next_claim
            return tuple(self.ledger.claim_next(min(num_samples, left))) if left > 0 else None

    def ack(self, interval):
        with self.lock:
            self.ledger.mark_used(*interval)
        return True


def _make_loader(group, counter, num_processes=0, num_micro_batches=1):
    data = TensorDataset(torch.arange(50), torch.arange(50))
    return Loader(
        data, 9, group=group, dispatcher=counter, num_micro_batches=num_micro_batches, num_processes=num_processes
    )


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_each_sample_is_taken_once_and_iterating_ends_at_the_boundary(num_micro_batches):
    counter = Counter(boundary=100)  # two epochs
    turn = threading.Barrier(3)

    def worker(group):
        loader = _make_loader(group, counter, num_micro_batches=num_micro_batches)
        if group.rank == 0:
            counter.ledger = loader
        turn.wait()
        taken = []
        for batch in loader:
            taken += batch.inputs[: batch.num_samples].tolist()
            if batch.last:
                assert batch.interval.num_samples <= 3
                loader.ack(batch)
        turn.wait()
        position = counter.ledger.position
        loader.move_to(position)
        assert loader.position == 100
        return taken

    parts = LocalGroup.run(3, worker)
    assert sorted(sum(parts, [])) == sorted([*range(50), *range(50)])


def test_processes_read_for_them_too():
    counter = Counter(boundary=20)
    loader = _make_loader(None, counter, num_processes=1)
    counter.ledger = loader
    assert len([batch for batch in loader for _ in range(batch.num_samples)]) == 20


@pytest.mark.parametrize(("num_samples", "global_batch"), [(50, 9), (50, 10), (7, 20)])
def test_steps_and_positions_agree(num_samples, global_batch):
    order = GlobalOrder(num_samples)
    position = 0
    for step in range(30):
        assert order.position_of(step, global_batch) == position
        assert order.step_of(position, global_batch) == step
        position = order.next_batch(position, global_batch).stop
        assert order.step_of(position - 1, global_batch) == step
