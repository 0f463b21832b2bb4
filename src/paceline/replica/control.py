"""What all workers must know of a step before its gradients have come: mass, loss, whether to stop."""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.group import Group


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
