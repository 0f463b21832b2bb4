"""Parts of going on without lost workers, each by itself; `tests/faults/test_reforming.py` kills real workers."""

import pytest
import torch
from test_loop import Points, make_run
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from paceline.comm import LocalGroup
from paceline.comm.membership import CHANGE, Membership
from paceline.compression import AutoCodec, OneBit, TopK
from paceline.compression.codec import merge_states
from paceline.errors import CommunicationError, DataError
from paceline.optim import SGD
from paceline.replica import Replica
from paceline.replica.buffer_copies import BufferCopies
from paceline.schedules import FunctionSchedule
from paceline.sync import (
    ADPSGD,
    ASGD,
    DPSGD,
    EASGD,
    SSP,
    AdaptiveLocalSGD,
    ChocoSGD,
    DiLoCo,
    EveryStep,
    HierarchicalLocalSGD,
    LocalSGD,
    ParameterServer,
    PushSum,
    Scaffold,
    StreamingDiLoCo,
)
from paceline.sync.outer_parameters import OuterParameters
from paceline.sync.reducers import DenseReducer
from paceline.training.evaluate import evaluate
from paceline.training.objective import Classification
from paceline.training.rates import Rates
from paceline.training.reforming import can_reform, find_fixed

SYNCS = [EveryStep(), EveryStep(codec=TopK()), EveryStep(codec=AutoCodec()), LocalSGD(), DiLoCo(), StreamingDiLoCo()]
SYNCS += [Scaffold(), EASGD(), HierarchicalLocalSGD(), AdaptiveLocalSGD(), DPSGD(), ChocoSGD(), PushSum()]
SYNCS += [ASGD(), SSP(), ParameterServer(num_standbys=1), ParameterServer(num_backups=1)]
SYNCS += [ADPSGD(), EASGD(asynchronous=True)]


@pytest.mark.parametrize("sync", SYNCS, ids=lambda sync: sync.name)
def test_these_rules_go_on(sync):
    assert not can_reform(make_run(sync=sync), 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sync": ASGD(placement="own")}, "processes of their own"),
        ({"sync": ParameterServer(host_size=2)}, "sync parameter_server has a state"),
        ({"sync": ParameterServer(num_servers=2, num_backups=1)}, "own pace"),
        ({"layout": {"sharded": 2}}, "no data axis"),
        ({"shares": [1.0, 2.0]}, "shares are given"),
    ],
)
def test_others_say_why_not(changes, reason):
    assert reason in can_reform(make_run(**changes), 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"sync": LocalSGD()}, "with sync local_sgd ranks with the same part of the model differ"),
        ({"sync": EveryStep(codec=TopK())}, "codecs keep residuals"),
    ],
)
def test_layouts_with_replicas_keep_their_places(changes, reason):
    run = make_run(layout={"sharded": 2}, **changes)
    assert find_fixed(run) == "ranks of the layout share a model"
    assert can_reform(run, 4) == reason or (reason and reason in can_reform(run, 4))


def test_a_signal_counts_more_than_a_change_of_workers():
    membership = Membership()
    membership.request_stop(CHANGE)
    membership.request_stop("SIGTERM")
    membership.request_stop(CHANGE)
    assert membership.stop_requested_by == "SIGTERM"


def test_buffers_come_back_to_what_they_were_at_the_last_update():
    module = nn.BatchNorm1d(2)
    copies = BufferCopies(module)
    module(torch.randn(4, 2))
    copies.note()
    after_one = module.running_mean.clone()
    module(torch.randn(4, 2))
    copies.restore()
    assert torch.equal(module.running_mean, after_one)
    assert module.num_batches_tracked == 1


def test_a_broken_mean_leaves_each_worker_its_own_parameters():
    """Also where one of two dtypes has been averaged already."""

    class Breaking(LocalGroup):
        def all_reduce(self, tensor, *, name):
            if tensor.dtype == torch.float32 and name.startswith("mean"):
                raise CommunicationError("the cable was pulled")
            return super().all_reduce(tensor, name=name)

    group = Breaking()
    values = {"double": torch.ones(3, dtype=torch.float64), "single": torch.ones(3)}
    outer = OuterParameters("parameters", values, group, DenseReducer(group, None))
    outer.tensors["double"].fill_(5.0)
    with pytest.raises(CommunicationError), outer.averaged(0.0):
        pass
    assert torch.equal(values["double"], torch.ones(3, dtype=torch.float64))


def test_what_workers_owe_is_the_same_when_each_takes_its_part_along():
    codec, shape = OneBit(dense_below=0), torch.Size([5000])
    generator = torch.Generator().manual_seed(0)
    sizes = [2048, 2048, 904]
    states = [
        {"worker": torch.randn(shape, generator=generator), "owner": torch.randn(size, generator=generator)}
        for size in sizes
    ]
    detached = [codec.detach(state, shape, rank, 3) for rank, state in enumerate(states)]
    assert [list(state) for state in detached] == [["worker"]] * 3
    expected = merge_states(states, shape)["worker"]
    torch.testing.assert_close(sum(state["worker"] for state in detached), expected, rtol=0, atol=1e-6)


def test_an_evaluation_that_fails_leaves_the_model_in_training():
    module = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
    replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), group=LocalGroup())
    source = Points(fail_at=1, num_samples=8).open().train
    with pytest.raises(DataError):
        evaluate(replica, Classification(), source, batch_size=4)
    assert module.training
    replica.close()


def make_cycle(optimizer, num_steps):
    return OneCycleLR(optimizer, max_lr=1.0, total_steps=num_steps)


def test_rates_give_the_optimizer_back_as_it_was():
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    schedule = FunctionSchedule(path=make_cycle)
    rates = Rates(optimizer, SGD(learning_rate=0.1), schedule, 10)
    for step in range(4):
        rates.set(step, 4)
    assert optimizer.param_groups[0]["momentum"] != 0.9
    rates.reset()
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.1, 0.9)
