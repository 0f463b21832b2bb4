"""Layer 3: groups of workers and what they can do together."""

from paceline.comm.group import Group, Work
from paceline.comm.host_group import HostGroup
from paceline.comm.join import join
from paceline.comm.local_group import LocalGroup
from paceline.comm.program_group import ProgramGroup
from paceline.comm.shared_memory import SharedMemoryGroup, SharedMemoryWarning
from paceline.comm.torch_group import TorchGroup

__all__ = [
    "Group",
    "HostGroup",
    "LocalGroup",
    "ProgramGroup",
    "SharedMemoryGroup",
    "SharedMemoryWarning",
    "TorchGroup",
    "Work",
    "join",
]
