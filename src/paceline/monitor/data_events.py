"""The typed events of a run's data."""

from paceline.monitor.event import Event, Float, Int, event


@event("store_read")
class StoreRead(Event):
    """Bytes that a worker has read from a store since it began, and where they came from; each worker writes its own.

    Bytes but for `read_bytes` are those of whole blocks of 1 MiB.
    """

    url: str
    read_bytes: Int
    """Bytes that were asked for."""
    num_blocks: Int
    """Number of blocks that were needed for them."""
    num_fetched: Int
    """Number of blocks that came from the store."""
    memory_bytes: Int
    """Bytes from memory, those that were fetched ahead included."""
    disk_bytes: Int
    """Bytes from the cache on disk."""
    peer_bytes: Int
    """Bytes from other workers."""
    store_bytes: Int
    """Bytes from the store itself."""
    handed_bytes: Int
    """Bytes given to other workers."""
    num_damaged: Int
    """Number of blocks that came with a wrong digest, and were fetched again."""
    wait_s: Float
    """Time for which reading waited for the store or for other workers."""
