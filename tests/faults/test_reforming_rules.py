"""Rules whose workers differ: one is lost, or joins, and what the workers conserve is what their own sums say."""

import re
import threading

import pytest
import torch
from reforming_threads import (
    LOST_STEP,
    WITHOUT_W1,
    LostError,
    assert_equal,
    changed_in,
    in_a_step,
    in_an_exchange,
    lose_in,
    mean_of,
    run_threads,
)

from paceline.errors import CommunicationError
from paceline.monitor.events import RunFinished, WorkersChanged
from paceline.monitor.reader import select
from paceline.sync.adaptive_local_sgd import MeasuredSyncSchedule
from paceline.sync.gossip import GossipMessages
from paceline.sync.outer_parameters import OuterParameters
from paceline.sync.periodic import SyncSchedule
from paceline.training import loop

GOSSIP = {
    "dpsgd": {"name": "dpsgd"},
    "dpsgd on a torus of 4": {"name": "dpsgd", "graph": {"name": "torus", "shape": [2, 2]}},
    "choco_sgd": {"name": "choco_sgd"},
    "choco_sgd, top_k": {"name": "choco_sgd", "codec": {"name": "top_k", "density": 0.2, "dense_below": 0}},
    "push_sum": {"name": "push_sum", "graph": {"name": "edge_list", "is_directed": True}},
    "adaptive_mixing": {"name": "adaptive_mixing", "interval": 3},
}
GOSSIP["push_sum"]["graph"]["edges"] = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]]


def campaign(*values):
    """Return one more kind of what others are an example of."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.campaign])


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
    lost = changed.event.lost.split("; ")
    assert "the models of w1, but for what others have mixed in" in lost
    told = [re.fullmatch(r"the samples of (\w+) after step (\d+), up to step (\d+)", words) for words in lost[1:]]
    steps = {found[1]: int(found[2]) for found in told}
    most = max(one.before.num_updates for one in stayed)
    assert {int(found[3]) for found in told} == {most}
    graph = sync.get("graph", {}).get("name")
    neighbours = {"torus": ("w0", "w3"), "edge_list": ("w2",)}.get(graph, ("w0", "w2"))
    mixed = max(steps.get(name, most) for name in neighbours) - 1
    expected = range(most - 2, most) if sync["name"] == "adaptive_mixing" else [mixed]  # links there are chosen
    assert steps["w1"] in expected, "its last step was only in its model"
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
        campaign({"name": "local_sgd", "period": 3}),
        {"name": "diloco", "period": 3},
        {"name": "streaming_diloco", "period": 4},
        campaign({"name": "adaptive_local_sgd", "period": 3}),
        {"name": "hierarchical_local_sgd", "period": 3, "host_size": 1},
        {"name": "scaffold", "period": 3},
        {"name": "easgd", "period": 3},
        campaign({"name": "dpsgd"}),
        {"name": "choco_sgd"},
        {"name": "push_sum"},
        campaign({"name": "adaptive_mixing", "interval": 3}),
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
