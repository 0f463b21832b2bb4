"""Ranks that gather different blocks, which no sample shows, are told so on every rank, before a time-out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.errors import MismatchError
from paceline.parallel import gather_watch
from paceline.testing.processes import check_exits, run_processes


class Block(nn.Linear):
    """Block that says in an attribute whether to go on."""

    is_done = False

    def forward(self, x: Tensor) -> Tensor:
        self.is_done = bool(x.sum() > 0)
        return super().forward(x)


class LeavesEarly(nn.Module):
    """Blocks of equal sizes, of which some samples use one and others all, as the sample of a test does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * 0 + x
            if block.is_done:
                break
        return x


def train(way: str) -> str:
    torch.set_num_threads(1)
    gather_watch._LOOK_S, gather_watch._STILL_S, gather_watch._TICK_S = 0.6, 2.0, 0.1
    try:
        with paceline.join(timeout_s=40.0) as group:
            model = paceline.parallelize(LeavesEarly(), paceline.Layout(sharded=2), sample=-torch.ones(1, 4))
            replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
            sign = -1 if group.rank and way == "other blocks" else 1
            outputs = [replica(sign * torch.ones(1, 4)) for _ in range(2)]
            if group.rank and way == "more blocks":
                with torch.no_grad():
                    replica(torch.ones(1, 4))
            replica.backward(paceline.Loss(sum(outputs[1:], outputs[0]).sum(), 1.0))
            replica.update()
    except MismatchError as error:
        return str(error)
    return ""


def run(way: str) -> list[Any]:
    results = run_processes(2, train, {"way": way}, timeout_s=50)
    check_exits(results)
    return [result.value for result in results]


def test_ranks_that_gather_different_blocks_are_told_which() -> None:
    one, other = run("other blocks")
    assert one == other
    begin = "ranks that share parameters must gather the same blocks, but exchange 2 is the gather of blocks."
    assert f"{begin}0 on rank 0 and the gather of blocks.1 on rank 1" in one
    assert "give parallelize a sample on which choices are found, since the one that it got does not show it" in one


@pytest.mark.slow
def test_a_rank_that_gathers_more_blocks_is_told_where_the_others_wait() -> None:
    one, other = run("more blocks")
    assert one == other
    assert "rank 0 waits in operation" in one
    assert "and rank 1 waits in exchange" in one
