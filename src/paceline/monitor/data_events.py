"""The typed events of a run's data."""

from paceline.monitor.event import Event, Float, Int, event


@event("data_read")
class DataRead(Event):
    """Times of reading data since the last such event, on the worker that wrote the event.

    Times of stages are summed over the threads or processes that read, and pass while the model computes.
    """

    fetch_s: Float
    """Time to fetch bytes, where that is a stage of its own."""
    decode_s: Float
    """Time to make samples of them."""
    augment_s: Float
    collate_s: Float
    """Time to make batches of samples, and to begin copying them to a GPU."""
    waited_s: Float
    """Time that the training waited for data: the data stall."""
    used_s: Float
    """Time that the training had data, from getting a step's to asking for the next."""
    slowest: str
    """Stage that limits reading."""
    num_steps: Int
    """Number of steps whose data was read."""
    num_samples: Int
    num_bytes: Int
    """Size of their tensors."""
    num_readers: Int
    """Number of threads or processes that decode."""
    reader: str
    """Kind of what reads: thread or process."""


@event("readers_chosen")
class ReadersChosen(Event):
    """Threads or processes were chosen to read, by measurement, on the worker that wrote the event."""

    num_readers: Int
    reader: str
    """Kind of what reads: thread or process."""
    reason: str
    """Numbers that they were chosen by, in words."""


@event("data_grown")
class DataGrown(Event):
    """Shards that have appeared are in the epochs from a position on."""

    num_samples: Int
    """Number of samples of such an epoch."""
    num_shards: Int
    """Number of shards, with those from before."""
    start: Int
    """Number of samples used since the start of training at which the first such epoch begins."""


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
