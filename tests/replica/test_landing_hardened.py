"""Landing in the next forward beside schedulers, evaluation, checkpoints, idle workers and the end of a replica."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from paceline.checkpoint import CheckpointStore
from paceline.comm import LocalGroup
from paceline.replica import Replica, UnusedParametersWarning
from paceline.replica.state import capture, restore
from paceline.sync import EveryStep
from training_models import make_module


def _two_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class Optional(nn.Module):
    """Its last layer may be left out."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 4, bias=False)

    def forward(self, x, use_last=True):
        x = self.first(x)
        return self.last(x) if use_last else x


def _make(group, landing="next_forward", make=_two_layers, optimizer=torch.optim.SGD, **settings):
    module = make_module(make=make)
    optimizer = optimizer(module.parameters(), lr=settings.pop("lr", 0.1))
    return Replica(module, optimizer, group=group, landing=landing, bucket_bytes=8, **settings)


def _step(replica, **options):
    replica.backward(replica(torch.ones(2, 4) + replica.group.rank, **options).square().mean(), weight=1.0)
    return replica.update()


def _fail(path, reason):
    raise AssertionError(f"{path} is damaged: {reason}")


def _one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)  # changes betas too


def _exponential(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # changes a tensor in place


@pytest.mark.parametrize(
    ("schedule", "learning_rate"), [(_one_cycle, 0.1), (_exponential, torch.tensor(0.1))], ids=["betas", "tensor"]
)
def test_schedulers_that_step_before_it_has_landed_change_nothing(schedule, learning_rate):
    def worker(group, landing):
        replica = _make(group, landing, optimizer=torch.optim.AdamW, lr=learning_rate * 1)
        scheduler = schedule(replica.optimizer)
        for _ in range(10):
            _step(replica)
            scheduler.step()
        replica.close()
        return replica.module[0].weight.detach()

    at_update = LocalGroup.run(2, lambda group: worker(group, "update"))
    in_forward = LocalGroup.run(2, lambda group: worker(group, "next_forward"))
    assert torch.equal(at_update[0], in_forward[0])


def test_a_worker_without_data_at_first_learns_at_the_same_steps():
    def worker(group):
        replica = _make(group, hash_interval=1)
        for step in range(8):
            if group.rank == 1 and step < 3:  # it runs no forward
                replica.backward(torch.zeros(()), weight=0)
                replica.update()
            else:
                _step(replica)
        replica.close()
        return replica._reduction.landing.is_ready

    assert LocalGroup.run(2, worker) == [True, True]


def test_closing_lands_the_last_step_and_leaves_no_hook():
    def worker(group, landing):
        replica = _make(group, landing)
        for _ in range(8):
            _step(replica)
        replica.close()
        replica.close()
        assert not any(module._forward_pre_hooks for module in replica.module.modules())
        return replica.module[1].weight.detach()

    at_update = LocalGroup.run(2, lambda group: worker(group, "update"))
    in_forward = LocalGroup.run(2, lambda group: worker(group, "next_forward"))
    assert torch.equal(at_update[0], in_forward[0])


def test_a_forgotten_replica_frees_its_memory_and_its_thread():
    kept = []

    def worker(group):
        replica = _make(group, sync=EveryStep(codec="top_k"))
        for _ in range(6):
            _step(replica)
        kept.append(weakref.ref(replica.module[0].weight))

    before = set(threading.enumerate())
    LocalGroup.run(2, worker)
    gc.collect()
    assert [parameter() for parameter in kept] == [None, None]
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_evaluation_is_not_taken_for_the_path_of_training():
    class TwoPaths(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            first, second = self.layers if torch.is_grad_enabled() else reversed(self.layers)
            return second(first(x))

    def worker(group):
        replica = _make(group, make=TwoPaths)
        for _ in range(7):
            with torch.no_grad():
                replica(torch.ones(2, 4))
            _step(replica)
        with torch.no_grad():
            in_landing = replica(torch.ones(2, 4))
            replica.flush()
            assert torch.equal(in_landing, replica.module(torch.ones(2, 4)))
        replica.close()
        return list(replica._reduction.landing.needed)

    names = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    assert LocalGroup.run(2, worker) == [names] * 2


def test_a_checkpoint_in_the_midst_of_landing_is_of_the_whole_step(tmp_path):
    store = CheckpointStore(tmp_path)

    def worker(group, landing):
        replica = _make(group, landing, optimizer=torch.optim.AdamW)
        for _ in range(6):
            _step(replica)
        tensors, document = capture(replica)
        if group.rank == 0 and landing == "next_forward":
            store.save(tensors, document, 6)
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def back(group):
        replica = _make(group, optimizer=torch.optim.AdamW)
        for _ in range(8):  # other steps have not landed yet
            _step(replica)
        restore(store.find_newest_valid(_fail) if group.rank == 0 else None, replica)
        replica.close()
        return {f"model/{name}": tensor for name, tensor in replica.module.state_dict().items()}

    at_update = LocalGroup.run(2, lambda group: worker(group, "update"))[0]
    in_forward = LocalGroup.run(2, lambda group: worker(group, "next_forward"))[0]
    restored = LocalGroup.run(2, back)
    store.close()
    for name, tensor in at_update.items():
        assert torch.equal(tensor, in_forward[name]), name
    for rank in range(2):
        for name, tensor in restored[rank].items():
            assert torch.equal(tensor, in_forward[name]), name


def test_parameters_that_nobody_uses_any_more_are_told_of_a_step_later():
    def worker(group):
        replica = _make(group, make=Optional)
        told = [_step(replica, use_last=step < 6).newly_unused for step in range(9)]
        replica.close()
        return told

    with pytest.warns(UnusedParametersWarning, match=r"at step 6 .*last\.weight"):
        told = LocalGroup.run(2, worker)
    assert told == [[[]] * 7 + [["last.weight"], []]] * 2


def test_a_forward_that_fails_while_it_is_watched_leaves_no_hook():
    def worker(group):
        replica = _make(group)
        with pytest.raises(RuntimeError, match="shape"):
            replica(torch.ones(2, 5))
        hooks = [module._forward_pre_hooks or module._forward_hooks for module in replica.module.modules()]
        assert not any(hooks)
        for _ in range(6):
            _step(replica)
        replica.close()
        return list(replica._reduction.landing.needed)

    assert LocalGroup.run(2, worker)[0] == ["0.weight", "0.bias", "1.weight", "1.bias"]
