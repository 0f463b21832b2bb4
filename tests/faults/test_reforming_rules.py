"""Rules whose workers differ: one is lost, or joins, and what the workers conserve is what their own sums say.

Workers are threads, so that a test sees the state of each of them just before and after they go on together.
"""

import copy
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from scripted_member import Epoch, ScriptedMember
from test_reforming import NUM_STEPS, make_run

from paceline.checkpoint import Checkpoint
from paceline.comm import LocalGroup
from paceline.compression import OneBit
from paceline.elastic.member import Evicted
from paceline.errors import CommunicationError
from paceline.monitor.events import CodecChanged, RunFinished, StepFinished, WorkersChanged
from paceline.monitor.log import EventLog
from paceline.monitor.reader import read_log, select
from paceline.optim import SGD, AdamW
from paceline.replica.codec_chooser import CodecChooser
from paceline.replica.gradients import Gradients
from paceline.replica.landing import BucketLanding
from paceline.replica.worker_state import WorkerState
from paceline.sync.adaptive_local_sgd import MeasuredSyncSchedule
from paceline.sync.gossip import GossipMessages
from paceline.sync.outer_parameters import OuterParameters
from paceline.sync.periodic import SyncSchedule
from paceline.training import loop, train

LOST_STEP = 5
"""Number of updates before the one in which a worker is lost."""


class LostError(Exception):
    """A worker is gone."""


class ThreadMember(ScriptedMember):
    """The membership of a thread."""

    rooms: dict
    lock = threading.Lock()

    def open_group(self, view, device, timeout_s, transport):
        with self.lock:
            if view.epoch not in self.rooms:
                self.rooms[view.epoch] = LocalGroup.create(view.size, timeout_s=20.0, epoch=view.epoch)
        return self.rooms[view.epoch][view.rank]


def copy_of(optimizer):
    """Return copies of an optimizer's state, by the number of the parameter and key."""
    states = enumerate(optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"])
    return {f"{number} {key}": torch.as_tensor(value).clone() for number, s in states for key, value in s.items()}


def snapshot(state):
    """Return copies of a worker's parameters and of its rule's state."""
    sync = state._synchroniser
    own, shared = (sync.state(), sync.shared_state()) if sync is not None else ({}, {})
    return SimpleNamespace(
        parameters={name: p.detach().clone() for name, p in state._parameters.items()},
        own={name: t.clone() for name, t in own.items()},
        shared={name: t.clone() for name, t in shared.items()},
        document=copy.deepcopy(state.document()["sync_document"]),
        is_due=state.is_exchange_due,
        num_updates=state.num_updates,
    )


def run_threads(folder, monkeypatch, sync, epochs, lose=nullcontext, dying="", **changes):
    """Train as threads, in which the `dying` worker is lost; return each worker before and after it went on."""
    member_type = type("Member", (ThreadMember,), {"rooms": {}})
    store, seen, errors = dist.HashStore(), {}, []
    settings = {"optimizer": SGD(learning_rate=0.05, momentum=0.9), "sync": sync, "hash_interval": 0, "ema": None}
    run = make_run(**(settings | {"evaluate_interval": 0, "checkpoint_interval": 0} | changes))
    real = WorkerState.settle

    def settle(self, optimizer, *, is_new):
        before = snapshot(self)
        words = real(self, optimizer, is_new=is_new)
        name = threading.current_thread().name
        seen[self._shard.group.epoch, name] = SimpleNamespace(
            before=before, after=snapshot(self), is_new=is_new, words=words, optimizer=copy_of(optimizer)
        )
        return words

    monkeypatch.setattr(WorkerState, "settle", settle)
    if dying:
        lose(monkeypatch, dying)

    def work(name, number):
        member = member_type(store, name, [Epoch(*epoch) for epoch in epochs])
        try:
            with EventLog(folder / "events.jsonl", run="r", rank=number) as log:
                train(run, folder, LocalGroup(), log, recipe="test", member=member)
        except (Evicted, LostError):
            pass
        except BaseException as error:
            errors.append(error)
            raise

    names = sorted({name for epoch in epochs for name in epoch[0]})
    threads = [threading.Thread(target=work, args=(name, n), name=name, daemon=True) for n, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)
    return seen, read_log(folder / "events.jsonl")


def lose_in(owner, method, is_there):
    """Return a function that lets a worker be lost in a method, where `is_there(*arguments)`."""

    def lose(monkeypatch, dying):
        real = getattr(owner, method)

        def run(*arguments, **options):
            if threading.current_thread().name == dying and is_there(*arguments):
                raise LostError
            return real(*arguments, **options)

        monkeypatch.setattr(owner, method, run)

    return lose


in_a_step = lose_in(loop, "train_step", lambda session, batch, step: step == LOST_STEP)
in_an_exchange = lose_in(OuterParameters, "send", lambda own, weight, total, number, *_: number == LOST_STEP)
WITHOUT_W1 = [[["w0", "w1", "w2", "w3"]], [["w0", "w2", "w3"]]]


def mean_of(workers, weights=None):
    weights = weights or [1.0] * len(workers)
    return {
        name: sum(weight * one[name].double() for weight, one in zip(weights, workers, strict=True)) / sum(weights)
        for name in workers[0]
    }


def assert_equal(found, expected, atol=1e-6):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].double(), tensor.double(), rtol=0, atol=atol, msg=name)


def changed_in(records, num_workers=3, num_steps=NUM_STEPS):
    (changed,) = select(records, WorkersChanged)
    assert changed.event.num_workers == num_workers
    (ended,) = select(records, RunFinished)
    assert ended.step == num_steps
    assert ended.event.held_out_loss < 1.3
    steps = [record.step for record in select(records, StepFinished)]
    assert len(set(steps)) == len(steps), "no update counts twice"
    return changed


GOSSIP = {
    "dpsgd": {"name": "dpsgd"},
    "dpsgd on a torus of 4": {"name": "dpsgd", "graph": {"name": "torus", "shape": [2, 2]}},
    "choco_sgd": {"name": "choco_sgd"},
    "choco_sgd, top_k": {"name": "choco_sgd", "codec": {"name": "top_k", "density": 0.2, "dense_below": 0}},
    "push_sum": {"name": "push_sum", "graph": {"name": "edge_list", "is_directed": True}},
    "adaptive_mixing": {"name": "adaptive_mixing", "interval": 3},
}
GOSSIP["push_sum"]["graph"]["edges"] = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]]


def consensus_of(workers, when):
    """Return the mean of the models; of push-sum, the sum of numerators divided by that of weights."""
    held = [getattr(worker, when) for worker in workers]
    if "numerator" in held[0].own:
        return {"x": sum(h.own["numerator"].double() for h in held) / sum(float(h.own["weight"]) for h in held)}
    return mean_of([h.parameters for h in held])


@pytest.mark.parametrize("phase", ["step", "messages"])
@pytest.mark.parametrize("sync", GOSSIP.values(), ids=GOSSIP)
def test_gossip_goes_on_and_keeps_the_mean_of_who_is_left(tmp_path, monkeypatch, sync, phase):
    at_the_end = lambda own, sources, destinations, name: name.endswith(f" {LOST_STEP + 1}")  # noqa: E731
    lose = in_a_step if phase == "step" else lose_in(GossipMessages, "start", at_the_end)
    seen, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W1, lose, "w1")
    changed = changed_in(records)
    stayed = [seen[1, name] for name in ("w0", "w2", "w3")]
    assert not any(one.is_new for one in stayed)
    assert_equal(consensus_of(stayed, "after"), consensus_of(stayed, "before"))
    spread = stayed[0].before.parameters["layers.0.weight"] - stayed[1].before.parameters["layers.0.weight"]
    assert spread.abs().max() > 1e-4, "they have kept their own models"
    assert "the models of w1" in changed.event.lost
    is_kept = sync.get("graph", {}).get("name") not in ("torus", "edge_list")
    assert ("RingGraph" in changed.event.repaired) != is_kept


@pytest.mark.parametrize("sync", [GOSSIP[name] for name in ("dpsgd", "choco_sgd")] + [{"name": "push_sum"}])
def test_who_joins_gossip_begins_at_the_mean(tmp_path, monkeypatch, sync):
    names = ["w0", "w1", "w2"]
    num_steps = 25  # workers agree on a change by votes, which are counted after step 20
    seen, records = run_threads(tmp_path, monkeypatch, sync, [[names], [[*names, "w3"], 3]], num_steps=num_steps)
    changed = changed_in(records, 4, num_steps)
    everybody = [seen[1, name] for name in (*names, "w3")]
    assert [one.is_new for one in everybody] == [False] * 3 + [True]
    before = consensus_of(everybody[:3], "before")
    assert_equal(consensus_of(everybody, "after"), before)
    assert_equal(everybody[3].after.parameters, mean_of([one.before.parameters for one in everybody[:3]]), atol=1e-2)
    assert "begin at the mean" in changed.event.repaired


@pytest.mark.parametrize("codec", [{"name": "none"}, {"name": "one_bit", "dense_below": 0}], ids=["plain", "one_bit"])
@pytest.mark.parametrize("phase", ["step", "exchange", "variates"])
def test_scaffold_corrects_by_the_mean_of_the_variates_that_are_left(tmp_path, monkeypatch, phase, codec):
    sync = {"name": "scaffold", "period": 3, "codec": codec}
    of_variates = lambda own, weight, total, number, *_: number == LOST_STEP and own._name == "variates"  # noqa: E731
    lose = {"step": in_a_step, "exchange": in_an_exchange, "variates": lose_in(OuterParameters, "send", of_variates)}
    seen, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W1, lose[phase], "w1")
    changed = changed_in(records)
    stayed = [seen[1, name] for name in ("w0", "w2", "w3")]
    assert not any(one.is_new for one in stayed)
    for one in stayed:
        common = {n.removeprefix("variates/"): t for n, t in one.after.shared.items() if n.startswith("variates/")}
        own = [{n.removeprefix("own/"): t for n, t in o.after.own.items() if n.startswith("own/")} for o in stayed]
        weights = [o.after.document["own_weight"] for o in stayed]
        assert sum(weights) > 0
        if codec["name"] == "none" or phase != "exchange":  # what a codec holds back comes later
            assert_equal(common, mean_of(own, weights))
    assert any(tensor.abs().max() > 1e-3 for tensor in own[0].values())
    assert "control variate" in changed.event.repaired
    assert ("after step 3" in changed.event.lost) == (phase != "variates"), "that exchange has taken its part"


def test_a_broken_pull_is_made_again_by_those_who_are_left(tmp_path, monkeypatch):
    """What the centre gains is what these workers have lost, as if there had been no others."""
    sync = {"name": "easgd", "period": 3}
    moved = {}

    def lose(monkeypatch, dying):
        real = OuterParameters.send

        def send(self, weight, total, number, differences=None):
            if number == LOST_STEP and self._group.epoch == 0:
                moved[threading.current_thread().name] = {n: t.double().clone() for n, t in differences.items()}
                if threading.current_thread().name == dying:
                    raise LostError
            return real(self, weight, total, number, differences)

        monkeypatch.setattr(OuterParameters, "send", send)

    seen, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W1, lose, "w1")
    changed_in(records)
    stayed = {name: seen[1, name] for name in ("w0", "w2", "w3")}
    due = [name for name, one in stayed.items() if one.before.is_due]
    assert due, "some had been pulled already"
    for one in stayed.values():
        elasticity = 0.9 / 4  # that of the exchange that was broken
        expected = {
            name: tensor.double() - elasticity * sum(moved[other][name.removeprefix("centre/")] for other in due)
            for name, tensor in one.before.shared.items()
            if name != "pull"
        }
        assert_equal(one.after.shared, expected)


def test_easgd_goes_on_from_its_centre(tmp_path, monkeypatch):
    seen, records = run_threads(tmp_path, monkeypatch, {"name": "easgd", "period": 3}, WITHOUT_W1, in_a_step, "w1")
    changed = changed_in(records)
    for name in ("w0", "w2", "w3"):
        assert_equal(seen[1, name].after.shared, seen[1, "w0"].before.shared, atol=0)
        assert_equal(seen[1, name].after.parameters, seen[1, name].before.parameters, atol=0)
    assert changed.event.lost == "what w1 learnt alone of the samples after step 3"


def test_an_elasticity_that_is_too_large_for_more_workers_is_bounded(tmp_path, monkeypatch):
    sync = {"name": "easgd", "period": 2, "elasticity": 0.4}
    _, records = run_threads(tmp_path, monkeypatch, sync, [[["w0", "w1"]], [["w0", "w1", "w2"], 3]], num_steps=25)
    changed = changed_in(records, 3, 25)
    assert "elasticity=0.333" in changed.event.repaired


def outer_of(state, fragment):
    prefix = f"fragment {fragment}/"
    return {n.removeprefix(prefix): t for n, t in state.shared.items() if n.startswith(prefix)}


@pytest.mark.parametrize("delay", [0, 1])
def test_a_fragment_on_its_way_is_sent_again_at_once(tmp_path, monkeypatch, delay):
    """Fragment 0 has its turn after steps 2, 6, 10 and fragment 1 after 4, 8; outer SGD without momentum averages."""
    sync = {"name": "streaming_diloco", "period": 4, "num_fragments": 2, "delay": delay}
    sync |= {"outer_momentum": 0.0, "outer_learning_rate": 1.0}
    seen, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W1, in_an_exchange, "w1")
    changed = changed_in(records)
    stayed = [seen[1, name] for name in ("w0", "w2", "w3")]
    assert "fragments 0 were exchanged at once" in changed.event.repaired
    weights = [one.before.document["weights"][0] + one.before.document["weight"] for one in stayed]
    assert len(set(weights)) > 1, "the last step of the epoch has fewer samples than workers"
    for one in stayed:
        assert not one.is_new
        views = outer_of(one.after, 0)
        for block, outer in views.items():
            name, _, rows = block.partition("[")
            part = slice(*map(int, rows.rstrip("]").split(":"))) if rows else slice(None)
            mean = mean_of([o.before.parameters for o in stayed], weights)[name][part]
            torch.testing.assert_close(outer.double(), mean, rtol=0, atol=1e-6)
            torch.testing.assert_close(one.after.parameters[name][part], outer, rtol=0, atol=1e-6)
        assert_equal(outer_of(one.after, 1), outer_of(one.before, 1), atol=0)


@pytest.mark.parametrize("codec", [{"name": "none"}, {"name": "one_bit", "dense_below": 0}], ids=["plain", "one_bit"])
def test_streaming_goes_on_between_turns(tmp_path, monkeypatch, codec):
    sync = {"name": "streaming_diloco", "period": 4, "num_fragments": 2, "delay": 1, "codec": codec}
    lose = lose_in(loop, "train_step", lambda session, batch, step: step == 7)
    seen, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W1, lose, "w1")
    changed = changed_in(records)
    stayed = [seen[1, name] for name in ("w0", "w2", "w3")]
    for one in stayed:
        assert not one.is_new
        assert_equal(one.after.parameters, one.before.parameters, atol=0)
        weights = torch.tensor([o.after.document["weights"] for o in stayed], dtype=torch.float64).sum(0)
        assert one.after.document["total_weights"] == weights.tolist(), "the lost worker's part counts no more"
    assert ("residuals" in changed.event.lost) == (codec["name"] != "none")


def test_hosts_meet_when_a_worker_is_lost(tmp_path, monkeypatch):
    """w1 shared its host with w0: those who are left are divided into other hosts."""
    sync = {"name": "hierarchical_local_sgd", "period": 4, "host_size": 2}
    seen, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W1, in_a_step, "w1")
    changed = changed_in(records)
    stayed = [seen[1, name] for name in ("w0", "w2", "w3")]
    if not any(one.is_new for one in stayed):
        weights = [one.before.document["weight"] for one in stayed]
        expected = mean_of([one.before.parameters for one in stayed], weights if any(weights) else None)
        for one in stayed:
            assert_equal(one.after.parameters, expected)
    for one in stayed:
        assert_equal(one.after.parameters, stayed[0].after.parameters, atol=0)
        assert_equal(one.optimizer, stayed[0].optimizer, atol=0)
    assert "all workers have met" in changed.event.repaired


@pytest.mark.parametrize("phase", ["exchange", "measuring"])
def test_adaptive_local_sgd_goes_on_with_its_period(tmp_path, monkeypatch, phase):
    sync = {"name": "adaptive_local_sgd", "period": 3}
    measuring = lose_in(MeasuredSyncSchedule, "record", lambda own, number, *_: number == LOST_STEP)
    lose = in_an_exchange if phase == "exchange" else measuring
    seen, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W1, lose, "w1")
    changed = changed_in(records)
    assert changed.step == LOST_STEP + 1
    stayed = [seen[1, name] for name in ("w0", "w2", "w3")]
    for one in stayed:
        assert one.after.shared["sync_schedule"].tolist() == [3, 8], "the next exchange is a period later"
        assert_equal(one.after.parameters, stayed[0].after.parameters, atol=0)


def test_who_is_behind_keeps_its_own_model_where_workers_step_alone(tmp_path, monkeypatch):
    """w2 has not begun step 6 when w1 is lost in it, and w0 is through with it."""
    sync = {"name": "local_sgd", "period": 4}
    w0_is_through, real = threading.Event(), loop.train_step

    def step_in_turn(session, batch, step):
        name = threading.current_thread().name
        if session.replica.group.epoch == 0 and step == LOST_STEP:
            if name != "w0":
                w0_is_through.wait(20)
            if name == "w1":
                raise LostError
            if name == "w2":
                raise CommunicationError("a cable was pulled")
        if session.replica.group.epoch == 0 and step == LOST_STEP + 1 and name == "w0":
            w0_is_through.set()
        return real(session, batch, step)

    monkeypatch.setattr(loop, "train_step", step_in_turn)
    seen, records = run_threads(tmp_path, monkeypatch, sync, [[["w0", "w1", "w2"]], [["w0", "w2"]]])
    changed = changed_in(records, 2)
    assert not seen[1, "w2"].is_new
    assert seen[1, "w2"].before.num_updates == seen[1, "w0"].before.num_updates
    lost = changed.event.lost.split("; ")
    assert lost[0] == "what w1 learnt alone of the samples after step 4"
    assert lost[1].startswith("the samples of w2 after step 5, up to step ")


def test_the_last_worker_needs_no_exchange(tmp_path, monkeypatch):
    sync = {"name": "local_sgd", "period": 3}
    seen, records = run_threads(tmp_path, monkeypatch, sync, [[["w0", "w1"]], [["w0"]]], in_an_exchange, "w1")
    changed_in(records, 1)
    assert seen[1, "w0"].after.num_updates == LOST_STEP + 1


@pytest.mark.parametrize(
    "sync",
    [
        {"name": "local_sgd", "period": 3},
        {"name": "diloco", "period": 3},
        {"name": "streaming_diloco", "period": 4},
        {"name": "adaptive_local_sgd", "period": 3},
        {"name": "hierarchical_local_sgd", "period": 3, "host_size": 1},
        {"name": "scaffold", "period": 3},
        {"name": "easgd", "period": 3},
        {"name": "dpsgd"},
        {"name": "choco_sgd"},
        {"name": "push_sum"},
        {"name": "adaptive_mixing", "interval": 3},
    ],
    ids=lambda sync: sync["name"],
)
def test_who_was_alone_takes_up_the_rule_again(tmp_path, monkeypatch, sync):
    epochs = [[["w0", "w1"]], [["w0"]], [["w0", "w2"], 8]]
    seen, records = run_threads(tmp_path, monkeypatch, sync, epochs, in_a_step, "w1", num_steps=16)
    changed = select(records, WorkersChanged)
    assert [record.event.num_workers for record in changed] == [1, 2]
    (ended,) = select(records, RunFinished)
    assert ended.step == 16
    assert not seen[1, "w0"].is_new
    assert not seen[2, "w0"].is_new
    assert_equal(seen[2, "w2"].after.parameters, seen[2, "w0"].after.parameters)


def test_periods_after_the_synchronous_steps_are_counted_from_their_end():
    schedule = SyncSchedule(4, 10)
    assert [schedule.last_before(number) for number in (3, 10, 13, 14, 17)] == [3, 10, 10, 14, 14]


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
