"""The end of an asynchronous replica whose workers are not all alive: the first one stands for those that live."""

from dataclasses import replace

from paceline.comm.local_group import LocalGroup
from paceline.replica.replica import Replica
from paceline.sync.synchroniser import HandedOver


def can_stand_alone(replica: Replica) -> bool:
    """Return whether a lost worker leaves others that can save: each goes at its own pace, with a whole model."""
    return replica.sync.is_asynchronous and replica.shard.mesh is None and replica.group.size > 1


def stand_alone(replica: Replica) -> HandedOver | None:
    """Let the first worker's replica stand for all that live, once the others have left; each of them calls it.

    From then on `capture` of the first one's waits for nobody. Its parameters are those of the servers, or the mean of
    the living workers'; the rest of its own state (optimizer, buffers, moving averages) stands for theirs.

    Returns:
        None on all but the first worker, which are to leave.

    Raises:
        CommunicationError: The first worker or a server is lost, so that nothing can be saved.
    """
    world = replica.shard.world
    alone = LocalGroup(device=world.device, epoch=world.epoch)
    alone.membership = world.membership
    found = replica.state.hand_over(alone)
    if found is not None:
        replica.group = alone
        replica.shard.stand_alone(alone)
        found = replace(found, lost_ranks=world.names_of(found.lost_ranks))
    return found
