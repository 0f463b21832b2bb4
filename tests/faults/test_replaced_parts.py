"""Workers of layouts with two replicas are killed: the others keep their processes, and nothing is read from disk."""

import pytest
from test_killed_runs import arguments_of_run, finish, kill, losses_of, newest_step, start, tensors_of, wait_until

from paceline.monitor.events import CheckpointSaved, Restarted, RunStarted, StepFinished, WorkersChanged
from paceline.monitor.reader import read_log, select

LAYOUTS = {
    "tensor": (2, {"layout.tensor": 2}),
    "sharded": (4, {"layout.sharded": 2, "layout.data": 2}),
    "optimizer": (4, {"layout.sharded": 2, "layout.data": 2, "layout.zero_stage": 1}),
    "pipeline": (2, {"layout.pipeline": 2, "model.num_layers": 2}),
}
"""Workers, of one rank or two each, and settings: four ranks."""
# The only checkpoint is that of the end.
SETTINGS = {"checkpoint_interval": 0, "hash_interval": 0, "ema": 0.9, "clip_norm": 1.0}


def check_killed(tmp_path, run_here, layout, ranks, num_steps=30):
    """Kill ranks one after the other; return the changes of the workers."""
    num_workers, settings = LAYOUTS[layout]
    settings = SETTINGS | settings
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    done = run_here(*arguments_of_run(straight, num_steps, num_workers, settings))
    assert done.returncode == 0, done.stdout + done.stderr
    process = start(killed, num_steps, num_workers, **settings)
    for number, rank in enumerate(ranks):
        at = newest_step(killed) + 4 if number else 4
        wait_until(lambda at=at: newest_step(killed) >= at, process, poll_s=0.001)
        assert kill(killed, rank)
    code, output = finish(process)
    assert code == 0, output
    records = read_log(killed / "events.jsonl")
    assert not select(records, Restarted)
    assert len(select(records, RunStarted)) == 1
    assert [record.step for record in select(records, CheckpointSaved)] == [num_steps], "nothing but the end was saved"
    steps = [record.step for record in select(records, StepFinished) if record.rank == 0]
    assert len(steps) == len(set(steps)), "no step was logged twice"
    before, after = losses_of(straight), losses_of(killed)
    assert after == {step: before[step] for step in after}
    assert tensors_of(killed, num_steps) == tensors_of(straight, num_steps), "bit for bit"
    changes = [record.event for record in select(records, WorkersChanged)]
    assert len(changes) == len(ranks)
    return changes


@pytest.mark.timeout(150)
def test_a_lost_tensor_rank_is_replaced_and_gets_its_part_from_its_replica(tmp_path, run_here):
    (change,) = check_killed(tmp_path, run_here, "tensor", [3])
    assert change.names == ["w0", "w1", "w2", "w3.2"]
    assert change.num_sent == 1
    assert change.repaired == "w3.2 was sent its part of the model by w0 and w1"
    assert change.lost.startswith("of w3 nothing but the work after step ")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", ["tensor", "sharded", "optimizer", "pipeline"])
def test_one_rank_after_the_other_is_lost(tmp_path, run_here, layout):
    changes = check_killed(tmp_path, run_here, layout, [1, 0, 2], num_steps=60)
    assert changes[-1].names == ["w0.2", "w1.2", "w2.2", "w3"]
    assert all("by" in change.repaired for change in changes)
