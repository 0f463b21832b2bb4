"""Workers at their own pace: every sample is learnt from once, whoever takes it, and steps are counted in samples."""

import threading

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.comm import LocalGroup
from paceline.data import Loader
from paceline.errors import CommunicationError, SettingsError
from paceline.replica.replica import Replica
from paceline.sync import ASGD


class Counter:
    """Hands out positions of a loader's ledger up to a boundary."""

    is_stopping = False
    lost = None

    def __init__(self, boundary=0):
        self.boundary = boundary
        self.lock = threading.Lock()
        self.ledger = None

    def set_source(self, *_):
        """It has its ledger."""

    def set_boundary(self, position):
        self.boundary = position

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
        loader.set_used([(0, position)])
        assert loader.position == 100
        return taken

    parts = LocalGroup.run(3, worker)
    assert sorted(sum(parts, [])) == sorted([*range(50), *range(50)])


def test_processes_read_for_them_too():
    counter = Counter(boundary=20)
    loader = _make_loader(None, counter, num_processes=1)
    counter.ledger = loader
    assert len([batch for batch in loader for _ in range(batch.num_samples)]) == 20


@pytest.mark.parametrize("options", [{"num_epochs": 2}, {"num_epochs": 2, "join_epochs": True}, {"num_steps": 12}])
def test_a_loop_at_its_own_pace_ends_where_epochs_and_steps_do(options):
    with LocalGroup() as group:
        group.membership.dispatcher = counter = Counter()
        counter.ledger = loader = Loader(TensorDataset(torch.arange(50)), 9, **options)
        with pytest.raises(TypeError, match="a loader has a length only"):
            len(loader)
        taken = [int(sample) for batch in loader for sample in batch.data[0][: batch.num_samples]]
        assert sorted(taken) == sorted([*range(50), *range(50)])
        assert list(loader) == []


def test_a_loop_at_its_own_pace_cannot_drop_what_is_too_little_for_all():
    with LocalGroup() as group:
        group.membership.dispatcher = Counter()
        with pytest.raises(SettingsError, match="drop_last must be left out where workers run at their own pace"):
            next(iter(Loader(TensorDataset(torch.arange(50)), 9, drop_last=True)))


def test_shares_of_workers_that_are_ahead_count_as_used_and_the_others_come_again():
    """Of 3 workers with 3 samples of each step: one has done 2 steps, one 4, and the third is lost."""
    data = TensorDataset(torch.arange(50), torch.arange(50))
    loader = Loader(data, 9, group=LocalGroup.create(3)[0], num_epochs=1, shuffle=False)
    loader.set_progress({0: 2, 1: 4})
    saved = loader.state_dict()
    assert (saved["low_water"], saved["done_above"]) == (18, [[21, 24], [30, 33]])
    again = Loader(data, 9, num_epochs=1, shuffle=False)
    again.load_state_dict(saved)
    taken = [sample for batch in again for sample in batch.inputs.tolist()]
    assert taken == [*range(18, 21), *range(24, 30), *range(33, 50)], "each sample that is left comes once"


def test_pieces_of_steps_between_used_shares_are_no_steps_of_their_own():
    """Ranks 0 and 2 of 3 are behind: two steps are left in two pieces each."""
    data = TensorDataset(torch.arange(45), torch.arange(45))
    lost = Loader(data, 9, group=LocalGroup.create(3)[0], shuffle=False)
    lost.set_progress({0: 1, 1: 3, 2: 1})
    again = Loader(data, 9, shuffle=False)
    again.load_state_dict(lost.state_dict())
    assert again.step == 1
    taken, steps = [], []
    for batch in again:
        taken += batch.inputs.tolist()
        again.ack(batch)
        steps.append(again.step)
        if again.step == 5:
            break
    assert sorted(taken) == [*range(9, 12), *range(15, 21), *range(24, 45)], "all that is left, once"
    assert steps == [1, 2, 2, 3, 4, 5]


def test_the_loop_ends_after_the_step_in_which_a_loss_is_heard_of():
    """What was read ahead is not used, nor counted as used."""
    counter = Counter(boundary=100)
    loader = _make_loader(LocalGroup(), counter)
    counter.ledger = loader
    taken = []
    for batch in loader:
        taken.append(tuple(batch.interval))
        if len(taken) == 2:
            counter.lost = CommunicationError("rank 7 is lost")
    assert taken == [(0, 9), (9, 18)]
    assert loader.position == 18


def test_a_loop_of_ones_own_ends_on_all_workers_when_one_is_lost():
    """It does not train on to its end, which is far, for nothing."""

    def worker(group):
        num_batches = 0
        with group:
            torch.manual_seed(0)
            model = torch.nn.Linear(1, 1)
            replica = Replica(model, torch.optim.SGD(model.parameters(), lr=1e-6), sync=ASGD())
            data = TensorDataset(torch.arange(50.0)[:, None], torch.arange(50.0)[:, None])
            try:
                for batch in Loader(data, 9, num_steps=10**6):
                    replica.backward((replica(batch.inputs) - batch.targets).square().mean(), weight=batch.count())
                    replica.update()
                    num_batches += 1
                    if group.rank == 2 and num_batches == 20:
                        raise RuntimeError("struck by lightning")
            except CommunicationError as error:
                told[group.rank] = str(error)
                raise

    told = {}
    with pytest.raises(RuntimeError, match="lightning"):
        LocalGroup.run(3, worker)
    assert told.keys() == {0, 1}
    assert all("rank 2 is lost, so that all others stop" in message for message in told.values())
