"""What all workers must know of a step before its gradients have come: weight, loss, whether to stop.

Workers that do not sum gradients at every step learn it where their rule brings them together, and vote on
stopping in between.
"""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.sync.synchroniser import Synchroniser

_VOTE_STEPS = 10


@dataclass(frozen=True)
class Verdict:
    """The same on every worker."""

    weight: float
    """Mass of the global batch."""
    mass: float
    """Mass since the workers last met, where that is longer ago."""
    loss: float
    """Sum of the losses, each times its weight."""
    num_non_finite: int
    """Workers whose loss is not finite."""
    stop: bool
    """Whether somebody has asked to stop."""


class Control:
    """One step's control values on their way: sent ahead of the gradients, in float64."""

    def __init__(self, group: Group, weight: float, loss: Tensor, stop: bool, mass: float | None = None) -> None:
        self._values = torch.zeros(5, dtype=torch.float64, device=group.device)
        self._values[0] = weight
        self._values[1] = loss
        self._values[2] = ~torch.isfinite(loss)
        self._values[3] = float(stop)
        self._values[4] = weight if mass is None else mass
        self._work = group.all_reduce(self._values, name="control")
        self._lock = threading.Lock()  # codecs ask from their own thread
        self._verdict: Verdict | None = None

    def wait(self) -> Verdict:
        """Return what all workers said, once they have."""
        with self._lock:
            if self._verdict is None:
                self._work.wait()
                weight, loss, num_non_finite, num_stops, mass = self._values.tolist()
                self._verdict = Verdict(weight, mass, loss, int(num_non_finite), num_stops > 0)
            return self._verdict


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
