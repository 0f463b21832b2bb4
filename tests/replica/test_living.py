"""State in the memory of ranks of a layout: which step is left, and who sends what to whom."""

import pytest
import torch

from paceline.comm import LocalGroup
from paceline.errors import CommunicationError
from paceline.replica.gathering import Slice, trade
from paceline.replica.living import find_newest

PEERS = [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_the_most_advanced_step_of_which_each_part_is_left_counts():
    assert find_newest([[7], [7], [7], []], PEERS) == 7
    assert find_newest([[7, 8], [7, 8], [8], []], PEERS) == 8, "who does not know of others has both"
    assert find_newest([[7, 8], [7], [7, 8], []], PEERS) == 7, "rank 1 has not got its gradients, so nobody has stepped"


def test_a_part_that_is_left_nowhere_or_after_another_step_is_said():
    with pytest.raises(CommunicationError, match=r"none is for those of ranks \[1, 3\]"):
        find_newest([[7], [], [7], []], PEERS)
    with pytest.raises(CommunicationError, match="after the same update"):
        find_newest([[8], [7], [], []], PEERS)


def _trade(group):
    halves = [Slice("float32", [2], [4], 2 * place) for place in range(2)]
    mine = halves[group.rank % 2]
    held = {} if group.rank == 3 else {"weight": (mine, torch.full((2,), float(group.rank)))}
    return [(name, tensor.tolist(), source) for name, tensor, source in trade({"weight": mine}, held, group)]


def test_who_holds_its_slice_keeps_it_and_the_new_one_is_sent_its_own():
    results = LocalGroup.run(4, _trade)
    assert results == [[("weight", [float(rank)] * 2, rank)] for rank in range(3)] + [[("weight", [1.0] * 2, 1)]]


def _miss(group):
    wanted = Slice("float32", [2], [2])
    with pytest.raises(CommunicationError, match="none that is left does"):
        list(trade({"bias": wanted}, {}, group))
    return True


def test_a_slice_that_nobody_holds_is_missed_by_all():
    assert LocalGroup.run(2, _miss) == [True, True]
