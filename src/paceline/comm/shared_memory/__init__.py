"""Layer 3: a group of the workers of one host, which share memory."""

from paceline.comm.shared_memory.group import SharedMemoryGroup, SharedMemoryWarning
from paceline.comm.shared_memory.rendezvous import (
    SharedMemoryError,
    exchange_documents,
    find_obstacle,
    host_key,
    raise_together,
)

__all__ = [
    "SharedMemoryError",
    "SharedMemoryGroup",
    "SharedMemoryWarning",
    "exchange_documents",
    "find_obstacle",
    "host_key",
    "raise_together",
]
