"""A worker's connection to the supervisor that decides who trains together."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from paceline.comm.group import Group
from paceline.comm.join import Transport
from paceline.errors import PacelineError


class Evicted(PacelineError):
    """This worker belongs to the training no longer, and is to end."""


@dataclass(frozen=True)
class View:
    """One epoch of membership, as a worker sees it."""

    epoch: int
    rank: int
    """Rank of this worker. Rank 0 has the most advanced whole state, which it sends to those who need it."""
    size: int
    names: tuple[str, ...]
    """Stable name of each worker, by rank."""
    previous: tuple[int | None, ...]
    """Rank of each worker in the epoch before, by rank; None for a new worker, which has no state."""
    step: int
    """Number of updates in the state of rank 0."""
    reason: str
    """Words on the change: who was lost, or joined."""


class Member(ABC):
    """A worker's connection to its supervisor."""

    @abstractmethod
    def report_loss(self, step: int, *, is_whole: bool, reason: str) -> None:
        """Vote that peers are lost; this worker's state is that after `step` updates, whole or half changed."""

    @abstractmethod
    def next_view(self, timeout_s: float) -> View:
        """Wait for the next epoch.

        Raises:
            CommunicationError: There will be none: all are to start again.
            Evicted: This worker is not in it.
        """

    @abstractmethod
    def change_is_pending(self) -> bool:
        """Return whether a worker joins or leaves; called in every step, without I/O."""

    @abstractmethod
    def at_boundary(self, step: int) -> None:
        """Report that all workers have stopped together after `step` updates, because of a pending change."""

    @abstractmethod
    def open_group(self, view: View, device: torch.device, timeout_s: float, transport: Transport) -> Group:
        """Return the group of a view; every worker in it calls this.

        Raises:
            CommunicationError: Another worker of the view did not come.
        """
