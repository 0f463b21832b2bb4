"""Workers at their own pace, one of which is killed between checkpoints: the others stop and save what they know."""

import json
import threading
import time
from pathlib import Path

import pytest
from test_killed_runs import arguments_of_run, find_lines, kill

from paceline.checkpoint import Checkpoint
from paceline.monitor.events import CheckpointSaved, Restarted, RunFinished, RunStarted, StepFinished, WorkersChanged
from paceline.monitor.reader import read_log, select

NO_BOUNDARY = {"checkpoint_interval": 0, "evaluate_interval": 0, "global_batch": 12}
OWN_SERVERS = {"sync": "asgd", "sync.placement": "own"}
SYNCS = {"easgd": {"sync": "easgd", "sync.asynchronous": True}, "ad_psgd": {"sync": "ad_psgd"}}


def run_and_kill(run_here, directory, rank, settings):
    """Train 60 steps, and kill a rank after 20, where no boundary has been; return the records of the log."""

    def wait_and_kill():
        deadline_s = time.monotonic() + 120
        while not any(json.loads(line)["step"] >= 20 for line in find_lines(directory, "step_finished")[-3:]):
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.01)
        killed.append(kill(directory, rank))

    killed = []
    killer = threading.Thread(target=wait_and_kill)
    killer.start()
    done = run_here(*arguments_of_run(directory, 60, 3, NO_BOUNDARY | settings))
    killer.join()
    assert done.returncode == 0, done.stdout + done.stderr
    assert killed == [True]
    return read_log(directory / "events.jsonl")


@pytest.mark.timeout(200)
def test_what_lives_is_saved_and_training_goes_on_from_there(tmp_path, run_here):
    directory = tmp_path / "killed"
    records = run_and_kill(run_here, directory, 2, OWN_SERVERS | {"keep_checkpoints": 9})
    saved = next(record for record in select(records, CheckpointSaved) if record.event.lost_ranks)
    assert saved.event.lost_ranks == [2]
    document = Checkpoint.open(Path(saved.event.path)).read_document()
    assert document["lost_ranks"] == [2], "it does not look like one of all workers"
    assert len(document["replica"]["states"]) == 1
    _, after = select(records, RunStarted)
    assert after.event.resumed_from == saved.event.path
    assert after.event.start_step == saved.step
    loader = document["loader"]
    num_used = loader["low_water"] + sum(stop - start for start, stop in loader["done_above"])
    told = [one.event.num_samples for one in select(records, StepFinished) if one.epoch == 0 and one.rank == 0]
    assert num_used >= sum(told)
    assert num_used >= 20 * 12 - 3 * 4, "what was used stays used, but for what was under way"
    (ended,) = select(records, RunFinished)
    assert ended.step == 60
    last = max((directory / "checkpoints").glob("step-*"))
    assert Checkpoint.open(last).read_document()["loader"]["low_water"] == 60 * 12, "no sample is left out"
    assert ended.event.held_out_loss < 4.5, "it has gone on learning"
    assert len(select(records, Restarted)) == 1


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "rank"),
    [
        *(("easgd", 0), ("ad_psgd", 2)),
        *(
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.campaign])
            for case in (("easgd", 2), ("ad_psgd", 0))
        ),
    ],
)
def test_others_go_on_without_the_one_that_is_lost(tmp_path, name, rank, run_here):
    records = run_and_kill(run_here, tmp_path / "killed", rank, SYNCS[name])
    assert not select(records, Restarted)
    first, *_ = select(records, WorkersChanged)
    others = {f"w{number}" for number in range(3) if number != rank}
    assert set(first.event.names) - {f"w{rank}.2"} == others, "a new worker may come at once"
    (ended,) = select(records, RunFinished)
    assert ended.step == 60
    assert ended.event.held_out_loss < 4.5, "it has gone on learning"
