"""A worker that is healed again and again leaves, or the run ends with its rank and host."""

import socket

import pytest
import torch
from test_loop import make_run, train_here

from paceline.comm import LocalGroup
from paceline.errors import DivergenceError
from paceline.monitor.events import ReplicasHealed
from paceline.monitor.reader import read_log, select
from paceline.training import Callback
from paceline.training.repeated_healing import RepeatedHealing


class Leaving:
    can_leave = True
    has_left = False

    def leave(self):
        self.has_left = True


def test_the_worker_that_errs_again_and_again_leaves_and_others_stay():
    def work(group):
        member, repeated = Leaving(), RepeatedHealing()
        healed = [([1], 5), ([2], 10), ([1], 15), ([1], 20), ([1], 25)]
        return member, [repeated.react(ranks, step, group, 100, member) for ranks, step in healed]

    results = LocalGroup.run(3, work)
    assert [member.has_left for member, _ in results] == [False, True, False]
    words = f"rank 1 on host {socket.gethostname()} was healed 3 times within 1000 steps, up to step 20"
    for _, said in results:
        assert said[:3] == ["", "", ""]
        assert said[3].startswith(words)
        assert said[4] == "", "it is said once"


def test_healings_count_while_workers_come_and_go():
    counts = [RepeatedHealing() for _ in range(3)]

    def heal(workers, rank, step):
        def work(group):
            member = Leaving()
            words = counts[workers[group.rank]].react([rank], step, group, 100, member)
            return member.has_left, words

        return LocalGroup.run(len(workers), work)

    for workers, rank in (([0, 1, 2], 2), ([2, 1], 0)):  # the same worker under another number
        assert not any(words for _, words in heal(workers, rank, step=5))
    counts[1] = RepeatedHealing()  # a replacement, which knows of nothing
    results = heal([1, 2], 1, step=30)
    assert [has_left for has_left, _ in results] == [False, True]
    assert all("rank 1 on host" in words for _, words in results)


def test_what_is_long_ago_does_not_count():
    repeated = RepeatedHealing()
    assert [repeated.note(step, 200) for step in (0, 1999, 2000, 2001)] == [False, False, False, True]


def test_a_run_whose_workers_stay_the_same_ends_with_rank_and_host(tmp_path):
    run = make_run(on_divergence="heal", callbacks=(Callback(path=spoil, all_workers=True),), num_steps=20)
    with pytest.raises(DivergenceError, match=r"again and again, but rank 1 on host \S+ was healed 3 times"):
        train_here(run, tmp_path, 3)
    assert [one.event.ranks for one in select(read_log(tmp_path / "events.jsonl"), ReplicasHealed)] == [[1]] * 3


def spoil(event, training):
    """Let rank 1's parameters be others after each step."""
    if training.rank == 1 and type(event).__name__ == "StepFinished":
        with torch.no_grad():
            next(training.module.parameters()).add_(0.5)
