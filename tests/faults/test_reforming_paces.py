"""Workers at their own pace without servers: one is lost, or joins, and what they conserve is what their sums say."""

import threading

import pytest
import torch
from reforming_threads import LostError, assert_equal, in_a_step, lose_in, mean_of, run_threads
from test_reforming_servers import NUM_STEPS, DoubleNetwork, gone_on, is_lost, of_steps

from paceline.errors import CommunicationError
from paceline.optim import SGD
from paceline.sync.ad_psgd import ADPSGDSynchroniser
from paceline.sync.elastic_centre import AsynchronousElastic
from paceline.training import loop

EASGD = {"name": "easgd", "asynchronous": True, "period": 2}
NAMES = ["w0", "w1", "w2", "w3"]
STILL = {"model": DoubleNetwork(), "optimizer": SGD(learning_rate=1e-14, momentum=0.0), "clip_norm": None}
"""Workers whose gradients change nothing that a sum in float64 shows."""


@pytest.fixture
def learnt(monkeypatch):
    """Positions of samples that each worker has learnt, by epoch and name."""
    found, real = {}, AsynchronousElastic.after_update

    def after_update(self, step):
        name = threading.current_thread().name
        found.setdefault((self._context.group.epoch, name), []).append(tuple(self._dispatcher.present))
        return real(self, step)

    monkeypatch.setattr(AsynchronousElastic, "after_update", after_update)
    return found


def positions_of(ranges):
    return [position for start, stop in ranges for position in range(start, stop)]


LOSSES = {
    "before its step": lose_in(loop, "train_step", is_lost),
    "with its swap under way": lose_in(
        AsynchronousElastic, "_end_swap", lambda own, told: own._num_steps >= 2 and own._context.group.epoch == 0
    ),
}


@pytest.mark.parametrize("phase", LOSSES)
@pytest.mark.parametrize("dying", ["w3", "w0"])
def test_others_go_on_with_the_centre_that_they_know(tmp_path, monkeypatch, learnt, dying, phase):
    """w0 keeps the centre; each sample counts once, but for those that only the lost worker has learnt, and others."""
    epochs = [[NAMES], [[name for name in NAMES if name != dying]]]
    _, records = run_threads(tmp_path, monkeypatch, EASGD, epochs, LOSSES[phase], dying, num_steps=NUM_STEPS)
    changed = gone_on(records, 3)
    assert changed.event.num_sent == 0
    assert ("the last one known" in changed.event.lost) == (dying == "w0")
    living = sorted(p for (_, name), ranges in learnt.items() if name != dying for p in positions_of(ranges))
    assert len(set(living)) == len(living), "no living worker learns a sample twice"
    everything = {p for ranges in learnt.values() for p in positions_of(ranges)}
    assert everything == set(range(of_steps(NUM_STEPS))), "no sample is left out"


@pytest.fixture
def sums(monkeypatch):
    """Let the four workers begin with different models, whose sum is `begin`; each worker's own is `<name> lost`."""
    begin, found, lock = ADPSGDSynchroniser._begin, {}, threading.Lock()

    def begin_apart(self):
        if not self._has_begun and self._context.group.epoch == 0:
            self._flat.write(self._flat.read() + self._context.group.rank)
            with lock:
                found["begin"] = found.get("begin", 0) + self._flat.read()
        begin(self)

    monkeypatch.setattr(ADPSGDSynchroniser, "_begin", begin_apart)
    return found


def flat_sum(workers):
    return sum(torch.cat([parameter.flatten() for parameter in one.parameters.values()]) for one in workers)


def test_pairs_undo_an_average_whose_answer_is_lost(tmp_path, monkeypatch, sums):
    """w2 is lost between two averages, and the answer to w0 before: a passive worker alone has made that average."""
    real, has_asked, is_lost_now = ADPSGDSynchroniser._finish, threading.Event(), threading.Event()

    def finish(self):
        name = threading.current_thread().name
        if self._context.group.epoch or self._client is None or name not in ("w0", "w2"):
            return real(self)
        if name == "w0":  # in its first average, between models that differ
            client, self._client = self._client, None
            client.finish(torch.empty_like(self._delta).view(torch.uint8))
            has_asked.set()
            is_lost_now.wait(20)
            raise CommunicationError("a cable was pulled")
        has_asked.wait(20)
        real(self)
        sums["lost"] = self._model.read()
        is_lost_now.set()
        raise LostError

    monkeypatch.setattr(ADPSGDSynchroniser, "_finish", finish)
    sync, epochs = {"name": "ad_psgd"}, [[NAMES], [["w0", "w1", "w3"]]]
    seen, records = run_threads(tmp_path, monkeypatch, sync, epochs, num_steps=NUM_STEPS, **STILL)
    changed = gone_on(records, 3)
    assert "averages of which only one worker knew were undone: 1" in changed.event.repaired
    stayed = [seen[1, name] for name in ("w0", "w1", "w3")]
    assert not any(one.is_new for one in stayed)
    assert (flat_sum([one.after for one in stayed]) - flat_sum([one.before for one in stayed])).abs().max() > 1e-3
    expected = sums["begin"] - sums["lost"]
    torch.testing.assert_close(flat_sum([one.after for one in stayed]), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dying", NAMES)
def test_pairs_go_on_without_a_lost_worker(tmp_path, monkeypatch, dying):
    left = [name for name in NAMES if name != dying]
    sync, epochs = {"name": "ad_psgd"}, [[NAMES], [left]]
    seen, records = run_threads(tmp_path, monkeypatch, sync, epochs, in_a_step, dying, num_steps=NUM_STEPS)
    changed = gone_on(records, 3)
    stayed = [seen[1, name] for name in left]
    assert not any(one.is_new for one in stayed)
    assert f"the models of {dying}, but for what others have mixed in" in changed.event.lost
    if not changed.event.repaired:
        assert_equal(mean_of([one.after.parameters for one in stayed]), mean_of([o.before.parameters for o in stayed]))


CHANGES = {
    "joins": [[["w0", "w1"]], [["w0", "w1", "w2"], 3]],
    "leaves": [[["w0", "w1", "w2"]], [["w1", "w2"], 3]],
    "one is left": [[["w0", "w1"]], [["w1"], 3]],
}


@pytest.mark.parametrize("epochs", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("sync", [EASGD, {"name": "ad_psgd"}], ids=lambda sync: sync["name"])
def test_workers_at_their_own_pace_join_and_leave(tmp_path, monkeypatch, learnt, sync, epochs):
    num_steps = 40  # workers agree on a stop some steps ahead
    _, records = run_threads(tmp_path, monkeypatch, sync, epochs, num_steps=num_steps)
    changed = gone_on(records, len(epochs[1][0]), num_steps)
    if sync is EASGD:
        assert changed.event.lost == ""
        positions = sorted(p for ranges in learnt.values() for p in positions_of(ranges))
        assert positions == list(range(of_steps(num_steps))), "each sample is learnt once"


def test_a_swap_whose_reply_is_lost_is_undone(tmp_path, monkeypatch):
    """What the centre and the workers hold together is what they began with: gradients change nothing here."""
    sums, real, begin = {}, AsynchronousElastic._end_swap, AsynchronousElastic._begin_swap
    is_lost_now, lock = threading.Event(), threading.Lock()

    def begin_apart(self):
        name = threading.current_thread().name
        if self._context.group.epoch == 0 and self._num_swaps == 0:
            self._flat.write(self._flat.read() + int(name[1:]))
            with lock:
                sums[name] = self._flat.read()
                sums.setdefault("centre", sums[name] - int(name[1:]))
        begin(self)

    def end(self, told):
        name = threading.current_thread().name
        if self._context.group.epoch == 0 and self._num_swaps >= 2 and name in ("w2", "w3"):
            if name == "w2":
                self._client.finish()
                is_lost_now.wait(20)
                raise CommunicationError("a cable was pulled")
            real(self, told)
            sums["lost"] = self._flat.read()
            is_lost_now.set()
            raise LostError
        return real(self, told)

    monkeypatch.setattr(AsynchronousElastic, "_begin_swap", begin_apart)
    monkeypatch.setattr(AsynchronousElastic, "_end_swap", end)
    after, go_on = {}, AsynchronousElastic._go_on

    def note(self, ends, own):
        go_on(self, ends, own)
        after[threading.current_thread().name] = self._flat.read()
        after["centre"] = self._known.values.clone()

    monkeypatch.setattr(AsynchronousElastic, "_go_on", note)
    epochs = [[NAMES], [["w0", "w1", "w2"]]]
    _, records = run_threads(tmp_path, monkeypatch, EASGD, epochs, num_steps=NUM_STEPS, **STILL)
    gone_on(records, 3)
    begun = sum(sums[name] for name in (*NAMES, "centre"))
    left = sum(after[name] for name in ("w0", "w1", "w2", "centre"))
    torch.testing.assert_close(left, begun - sums["lost"], rtol=0, atol=1e-6)
