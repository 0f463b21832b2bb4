"""What a person may do to layers whose statistics are those of all workers: it works, or says why it cannot."""

import copy
import pickle

import pytest
import torch
from test_batch_norm import make_sgd
from torch import nn

from paceline.comm import LocalGroup
from paceline.errors import PeerTimeoutError, SettingsError
from paceline.parallel.batch_norm import check_batch_norm
from paceline.replica import Replica
from paceline.sync import DiLoCo, EveryStep
from paceline.topology import Layout
from paceline.training.compiling import compile_blocks


class Scaled(nn.BatchNorm1d):
    """A class of somebody's own, with more in its forward and in its making."""

    def __init__(self, num_features, factor):
        super().__init__(num_features)
        self.factor = factor

    def forward(self, input):
        return self.factor * super().forward(input).relu()


def test_a_class_of_ones_own_keeps_its_forward_and_its_copies_are_plain():
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    alone = Scaled(4, factor=3)
    expected = alone(inputs)

    def work(group):
        module = nn.Sequential(Scaled(4, factor=3))
        replica = Replica(module, make_sgd(module), group=group, batch_norm="global")
        output = replica(inputs[4 * group.rank : 4 * group.rank + 4])
        layer = module[0]
        assert isinstance(layer, Scaled)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(other[0]) is Scaled
            assert other[0].factor == 3
            other(inputs[:2])  # alone, or it would wait for the others
        plain = Scaled(4, factor=3)
        plain.load_state_dict(layer.state_dict())
        replica.close()
        assert type(layer) is Scaled
        assert "link" not in vars(layer)
        return output, layer

    results = LocalGroup.run(2, work, timeout_s=20)
    torch.testing.assert_close(torch.cat([output for output, _ in results]), expected)
    for _, layer in results:
        torch.testing.assert_close(layer.running_var, alone.running_var)


def test_layers_in_evaluation_exchange_nothing_and_who_does_not_come_is_named():
    def work(group, run):
        module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)))
        replica = Replica(module, make_sgd(module), group=group, batch_norm="global")
        run(replica, group.rank)
        return replica

    def evaluate(replica, rank):
        replica.module.eval()
        if rank:
            replica(torch.randn(2, 3))
        replica.module.train()

    def train_without_gradients(replica, rank):
        if rank == 0:
            with torch.no_grad():
                replica(torch.randn(2, 3))

    LocalGroup.run(2, lambda group: work(group, evaluate), timeout_s=20)
    with pytest.raises(
        PeerTimeoutError, match=r"'batch norm 1\.0' must finish within 0\.5 s, but rank 1 did not begin it"
    ):
        LocalGroup.run(2, lambda group: work(group, train_without_gradients), timeout_s=0.5)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (
            lambda: nn.BatchNorm1d(2),
            {"sync": "local_sgd"},
            "batch_norm must be local, but got global with sync local_sgd",
        ),
        (lambda: nn.BatchNorm1d(2), {"sync": "asgd"}, "batch_norm must be local, but got global with sync asgd"),
        (lambda: nn.SyncBatchNorm(2), {}, "but 0 is a SyncBatchNorm; leave its conversion out"),
        (lambda: replace_forward(nn.BatchNorm1d(2)), {}, "but 0 has another; replace it after the Replica is made"),
    ],
)
def test_what_cannot_be_over_all_workers_is_refused(make, settings, message):
    def work(group):
        module = nn.Sequential(make())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        Replica(module, optimizer, group=group, batch_norm="global", **settings)

    with pytest.raises(SettingsError, match=message):
        LocalGroup.run(2, work, timeout_s=5)


def replace_forward(layer):
    layer.forward = lambda x: x
    return layer


def test_a_layer_that_was_compiled_by_itself_is_so_again_in_the_end():
    def work(group):
        module = nn.Sequential(nn.BatchNorm1d(2))
        compile_blocks(module, "eager")
        compiled = module[0].forward
        replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), group=group, batch_norm="global")
        assert "forward" not in vars(module[0])
        replica.close()
        assert module[0].forward is compiled

    LocalGroup.run(2, work, timeout_s=5)


def test_a_replica_that_was_not_closed_is_forgotten_by_the_next():
    def work(group):
        module = nn.Sequential(nn.BatchNorm1d(2))
        for scope in ("global", "global", "local"):
            replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), group=group, batch_norm=scope)
        assert type(module[0]) is nn.BatchNorm1d
        if group.rank == 0:
            replica(torch.randn(2, 2))

    LocalGroup.run(2, work, timeout_s=5)


def test_a_pipeline_is_refused():
    with pytest.raises(SettingsError, match="but got global with 2 pipeline ranks"):
        check_batch_norm("global", EveryStep(), Layout(pipeline=2))
    with pytest.raises(SettingsError, match="where the gradient noise scale compares"):
        check_batch_norm("global", EveryStep(), Layout(), is_noise_measured=True)
    check_batch_norm("local", DiLoCo(), Layout(pipeline=2), is_noise_measured=True)
