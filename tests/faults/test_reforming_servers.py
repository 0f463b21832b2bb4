"""Rules with servers: a worker is lost, joins or leaves, and what servers have applied counts once."""

import threading
from functools import partial

import pytest
import torch
from reforming_threads import LOST_STEP, in_a_step, lose_in, run_threads
from test_reforming import GLOBAL_BATCH, make_run
from torch import nn

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.comm import LocalGroup
from paceline.monitor.events import RunFinished, StepFinished, WorkersChanged
from paceline.monitor.log import EventLog
from paceline.monitor.reader import select
from paceline.optim import SGD
from paceline.registry import register
from paceline.sync.parameter_server.shard import Shard
from paceline.sync.parameter_server.worker import ServedWorker
from paceline.training import Model, loop, train

NUM_STEPS = 16
ASGD = {"name": "asgd", "rate_factor": 0.5, "warmup_steps": 0}
OWN_PACE = {
    "asgd": ASGD,
    "asgd, two servers": ASGD | {"num_servers": 2},
    "asgd, means of three": ASGD | {"pushes_per_step": 3},
    "ssp": {"name": "ssp", "staleness": 2},
    "ssp, together": {"name": "ssp", "staleness": 0},
    "ssp, one_bit": {"name": "ssp", "codec": {"name": "one_bit", "dense_below": 0}},
    "backups": {"name": "parameter_server", "num_backups": 1},
}


WITHOUT_W3 = [[["w0", "w1", "w2", "w3"]], [["w0", "w1", "w2"]]]


@pytest.fixture
def used(monkeypatch):
    """Ranges that each server has applied, by number of blocks' first name, in order."""
    found, lock, real = {}, threading.Lock(), Shard.note_used

    def note_used(self, push):
        with lock:
            found.setdefault(self.blocks[0].name, []).append((push.start, push.stop))
        return real(self, push)

    monkeypatch.setattr(Shard, "note_used", note_used)
    return found


def assert_once(used, num_samples):
    """Each sample is applied once, on each server."""
    assert used
    for ranges in used.values():
        end = 0
        for start, stop in sorted(ranges):
            assert start == end, f"samples {start} to {end}: {sorted(ranges)}"
            end = stop
        assert end == num_samples


def is_lost(session, batch, step):
    """Return whether to be lost from here on; the batch in hand counts as used if Python leaves the loop."""
    if step < LOST_STEP:
        return False
    session.loader.in_hand = None
    return True


def gone_on(records, num_workers, num_steps=NUM_STEPS):
    (changed,) = select(records, WorkersChanged)
    assert changed.event.num_workers == num_workers
    (ended,) = select(records, RunFinished)
    assert ended.step == num_steps
    return changed


def of_steps(num_steps):
    """Return the number of samples of so many steps: the 50 samples of an epoch are cut into 12, 12, 12, 12 and 2."""
    return num_steps // 5 * 50 + num_steps % 5 * GLOBAL_BATCH


@register("double_network")
class DoubleNetwork(Model):
    def build(self, spec):
        return Doubled()


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()

    def forward(self, inputs):
        return self.layers(inputs[:, 1:].double())


EXACT = {
    "model": DoubleNetwork(),
    "clip_norm": None,
    "num_steps": NUM_STEPS,
    "optimizer": SGD(learning_rate=0.1, momentum=0.9),
}


def weights_of(folder):
    (checkpoint,) = CheckpointStore(folder / "checkpoints").list_checkpoints()
    saved = Checkpoint.open(checkpoint)
    return {name: saved.read(name) for name in saved.list_tensors() if name.startswith("model/")}


def train_alone(folder):
    """Return the weights of plain SGD on the same global batches, by one worker without servers."""
    folder.mkdir()
    settings = EXACT | {"evaluate_interval": 0, "checkpoint_interval": 0, "hash_interval": 0, "ema": None}
    with EventLog(folder / "events.jsonl", run="r", rank=0) as log:
        train(make_run(**settings), folder, LocalGroup(), log, recipe="test")
    return weights_of(folder)


def assert_plain_sgd(folder):
    expected = train_alone(folder / "alone")
    found = weights_of(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=partial("{}: {}".format, name))


SERVERS = {
    "one server": {"name": "parameter_server"},
    "two servers": {"name": "parameter_server", "num_servers": 2},
}
LOSSES = {
    "before its push": in_a_step,
    "with its push under way": lose_in(ServedWorker, "after_update", lambda own, step: step.number == LOST_STEP),
    "once it has new parameters": lose_in(loop, "log_step", lambda session, *_: session.training.step == LOST_STEP),
}


@pytest.mark.parametrize("phase", LOSSES)
@pytest.mark.parametrize("sync", SERVERS.values(), ids=SERVERS)
def test_synchronous_servers_go_on_as_plain_sgd(tmp_path, monkeypatch, used, sync, phase):
    _, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W3, LOSSES[phase], "w3", **EXACT)
    changed = gone_on(records, 3)
    assert changed.event.num_sent == 0
    assert changed.event.lost == ""
    steps = [record.step for record in select(records, StepFinished)]
    assert steps == sorted(set(steps)), "no update is made twice"
    for ranges in used.values():
        assert {start for start, _ in ranges} == set(range(NUM_STEPS)), "no step is left out"
    assert_plain_sgd(tmp_path)


CHANGES = {
    "joins": [[["w0", "w1", "w2"]], [["w0", "w1", "w2", "w3"], 3]],
    "leaves": [[["w0", "w1", "w2", "w3"]], [["w0", "w1", "w2"], 3]],
    "leaves with a server": [[["w0", "w1", "w2", "w3"]], [["w1", "w2", "w3"], 3]],
    "leaves, one is left": [[["w0", "w1"]], [["w1"], 3]],
    "joins one": [[["w0"]], [["w0", "w1"], 3]],
}


def pairs_of(syncs):
    """Return pairs of a rule and of a change, at whose start there is a worker beside each server."""
    return [
        pytest.param(sync, epochs, id=f"{name}, {change}")
        for name, sync in syncs.items()
        for change, epochs in CHANGES.items()
        if len(epochs[0][0]) >= sync.get("num_servers", 1)
    ]


@pytest.mark.parametrize(("sync", "epochs"), pairs_of(SERVERS))
def test_workers_of_synchronous_servers_change(tmp_path, monkeypatch, sync, epochs):
    _, records = run_threads(tmp_path, monkeypatch, sync, epochs, **EXACT)
    gone_on(records, len(epochs[1][0]))
    assert_plain_sgd(tmp_path)


@pytest.mark.parametrize(
    ("sync", "epochs"),
    pairs_of({name: OWN_PACE[name] for name in ("asgd", "asgd, two servers", "ssp", "ssp, together")}),
)
def test_workers_at_their_own_pace_change(tmp_path, monkeypatch, used, sync, epochs):
    _, records = run_threads(tmp_path, monkeypatch, sync, epochs, num_steps=NUM_STEPS)
    changed = gone_on(records, len(epochs[1][0]))
    assert changed.event.lost == ""
    if len(used) == 1 or len(epochs[1][0]) > 1:  # a server's first block may be another's where they are fewer
        assert_once(used, of_steps(NUM_STEPS))


@pytest.mark.parametrize("sync", OWN_PACE.values(), ids=OWN_PACE)
def test_at_their_own_pace_others_go_on_without_a_lost_worker(tmp_path, monkeypatch, used, sync):
    lose = lose_in(loop, "train_step", is_lost)
    _, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W3, lose, "w3", num_steps=NUM_STEPS)
    changed = gone_on(records, 3)
    assert changed.event.num_sent == 0
    assert_once(used, of_steps(NUM_STEPS))
