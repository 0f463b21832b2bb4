"""A rank of a layout without replicas is killed, and its host's memory lost: the run goes on from peers' memory."""

import shutil
import threading
import time

import pytest
from test_killed_runs import arguments_of_run, find_lines, kill, losses_of, newest_step, run_straight

from paceline.monitor.events import RunFinished, RunStarted, StateCopied
from paceline.monitor.reader import read_log, select

LAYOUT = {"layout.sharded": 3, "checkpoint_interval": 0, "hash_interval": 0}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_lost_part_is_restored_from_parity_and_training_goes_on_bit_for_bit(tmp_path, run_here):
    straight = run_straight(run_here, tmp_path / "straight", 40, **LAYOUT)
    memory, directory, lost = tmp_path / "memory", tmp_path / "killed", []
    memory.mkdir()

    def lose_a_rank():
        deadline_s = time.monotonic() + 100
        while newest_step(directory) < 23:
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.01)
        lost.append(kill(directory, 1))
        (folder,) = memory.iterdir()
        shutil.rmtree(folder / "rank-00001")

    killer = threading.Thread(target=lose_a_rank)
    killer.start()
    kept = {"peer_memory.interval": 10, "peer_memory.num_data": 2, "peer_memory.folder": memory}
    done = run_here(*arguments_of_run(directory, 40, 3, LAYOUT | kept))
    killer.join()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lost == [True]
    records = read_log(directory / "events.jsonl")
    first, second = select(records, RunStarted)
    assert first.event.start_step == 0
    assert second.event.start_step >= 20
    assert "memory/paceline-" in second.event.resumed_from
    assert select(records, RunFinished)
    assert len(find_lines(directory, "checkpoint_saved")) == 1, "there was nothing on disk to go on from"
    copies = select(records, StateCopied)
    assert copies[0].step == 10
    assert copies[1].event.memory_bytes == pytest.approx(3 * copies[1].event.part_bytes, rel=0.01)
    assert losses_of(directory) == straight[0]
    assert list(memory.iterdir()) == [], "the end frees it"
