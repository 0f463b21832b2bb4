"""State in the memory of ranks of a layout: which step is left, and who sends what to whom."""

import pytest
import torch
from torch import nn

from paceline.comm import LocalGroup
from paceline.errors import CommunicationError
from paceline.replica import Replica
from paceline.replica.buffer_copies import BufferCopies
from paceline.replica.gathering import Slice, trade
from paceline.replica.living import LostPartError, find_newest
from paceline.replica.state import keep_part

PEERS = [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_the_most_advanced_step_of_which_each_part_is_left_counts():
    assert find_newest([[7], [7], [7], []], PEERS) == 7
    assert find_newest([[7, 8], [7, 8], [8], []], PEERS) == 8, "who does not know of others has both"
    assert find_newest([[7, 8], [7], [7, 8], []], PEERS) == 7, "rank 1 has not got its gradients, so nobody has stepped"


def test_a_part_that_is_left_nowhere_or_after_another_step_is_said():
    with pytest.raises(LostPartError, match=r"none is for those of ranks \[1, 3\]"):
        find_newest([[7], [], [7], []], PEERS)
    with pytest.raises(LostPartError, match="after the same update"):
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


class Cut(LocalGroup):
    """A rank that others do not answer, once they are to."""

    is_cut = False

    def barrier(self, *, name="barrier"):
        if self.is_cut:
            raise CommunicationError("the cable was pulled")


def test_who_does_not_hear_of_others_makes_the_update_and_has_the_state_before_it_too():
    group, kept, torch_seed = Cut(), [], torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    replica = Replica(module, torch.optim.Adam(module.parameters(), 0.1), group=group, ema=0.9, hash_interval=0)
    replica.state.buffers = BufferCopies(module)

    def keep(*, is_copied=False):
        document = {"losses": losses}
        return keep_part(replica, replica.num_updates, document, {}, is_copied=is_copied)

    def step():
        replica.backward(replica(torch.randn(5, 3, generator=torch_seed)).square().sum(), weight=5.0)
        return replica.update().loss

    losses = []
    replica.state.on_undecided = lambda: kept.append(keep(is_copied=True))
    losses += [step(), step()]
    before = {name: tensor.clone() for name, (_, tensor) in keep().held.items()}
    group.is_cut = True
    with pytest.raises(CommunicationError, match="cable"):
        step()
    losses.append("the third")
    (part,) = kept
    assert (part.step, part.own["state"]["num_updates"], len(part.progress["losses"])) == (2, 2, 2)
    assert part.held.keys() == before.keys() == keep().held.keys()
    for name, (_, after) in keep().held.items():
        assert torch.equal(part.held[name][1], before[name]), name
        assert not torch.equal(after, before[name]), f"{name} must be that of the third update"
    number, result = replica.state.last_result
    assert (number, replica.num_updates, result.weight) == (3, 3, 5.0)
    replica.close()
