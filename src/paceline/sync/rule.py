"""What a synchronisation method is: four small answers.

*What* is exchanged, *when*, *with whom*, and *what is done on arrival*. The rules here all send gradients, at every
step; a `Replica` asks them how a buffer is exchanged (`exchange`) and landed (`land`). Everything exchanged is a
numerator whose mass travels beside it; `land` divides.
"""

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from paceline.comm.group import Group, Work
from paceline.registry import Family


@dataclass(frozen=True)
class Traffic:
    """What one exchange puts on the wire, for simulator and planner.

    Args:
        collective: The operation, by its usual name.
        num_bytes: Size of the buffer it runs on, in bytes.
        period: Steps from one exchange to the next.
    """

    collective: str
    num_bytes: int
    period: int


class Rule(Family):
    """Settings of a synchronisation method."""

    family = "sync"

    @property
    @abstractmethod
    def keeps_replicas_equal(self) -> bool:
        """Whether parameters are the same on all workers after every step, so that hashing them is a check."""

    @abstractmethod
    def exchange(self, numerators: Tensor, group: Group, *, name: str) -> Work:
        """Start the exchange of one flat buffer of `numerators`, in place."""

    @abstractmethod
    def land(self, numerators: Tensor, mass: float) -> None:
        """Make values of arrived `numerators` in place, `mass` being the sum of the workers' weights."""

    @abstractmethod
    def traffic(self, num_params: int, bytes_per_param: int = 4) -> Traffic:
        """Return what an exchange of a model of `num_params` puts on the wire."""
