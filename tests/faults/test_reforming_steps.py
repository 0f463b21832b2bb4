"""Steps of equal workers that are applied in parts, or whose codec changes: one worker is lost in them."""

import itertools
import threading

import pytest
import torch
from reforming_threads import LOST_STEP, WITHOUT_W1, assert_equal, changed_in, copy_of, lose_in, run_threads
from torch import nn

from paceline.checkpoint import Checkpoint
from paceline.compression import OneBit
from paceline.monitor.events import CodecChanged
from paceline.monitor.reader import select
from paceline.optim import SGD, AdamW
from paceline.registry import register
from paceline.replica.codec_chooser import CodecChooser
from paceline.replica.gradients import Gradients
from paceline.replica.landing import BucketLanding
from paceline.replica.reduction import GradientReduction
from paceline.replica.step_buffers import StepBuffers
from paceline.training import Model, loop
from paceline.training.repeated_healing import RepeatedHealing


@pytest.mark.parametrize("learning_rate", [0.05, 0.01], ids=["sgd", "adamw"])
@pytest.mark.parametrize("phase", ["before", "carried", "after"])
def test_codec_auto_goes_on_with_its_choice(tmp_path, monkeypatch, phase, learning_rate):
    """A worker is lost before the codec changes, in the first step with another codec, or after it."""
    optimizer = SGD(learning_rate=0.05) if learning_rate == 0.05 else AdamW(learning_rate=0.01)

    def decide(self):
        if not self._queue and self.codec.name == "none":
            self._reason, self._before = "the test says so", self.codec.name
            self._queue = [self._open.with_codec(OneBit(dense_below=0), "gradient")]

    monkeypatch.setattr(CodecChooser, "_decide", decide)
    changes = []
    real_next = CodecChooser.take_next

    def take_next(self, step):
        rule = real_next(self, step)
        if rule is not None:
            changes.append(step)
        return rule

    monkeypatch.setattr(CodecChooser, "take_next", take_next)
    lost_at = {"before": 3, "carried": 6, "after": 8}[phase]
    lose = lose_in(loop, "train_step", lambda session, batch, step: step == lost_at)
    sync = {"name": "every_step", "codec": {"name": "auto"}}
    seen, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W1, lose, "w1", optimizer=optimizer, num_steps=16)
    changed = changed_in(records, 3, 16)
    stayed = [seen[1, name] for name in ("w0", "w2", "w3")]
    assert not any(one.is_new for one in stayed)
    for one in stayed:
        assert_equal(one.after.parameters, stayed[0].after.parameters, atol=0)
    chosen = select(records, CodecChanged)
    assert [record.event.codec for record in chosen] == ["one_bit"]
    assert {"before": 9, "carried": 6, "after": 6}[phase] == chosen[0].step
    assert ("residuals" in changed.event.lost) == (chosen[0].step < changed.step)
    final = max((tmp_path / "checkpoints").glob("step-*"))
    assert Checkpoint.open(final).read_document()["replica"]["states"][0]["codec"] == "one_bit"


CODED = {"sync": {"name": "every_step", "codec": {"name": "top_k", "density": 0.2, "dense_below": 0}}}
TORN = {
    "arrival, sgd": {"landing": "arrival", "clip_norm": None},
    "arrival, adamw": {"landing": "arrival", "clip_norm": None, "optimizer": AdamW(learning_rate=0.01)},
    "coded by bucket": CODED | {"clip_norm": None, "optimizer": AdamW(learning_rate=0.01)},
    "coded whole": CODED | {"clip_norm": 0.5, "optimizer": AdamW(learning_rate=0.01)},
}


@pytest.mark.parametrize("changes", TORN.values(), ids=TORN)
@pytest.mark.parametrize("lost_step", [0, LOST_STEP])
def test_copies_undo_what_a_broken_step_has_applied(tmp_path, monkeypatch, changes, lost_step):
    began, torn, real, real_drop = {}, [], loop.train_step, BucketLanding.drop

    def train_step(session, batch, step):
        if step == lost_step and session.replica.group.epoch == 0:
            model = {name: p.detach().clone() for name, p in session.replica.module.named_parameters()}
            began[threading.current_thread().name] = model, copy_of(session.replica.optimizer)
        return real(session, batch, step)

    def drop(self):
        torn.append(self.is_torn)
        return real_drop(self)

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(BucketLanding, "drop", drop)
    lose = lose_in(Gradients, "_launch", lambda own, bucket: own._step == lost_step and bucket.index == 1)
    settings = {"sync": {"name": "every_step"}, "keeps_step_copies": True} | changes
    seen, records = run_threads(tmp_path, monkeypatch, settings.pop("sync"), WITHOUT_W1, lose, "w1", **settings)
    changed = changed_in(records)
    assert changed.step == lost_step
    assert any(torn), "some had begun to apply it"
    for name in ("w0", "w2", "w3"):
        assert not seen[1, name].is_new
        model, optimizer = began[name]
        assert_equal(seen[1, name].before.parameters, model, atol=0)
        assert_equal(seen[1, name].optimizer, optimizer, atol=0)


class Drifting(nn.Module):
    """A network whose forward changes saved buffers, and one that is not saved, of which its output depends too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=0.3), nn.ReLU(), nn.Linear(16, 3))
        self.register_buffer("drift", torch.zeros(8), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.drift.mul_(0.9).add_(inputs[:, 1:].detach().mean(0))
        return self.layers(inputs[:, 1:] + 0.1 * self.drift)


@register("drifting_network")
class DriftingNetwork(Model):
    def build(self, spec):
        return Drifting()


PLACES = {
    "before": (StepBuffers, "exchange", lambda own, changed: True),
    "between": (StepBuffers, "_flatten", lambda own, _, numbers: not own._held[numbers[0]].start.is_floating_point()),
    "after": (GradientReduction, "finish", lambda own, **_: True),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_lost_around_the_exchange_of_buffers_costs_no_state_and_no_bit(tmp_path, monkeypatch, place):
    """It is lost before that exchange, between its means and its counts, or after its own optimizer's step."""
    owner, method, is_there = PLACES[place]
    calls = itertools.count()
    lose = lose_in(owner, method, lambda *arguments: is_there(*arguments) and next(calls) == LOST_STEP)
    settings = {
        "model": DriftingNetwork(),
        "num_virtual_workers": 4,
        "num_threads": 1,
        "checkpoint_interval": 9,
        "join_epochs": True,
    }
    sync, folder, alone = {"name": "every_step"}, tmp_path / "lost", tmp_path / "alone"
    for directory in (folder, alone):
        directory.mkdir()
    seen, records = run_threads(folder, monkeypatch, sync, WITHOUT_W1, lose, "w1", **settings)
    changed = changed_in(records)
    assert changed.step == LOST_STEP + (place == "after"), "an update that began is made"
    assert not any(seen[1, name].is_new for name in ("w0", "w2", "w3"))
    run_threads(alone, monkeypatch, sync, [[["w0"]]], **settings)
    found, expected = (Checkpoint.open(max((d / "checkpoints").glob("step-*"))) for d in (folder, alone))
    names = [name for name in expected.list_tensors() if "random" not in name]
    assert len(names) > 10
    for name in names:
        assert torch.equal(found.read(name), expected.read(name)), name


def test_a_workers_healings_before_and_after_a_loss_count_together(tmp_path, monkeypatch):
    counts, real, real_step = [], RepeatedHealing.note, loop.train_step

    def note(self, step, interval):
        counts.append((threading.current_thread().name, [*self._steps]))
        return real(self, step, interval)

    def train_step(session, batch, step):
        result = real_step(session, batch, step)
        if threading.current_thread().name == "w3" and step in (2, LOST_STEP + 1):
            with torch.no_grad():
                next(session.replica.module.parameters()).add_(0.5)
        return result

    monkeypatch.setattr(RepeatedHealing, "note", note)
    monkeypatch.setattr(loop, "train_step", train_step)
    lose = lose_in(loop, "train_step", lambda session, batch, step: step == LOST_STEP)
    settings = {"on_divergence": "heal", "hash_interval": 1}
    run_threads(tmp_path, monkeypatch, {"name": "every_step"}, WITHOUT_W1, lose, "w1", **settings)
    assert counts == [("w3", []), ("w3", [4])]
