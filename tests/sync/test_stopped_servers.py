"""A server that has stopped stays as it is, whoever leaves it then."""

import pytest
import torch
from serving import ByHand

from paceline.errors import CommunicationError
from paceline.sync import ParameterServer
from paceline.sync.parameter_server.state import unpack_state


def test_a_held_server_applies_nothing_when_its_own_worker_leaves():
    """The first worker's goodbye lowers the quorum to the two pushes that had arrived."""
    by_hand = ByHand(ParameterServer(num_backups=1), num_workers=4)
    waits = [by_hand.push(worker, [1.0, 1.0]) for worker in (1, 2)]
    held, before = unpack_state(by_hand.server.hold())[1], by_hand.x.clone()
    by_hand.server.drop_caller(0, None)
    assert by_hand.shard.version == held["version"] == 0
    assert torch.equal(by_hand.x, before)
    for wait in waits:
        with pytest.raises(CommunicationError, match="workers change"):
            wait()
