"""Workers of layouts with replicas are killed: the others keep their processes, and nothing is read from disk.

Who is killed where, and what others have done by then, is a script; see `scripted_phases.py`.
"""

import json
import shutil
from pathlib import Path

import pytest
from test_killed_runs import SETTINGS, arguments_of_run, finish, losses_of, tensors_of

from forked_launcher import ForkedLauncher
from paceline.monitor.events import CheckpointSaved, Restarted, RunStarted, StepFinished, WorkersChanged
from paceline.monitor.reader import read_log, select

RECIPE = Path(__file__).with_name("scripted_phases.py")
LAYOUTS = {
    "tensor": (2, {"layout.tensor": 2}),
    "three tensor": (3, {"layout.tensor": 2}),
    "sharded": (4, {"layout.sharded": 2, "layout.data": 2}),
    "optimizer": (4, {"layout.sharded": 2, "layout.data": 2, "layout.zero_stage": 1}),
    "pipeline": (2, {"layout.pipeline": 2, "model.num_layers": 2}),
    "context": (2, {"layout.context": 2}),
    "expert": (4, {"layout.expert": 2, "layout.data": 2, "model.num_experts": 4}),
}
"""Workers, of one rank or two each, and settings: four ranks or six, in replicas of two."""
PHASES = ["forward", "backward", "reduce", "reduced", "vote", "voted", "update", "log"]
OTHER_PHASES = ["backward", "reduce", "voted", "log"]
"""Phases in which no other test here loses a rank."""
LACKS_PART_1 = [3, 4, "vote", [[1, "reduce"]], [[2, "vote"]]]
"""Rank 3 is lost when rank 1, which alone holds the same part, has no gradients yet, and rank 2 makes the update."""
LACKS_A_COPY = [3, 7, "reduced", [], [[0, "vote"], [1, "vote"], [2, "reduced"]]]
"""Rank 3 is lost when ranks 0 and 1 can make the update, and rank 2, which shares the model with it, cannot."""


def run_scripted(tmp_path, run_here, layout, lines, num_steps, **settings):
    """Run without faults and with those of the script; return the records of the latter, which must end alike."""
    num_workers, shape = LAYOUTS[layout]
    settings = {"checkpoint_interval": 0, "hash_interval": 0, "ema": 0.9, "clip_norm": 1.0} | shape | settings
    straight, killed, folder = (tmp_path / name for name in ("straight", "killed", "script"))
    done = run_here(*arguments_of_run(straight, num_steps, num_workers, SETTINGS | settings))
    assert done.returncode == 0, done.stdout + done.stderr
    folder.mkdir()
    (folder / "script.json").write_text(json.dumps(lines))
    arguments = arguments_of_run(killed, num_steps, num_workers, SETTINGS | settings)
    arguments[1] = f"{shutil.copy(RECIPE, folder)}:run"
    process = ForkedLauncher(arguments, tmp_path / "killed.txt")
    try:
        code, output = finish(process, 550)
    finally:
        process.kill()
    assert code == 0, output
    assert len(list(folder.glob("killed-*"))) == len(lines)
    records = read_log(killed / "events.jsonl")
    assert losses_of(killed) == losses_of(straight), "each step has its line, and the same loss"
    assert tensors_of(killed, num_steps) == tensors_of(straight, num_steps), "bit for bit"
    return records


def check_kept(records, num_steps):
    """Check that nothing was made or written again; return the changes of the workers."""
    assert not select(records, Restarted)
    assert len(select(records, RunStarted)) == 1
    assert [record.step for record in select(records, CheckpointSaved)] == [num_steps], "nothing but the end was saved"
    steps = [record.step for record in select(records, StepFinished)]
    assert steps == list(range(1, num_steps + 1)), "no step was logged twice"
    return select(records, WorkersChanged)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_lost_part_comes_from_a_replica_after_the_newest_update_of_which_all_parts_are_left(tmp_path, run_here):
    lines = [LACKS_PART_1, LACKS_A_COPY, [0, 10, "update", [], []]]
    back, forth, first = check_kept(run_scripted(tmp_path, run_here, "tensor", lines, 14), 14)
    assert (back.step, back.event.names) == (4, ["w0", "w1", "w2", "w3.2"])
    assert (back.event.num_sent, back.event.repaired) == (1, "w3.2 was sent its part of the model by w0 and w1")
    assert back.event.lost == "of w3 nothing but the work after step 4"
    assert (forth.step, forth.event.num_sent) == (8, 2)
    assert forth.event.repaired.startswith("w2 was sent its part of the model by w0; w3.3 was sent its part")
    assert (first.step, first.event.names) == (11, ["w0.2", "w1", "w2", "w3.3"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "phases"),
    [
        pytest.param("three tensor", OTHER_PHASES, id="other phases"),
        *(pytest.param(name, PHASES, marks=pytest.mark.campaign, id=name) for name in LAYOUTS),
    ],
)
def test_one_rank_after_the_other_is_lost_in_one_phase_after_the_other(tmp_path, run_here, layout, phases):
    ranks, num_steps = 2 * (LAYOUTS[layout][0] if "three" in layout else 2), 3 * len(phases) + 6
    lines = [[(5 * number + 1) % ranks, 3 * number + 3, phase, [], []] for number, phase in enumerate(phases)]
    changes = check_kept(run_scripted(tmp_path, run_here, layout, lines, num_steps), num_steps)
    assert len(changes) == len(phases)
    assert all("was sent its part" in change.event.repaired for change in changes)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_where_all_that_hold_a_part_are_lost_all_start_again_from_the_checkpoint(tmp_path, run_here):
    lines = [[1, 6, "forward", [], [[3, "forward"]]], [3, 6, "forward", [], [[1, "forward"]]]]
    records = run_scripted(tmp_path, run_here, "tensor", lines, 10, checkpoint_interval=4)
    (restarted,) = select(records, Restarted)
    assert "but none is for those of ranks [1, 3]" in restarted.event.reason
    assert [record.event.start_step for record in select(records, RunStarted)] == [0, 4]
    assert not select(records, WorkersChanged)
