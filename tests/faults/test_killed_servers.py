"""Runs with servers beside workers, one of which is killed or leaves: from the command line."""

import pytest
from test_killed_runs import finish, kill, start

from paceline.checkpoint import Checkpoint
from paceline.monitor.events import Evaluated, Restarted, RunFinished, StalenessMeasured, WorkersChanged
from paceline.monitor.reader import read_log, select

NUM_STEPS, GLOBAL_BATCH = 60, 12


def run_and_kill(directory, wait_for_step, ranks, **settings):
    """Kill a worker after 14 steps, and perhaps another one after more; return the records of the log."""
    process = start(directory, NUM_STEPS, evaluate_interval=20, **settings)
    for number, rank in enumerate(ranks):
        wait_for_step(directory, 14 + 20 * number, process)
        assert kill(directory, rank)
    code, output = finish(process)
    assert code == 0, output
    return read_log(directory / "events.jsonl")


def assert_ended_well(directory, records):
    (ended,) = select(records, RunFinished)
    assert ended.step == NUM_STEPS
    last = max((directory / "checkpoints").glob("step-*"))
    loader = Checkpoint.open(last).read_document()["loader"]
    assert loader["low_water"] == NUM_STEPS * GLOBAL_BATCH, "no sample is left out"
    assert not loader["done_above"]
    evaluated = [record.event.loss for record in select(records, Evaluated)]
    assert evaluated[-1] < evaluated[0]


def campaign(*values):
    return pytest.param(*values, marks=pytest.mark.campaign)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "settings",
    [
        {"sync": "asgd"},
        campaign({"sync": "parameter_server"}),
        campaign({"sync": "ssp"}),
        campaign({"sync": "asgd", "sync.num_servers": 2, "sync.codec": "one_bit", "sync.codec.dense_below": 0}),
        campaign({"sync": "parameter_server", "sync.num_backups": 1}),
    ],
)
def test_others_go_on_without_a_killed_worker_that_has_no_server(tmp_path, settings, wait_for_step):
    records = run_and_kill(tmp_path / "killed", wait_for_step, [2], **settings)
    assert not select(records, Restarted)
    first, *_ = select(records, WorkersChanged)
    assert set(first.event.names) - {"w2.2"} == {"w0", "w1"}, "a new worker may come at once"
    assert_ended_well(tmp_path / "killed", records)
    if measured := select(records, StalenessMeasured):
        assert sum(measured[-1].event.counts) > 0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_without_a_standby_all_start_again_if_a_server_is_lost(tmp_path, wait_for_step):
    records = run_and_kill(tmp_path / "killed", wait_for_step, [0], sync="asgd")
    (restarted,) = select(records, Restarted)
    assert "all servers are lost" in restarted.event.reason
    assert_ended_well(tmp_path / "killed", records)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "settings",
    [
        {"sync": "parameter_server"},
        campaign({"sync": "asgd"}),
        campaign({"sync": "ssp", "sync.num_servers": 2}),
    ],
)
def test_a_standby_takes_the_place_of_a_lost_server(tmp_path, settings, wait_for_step):
    """The first worker is killed, and then the one beside which the server runs since."""
    standbys = {"sync.num_standbys": 1}
    records = run_and_kill(tmp_path / "killed", wait_for_step, [0, 1], **settings | standbys)
    assert not select(records, Restarted)
    first, *_ = select(records, WorkersChanged)
    assert set(first.event.names) - {"w0.2"} == {"w1", "w2"}, "a new worker may come at once"
    assert_ended_well(tmp_path / "killed", records)
