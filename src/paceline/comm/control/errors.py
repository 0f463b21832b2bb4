"""Errors of control traffic: `CommunicationError` to Paceline, and what torch's own stores raise to torch."""

from torch.distributed import DistNetworkError, DistStoreError

from paceline.errors import CommunicationError


class ControlError(CommunicationError, DistNetworkError):
    """The control server cannot be reached, or a message is not one that the other end sent."""


class ControlTimeoutError(CommunicationError, DistStoreError):
    """Keys were not set in time."""


class EpochBrokenError(CommunicationError, DistStoreError):
    """A worker of the epoch of membership was lost, so that nobody need wait for what it would set."""


class EpochOverError(CommunicationError, DistStoreError):
    """A newer epoch of membership has begun: whoever still works in the old one is no longer a member."""
