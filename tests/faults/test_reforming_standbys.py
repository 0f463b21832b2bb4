"""Servers with standbys: the worker beside a server is lost, and the others go on from the standby's state."""

import pytest
import torch
from pydantic import ValidationError
from reforming_threads import LOST_STEP, lose_in, run_threads
from test_reforming import NUM_SAMPLES
from test_reforming_servers import EXACT, LOSSES, NUM_STEPS, assert_plain_sgd, gone_on, is_lost, weights_of
from torch import nn

from paceline.monitor.events import StepFinished
from paceline.monitor.reader import select
from paceline.optim import SGD
from paceline.registry import register
from paceline.replica.loss import Loss
from paceline.sync import ParameterServer
from paceline.sync.parameter_server.server import Server
from paceline.sync.parameter_server.standby import Standbys, choose_standby
from paceline.sync.parameter_server.state import unpack_state
from paceline.sync.parameter_server.worker import ServedWorker
from paceline.training import Model, Objective, loop

RATE = 1 / 64
WITHOUT_W0 = [[["w0", "w1", "w2", "w3"]], [["w1", "w2", "w3"]]]


@register("counting_network")
class CountingNetwork(Model):
    def build(self, spec):
        return Counts()


class Counts(nn.Module):
    """A parameter for each sample, whose gradient is 1 for each time that the sample is used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(NUM_SAMPLES, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(NUM_SAMPLES, dtype=torch.float64))

    def forward(self, inputs):
        numbers = inputs[:, 0].long()
        return self.first[numbers] + self.second[numbers]


@register("counting_loss")
class CountingLoss(Objective):
    def loss(self, model, batch):
        return Loss(model(batch.inputs)[: batch.num_samples].sum(), batch.num_samples)


COUNTING = {
    "model": CountingNetwork(),
    "loss": CountingLoss(),
    "optimizer": SGD(learning_rate=RATE, momentum=0.0, weight_decay=0.0),
    "schedule": {"name": "constant"},
    "clip_norm": None,
    "num_steps": 15,
}
"""Three epochs of asynchronous SGD whose every update is the number of times that each sample is in it."""
ASGD = {"name": "asgd", "rate_factor": 1.0, "warmup_steps": 0, "correct_momentum": False, "num_standbys": 1}


def assert_counted_once(folder):
    for name, tensor in weights_of(folder).items():
        expected = torch.full((NUM_SAMPLES,), -3 * RATE, dtype=torch.float64)
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0, msg=f"{name}: {tensor / RATE}")


SERVERS = {
    "one server": {"name": "parameter_server", "num_standbys": 1},
    "two servers": {"name": "parameter_server", "num_standbys": 1, "num_servers": 2},
}


@pytest.mark.parametrize("phase", ["before its push", "once it has new parameters"])
@pytest.mark.parametrize("sync", SERVERS.values(), ids=SERVERS)
def test_synchronous_servers_go_on_from_the_standby_as_plain_sgd(tmp_path, monkeypatch, sync, phase):
    _, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W0, LOSSES[phase], "w0", **EXACT)
    changed = gone_on(records, 3)
    assert changed.event.num_sent == 0
    assert changed.event.lost == ""
    steps = [record.step for record in select(records, StepFinished)]
    assert len(set(steps)) == len(steps), "no update is made twice"
    assert_plain_sgd(tmp_path)


def test_a_push_under_way_to_a_lost_server_is_settled(tmp_path, monkeypatch):
    lose = LOSSES["with its push under way"]
    _, records = run_threads(tmp_path, monkeypatch, SERVERS["one server"], WITHOUT_W0, lose, "w0", **EXACT)
    gone_on(records, 3)
    assert_plain_sgd(tmp_path)


ASYNCHRONOUS_LOSSES = {
    "before its push": lose_in(loop, "train_step", is_lost),
    "with its push under way": lose_in(
        ServedWorker, "after_update", lambda own, step: step.number >= LOST_STEP and own._context.group.epoch == 0
    ),
}


@pytest.mark.parametrize("dying", ["w0", "w1", "w3"])
@pytest.mark.parametrize(
    ("num_servers", "phase"), [*((1, phase) for phase in ASYNCHRONOUS_LOSSES), (2, "before its push")]
)
def test_every_sample_counts_once_whoever_is_lost(tmp_path, monkeypatch, num_servers, dying, phase):
    """A push that is under way to two servers may reach one of them, which is told of as lost."""
    names = ["w0", "w1", "w2", "w3"]
    epochs = [[names], [[name for name in names if name != dying]]]
    sync, lose = ASGD | {"num_servers": num_servers}, ASYNCHRONOUS_LOSSES[phase]
    _, records = run_threads(tmp_path, monkeypatch, sync, epochs, lose, dying, **COUNTING)
    changed = gone_on(records, 3, 15)
    assert changed.event.lost == ""
    assert_counted_once(tmp_path)


def test_two_losses_in_turn_leave_one_worker(tmp_path, monkeypatch):
    """After the first one there is a new server with a new standby, from which the last worker goes on."""
    epochs = [[["w0", "w1", "w2"]], [["w1", "w2"]], [["w2"], 4]]
    lose = ASYNCHRONOUS_LOSSES["before its push"]
    run_threads(tmp_path, monkeypatch, ASGD, epochs, lose, "w0", **COUNTING)
    assert_counted_once(tmp_path)


@pytest.mark.parametrize(
    "sync",
    [
        ASGD,
        ASGD | {"pushes_per_step": 3, "compensation": 0.5, "compensation_decay": 0.9},
        {"name": "ssp", "num_standbys": 1},
        {"name": "parameter_server", "num_standbys": 1, "pull_codec": {"name": "int8"}},
        {"name": "parameter_server", "num_standbys": 1, "num_backups": 1},
    ],
    ids=["asgd", "asgd with all", "ssp", "parameter_server", "backups"],
)
def test_a_standby_has_the_same_bits_as_its_server(tmp_path, monkeypatch, sync):
    """Workers agree on a change, so that nothing is under way when all servers stop."""
    bodies, standing, real, make = {}, set(), Server.hold, Standbys.__init__

    def hold(self):
        body = real(self)
        bodies.setdefault(id(self) in standing, body)
        return body

    def note(self, *arguments):
        make(self, *arguments)
        standing.update(id(server) for server in self.servers.values())

    monkeypatch.setattr(Server, "hold", hold)
    monkeypatch.setattr(Standbys, "__init__", note)
    epochs = [[["w0", "w1", "w2"]], [["w0", "w1"], 4]]
    run_threads(tmp_path, monkeypatch, sync, epochs, num_steps=NUM_STEPS)
    (tensors, document), (copied, described) = (unpack_state(bodies[is_standby]) for is_standby in (False, True))
    assert document["version"] > 0
    assert document == described
    assert tensors.keys() == copied.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, copied[name]), name


@pytest.mark.parametrize("changes", [{"placement": "own"}, {"num_servers": 2, "num_backups": 1}], ids=str)
def test_a_standby_is_refused_where_it_could_not_take_the_place(changes):
    with pytest.raises(ValidationError, match="num_standbys must be 0 where workers cannot go on"):
        ParameterServer(num_standbys=1, **changes)


def test_a_standby_is_on_another_host_if_there_is_one():
    assert choose_standby(0, [[0]]) is None
    assert choose_standby(0, [[0, 1, 2]]) == 1
    assert choose_standby(2, [[0, 1, 2]]) == 0
    assert choose_standby(0, [[0, 1], [2, 3]]) == 2
    assert choose_standby(1, [[0, 1], [2, 3]]) == 2
    assert choose_standby(3, [[0, 2], [1, 3]]) == 0
