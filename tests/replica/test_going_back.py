"""Going back to an earlier model in mid-run: with the states of module, optimizer and replica, or by a new replica."""

import copy

import pytest
import torch
import torch.nn.functional as F

import paceline
from paceline.comm import LocalGroup
from paceline.sync import ASGD, EASGD, DiLoCo, EveryStep, LocalSGD

RULES = [EveryStep(), LocalSGD(period=4), DiLoCo(period=4), EASGD(period=4)]


def make_replica(group, sync):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return paceline.Replica(model, torch.optim.AdamW(model.parameters(), lr=0.1), group=group, sync=sync)


def step(replica):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(replica.group.rank))
    replica.backward(F.mse_loss(replica(inputs), inputs.sum(1, keepdim=True)), weight=8)
    return replica.update()


def run(work, size=2):
    return LocalGroup.run(size, work, timeout_s=20)


@pytest.mark.parametrize("sync", RULES, ids=lambda rule: rule.name)
def test_going_back_in_mid_run_with_all_three_states_is_exact(sync):
    def work(group):
        replica = make_replica(group, sync)
        for _ in range(5):
            step(replica)
        holders = (replica.module, replica.optimizer, replica)
        states = [copy.deepcopy(holder.state_dict()) for holder in holders]
        first = [step(replica).loss for _ in range(6)]
        for holder, state in zip(holders, states, strict=True):
            holder.load_state_dict(state)
        assert replica.num_updates == 5
        assert [step(replica).loss for _ in range(6)] == first

    run(work)


@pytest.mark.parametrize("sync", [*RULES, ASGD()], ids=lambda rule: rule.name)
def test_a_new_replica_in_mid_run_begins_from_the_model_that_was_loaded(sync):
    def work(group):
        replica = make_replica(group, sync)
        early = copy.deepcopy(replica.module.state_dict())
        for _ in range(5):
            step(replica)
        replica.close()
        replica.module.load_state_dict(early)
        optimizer = torch.optim.SGD(replica.module.parameters(), lr=0.0)
        again = paceline.Replica(replica.module, optimizer, group=group, sync=sync)
        for _ in range(5):
            step(again)
        with again.consensus():
            assert all(torch.equal(tensor, early[name]) for name, tensor in again.module.state_dict().items())
        again.close()

    run(work, size=1 if sync.is_asynchronous else 2)
