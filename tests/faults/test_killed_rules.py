"""Runs whose workers do not step together: killed, stopped, and gone on with, from the command line."""

import os
import signal
from pathlib import Path

import pytest
from test_killed_runs import (
    find_workers,
    finish,
    kill,
    losses_of,
    newest_step,
    run_straight,
    start,
    tensors_of,
)

from paceline.checkpoint import Checkpoint
from paceline.monitor.events import (
    Evaluated,
    Preempted,
    Restarted,
    RunFinished,
    StalenessMeasured,
    StepFinished,
    WorkersChanged,
)
from paceline.monitor.reader import read_log, select


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_killed_worker_changes_no_bit(tmp_path, run_here, wait_for_step):
    settings = {"sync": "streaming_diloco", "sync.period": 6, "sync.num_fragments": 3}
    settings |= {"sync.codec": "power_sgd", "sync.codec.dense_below": 0}
    killed = tmp_path / "killed"
    process = start(killed, 30, **settings, min_workers=3)  # so that all start again
    wait_for_step(killed, 14, process)
    assert kill(killed, 1)
    code, output = finish(process)
    assert code == 0, output
    assert len(select(read_log(killed / "events.jsonl"), Restarted)) == 1
    losses, tensors = run_straight(run_here, tmp_path / "straight", 30, **settings)
    assert losses_of(killed) == losses
    assert tensors_of(killed, 30) == tensors


def campaign(*values):
    return pytest.param(*values, marks=pytest.mark.campaign)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("sync", "settings"),
    [
        ("scaffold", {"sync.period": 4}),
        ("dpsgd", {}),
        ("streaming_diloco", {"sync.period": 6, "sync.num_fragments": 3}),
        campaign("hierarchical_local_sgd", {"sync.period": 4, "sync.host_size": 2}),
        campaign("adaptive_local_sgd", {"sync.period": 4}),
        campaign("easgd", {"sync.period": 4}),
        campaign("choco_sgd", {"sync.codec": "top_k", "sync.codec.dense_below": 0}),
        campaign("push_sum", {}),
        campaign("adaptive_mixing", {"sync.interval": 5}),
        campaign("local_sgd", {"sync.period": 4}),
        campaign("diloco", {"sync.period": 4}),
        campaign("post_local_sgd", {"sync.period": 4, "sync.synchronous_steps": 8}),
    ],
)
def test_others_go_on_without_a_killed_worker(tmp_path, sync, settings, wait_for_step):
    killed = tmp_path / "killed"
    process = start(killed, 60, sync=sync, evaluate_interval=20, **settings)
    wait_for_step(killed, 14, process)
    assert kill(killed, 1)
    code, output = finish(process)
    assert code == 0, output
    records = read_log(killed / "events.jsonl")
    assert not select(records, Restarted)
    first, *_ = select(records, WorkersChanged)
    assert set(first.event.names) - {"w1.2"} == {"w0", "w2"}, "a new worker may come at once"
    assert first.step >= 13, "at most the step under way is made again"
    is_together = first.step % int(settings.get("sync.period", 1000)) == 0
    assert "w1" in first.event.lost or is_together, "what a worker learns alone is lost with it"
    told = [record.step for record in select(records, StepFinished)]
    assert told == sorted(set(told)), "no update is made twice"
    (ended,) = select(records, RunFinished)
    assert ended.step == 60
    last = max((killed / "checkpoints").glob("step-*"))
    assert Checkpoint.open(last).read_document()["loader"]["low_water"] == 60 * 12, "no sample is left out"
    evaluated = [record.event.loss for record in select(records, Evaluated)]
    assert evaluated[-1] < evaluated[0]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "settings",
    [
        campaign({"landing": "arrival", "clip_norm": "none", "keeps_step_copies": "true"}),
        {"sync.codec": "top_k", "sync.codec.dense_below": 0, "keeps_step_copies": "true"},
        campaign({"batch_policy": "per_worker", "batch_policy.samples": 4}),
        {"peer_memory.interval": 3, "checkpoint_interval": 0},
    ],
    ids=["arrival", "coded steps", "per worker", "peer memory"],
)
def test_settings_that_go_on_without_a_killed_worker(tmp_path, settings, wait_for_step):
    killed = tmp_path / "killed"
    process = start(killed, 60, **settings)
    for step in (12, 30):
        wait_for_step(killed, step, process)
        kill(killed, 1)
    code, output = finish(process)
    assert code == 0, output
    records = read_log(killed / "events.jsonl")
    assert not select(records, Restarted)
    first, *_ = select(records, WorkersChanged)
    assert set(first.event.names) - {"w1.2"} == {"w0", "w2"}, "a new worker may come at once"
    told = [record.step for record in select(records, StepFinished)]
    assert told == sorted(set(told)), "no update is made twice"
    (ended,) = select(records, RunFinished)
    assert ended.step == 60


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_at_their_own_pace_a_killed_worker_loses_no_sample(tmp_path, wait_for_step):
    killed = tmp_path / "killed"
    process = start(killed, 40, **{"sync": "asgd", "sync.placement": "own", "evaluate_interval": 10})
    wait_for_step(killed, 14, process)
    assert len(find_workers(killed)) == 4, "three workers and a server"
    assert kill(killed, 0)
    code, output = finish(process)
    assert code == 0, output
    records = read_log(killed / "events.jsonl")
    assert len(select(records, Restarted)) == 1
    (ended,) = select(records, RunFinished)
    assert ended.step == 40
    evaluated = [record.event.loss for record in select(records, Evaluated)]
    assert evaluated[-1] < evaluated[0]
    measured = select(records, StalenessMeasured)[-1]
    # Each of 40 steps is 12 samples, of which a push has 4.
    assert sum(measured.event.counts) == 120


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("sync", [campaign("dpsgd"), "ssp"])
def test_a_signal_to_one_worker_stops_all_and_loses_no_sample(tmp_path, sync, wait_for_step):
    stopped = tmp_path / "stopped"
    process = start(stopped, 10_000, sync=sync, checkpoint_interval=0)
    wait_for_step(stopped, 5, process)
    os.kill(find_workers(stopped)[2], signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    (preempted,) = select(read_log(stopped / "events.jsonl"), Preempted)
    assert newest_step(stopped) <= preempted.step, "no step that was told of is lost"
    document = Checkpoint.open(Path(preempted.event.checkpoint)).read_document()
    loader, states = document["loader"], document["replica"]["states"]
    replicas = [states[number] for number in document["replica"]["state_of"]]
    assert loader["low_water"] // 12 == preempted.step
    assert not loader["done_above"]
    if sync == "dpsgd":
        assert newest_step(stopped) == preempted.step
        assert loader["low_water"] == 12 * preempted.step
    else:  # at their own pace the last global batch may be taken in part: a push has 4 samples
        pushes = sum(replica["num_updates"] for replica in replicas)
        assert 4 * pushes == loader["low_water"]
        assert pushes == max(replica["sync_document"]["links"][0]["version"] for replica in replicas)
