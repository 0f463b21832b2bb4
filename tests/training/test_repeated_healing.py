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
        member, repeated = Leaving(), RepeatedHealing(group, 100)
        said = [repeated.react(ranks, step, member) for ranks, step in [([1], 5), ([2], 10), ([1], 15), ([1], 20)]]
        return member.has_left, said, repeated.react([1], 25, member)

    results = LocalGroup.run(3, work)
    assert [has_left for has_left, *_ in results] == [False, True, False]
    for _, said, again in results:
        assert said[:3] == ["", "", ""]
        assert said[3].startswith(f"rank 1 on host {socket.gethostname()} was healed 3 times within 1000 steps")
        assert again == "", "it is said once"


def test_what_is_long_ago_does_not_count():
    repeated = RepeatedHealing(LocalGroup(), 200)
    assert [repeated.note([0], step) for step in (0, 1999, 2000, 2001)] == [[], [], [], [0]]


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
