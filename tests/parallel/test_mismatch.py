"""Ranks of a layout that run different operations are told from lost ones, and by what each of them ran."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm import join
from paceline.errors import CommunicationError
from paceline.parallel.mesh import Mesh
from paceline.parallel.mismatch import explain_failure
from paceline.parallel.parallelize import parallelize
from paceline.testing.processes import run_processes
from paceline.topology.layout import Layout


def fail(way: str) -> tuple[str, str]:
    """Run operations of torch along an axis, and of Paceline, that others do not run; return the error."""
    group = join(timeout_s=4.0)
    mesh = Mesh(group, Layout(sharded=2).resolve(2))
    axis = mesh.process_group("sharded")
    ones = torch.ones(10)
    dist.all_reduce(ones, group=axis)
    other: Any = {
        "another": lambda: dist.broadcast(ones, group_src=0, group=axis),
        "elsewhere": lambda: group.all_reduce(ones, name="end of a step").wait(),
        "gone": lambda: os._exit(0),
    }[way]
    try:
        other() if group.rank else dist.all_reduce(ones, group=axis)
    except (RuntimeError, CommunicationError) as error:
        found = explain_failure(error, mesh, f"rank {group.rank} lost others")
        return type(found).__name__, str(found)
    return "", ""


def train_and_fail() -> str:
    """Fail on rank 1 between two steps of a loop of one's own; return what the other rank says."""
    torch.set_num_threads(1)
    try:
        with join() as group:
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
            model = parallelize(model, Layout(tensor=2), group=group, sample=torch.ones(1, 4))
            for _ in range(2):
                model(torch.ones(2, 4))
                if group.rank:
                    raise KeyError("coffee")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run(way: str) -> list[tuple[str, str]]:
    results = run_processes(2, fail, {"way": way}, timeout_s=40)
    return [result.value for result in results if result.value is not None]


def test_different_operations_along_an_axis_are_named_with_their_ranks() -> None:
    for kind, said in run("another"):
        assert kind == "MismatchError"
        assert "operation 2 along the axis sharded must be the same on every rank, but rank 0 runs all_reduce" in said
        assert "rank 1 runs broadcast of [[10]] Float" in said


def test_ranks_that_wait_for_each_other_in_different_groups_are_a_mismatch() -> None:
    found = run("elsewhere")
    assert len(found) == 2
    for kind, said in found:
        assert kind == "MismatchError"
        assert "rank 0 waits in all_reduce of [[10]] Float to [[10]] along the axis sharded" in said
        assert "rank 1 waits in operation 1 'end of a step' on rank 1" in said


def test_a_rank_that_is_gone_is_lost() -> None:
    ((kind, said),) = run("gone")
    assert kind == "CommunicationError"
    assert said.startswith("rank 0 lost others, in all_reduce of [[10]] Float")


def test_a_loop_of_ones_own_learns_what_another_rank_failed_with() -> None:
    first, last = run_processes(2, train_and_fail, timeout_s=50)
    assert last.value == "KeyError: 'coffee'"
    assert (
        first.value
        == "CommunicationError: rank 0 of 2 lost others of its layout: rank 1 failed with KeyError: 'coffee'"
    )
