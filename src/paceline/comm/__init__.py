"""Layer 3: groups of workers and what they can do together."""

from paceline.comm.group import Group, Work
from paceline.comm.join import join
from paceline.comm.local_group import LocalGroup
from paceline.comm.torch_group import TorchGroup

__all__ = ["Group", "LocalGroup", "TorchGroup", "Work", "join"]
