"""How workers that do not sum their gradients at every step learn of each other's masses, losses and wishes to stop."""

from torch import Tensor

from paceline.comm.group import Group
from paceline.replica.control import Control, Verdict
from paceline.sync.synchroniser import Synchroniser

_VOTE_STEPS = 10


class Meetings:
    """The meetings that a synchroniser calls, and votes on stopping between them.

    A vote is told in every tenth step and counted ten steps later, when it has long arrived: nobody waits for it, and
    all stop after the same step.

    Args:
        group: All workers.
        synchroniser: Says when they meet.
    """

    def __init__(self, group: Group, synchroniser: Synchroniser) -> None:
        self._group = group
        self._synchroniser = synchroniser
        self._meeting: Control | None = None
        self._vote: Control | None = None
        self.mass = 0.0
        """Of this worker's samples since the workers last met; to be cleared when they have."""

    def begin(self, number: int, weight: float, loss: Tensor, stop: bool) -> None:
        """Tell the others of step `number`, if they meet in it or vote."""
        self.mass += weight
        if self._synchroniser.meets(number):
            self._meeting = Control(self._group, weight, loss, stop, mass=self.mass)
        if number % _VOTE_STEPS == 0 and self._vote is None:
            self._vote = Control(self._group, 0.0, loss.new_zeros(()), stop)

    def end(self, number: int) -> tuple[Verdict | None, bool]:
        """Return what all said, if they met in step `number`, and whether all stop after it."""
        met, stop = None, False
        if self._meeting is not None:
            met, self._meeting = self._meeting.wait(), None
            stop = met.stop
        if self._vote is not None and number % _VOTE_STEPS == _VOTE_STEPS - 1:
            stop |= self._vote.wait().stop
            self._vote = None
        return met, stop
