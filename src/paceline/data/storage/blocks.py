"""Blocks of files, as caches know them, and the count of where they came from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blake3 import blake3

BLOCK_BYTES = 2**20

Digests = Callable[[str], Sequence[str] | None]
"""Function that returns the BLAKE3 digests of a file's blocks of `BLOCK_BYTES`; None if it knows none."""


@dataclass
class StoreCounters:
    """Counts of a cached storage since it was opened; bytes are those of whole blocks."""

    url: str
    read_bytes: int = 0
    """Bytes that were asked for."""
    num_blocks: int = 0
    """Number of blocks that were needed for them."""
    num_fetched: int = 0
    """Number of blocks that came from the store."""
    memory_bytes: int = 0
    """Bytes from memory, those that were fetched ahead included."""
    disk_bytes: int = 0
    peer_bytes: int = 0
    """Bytes from other workers."""
    store_bytes: int = 0
    """Bytes from the store itself."""
    handed_bytes: int = 0
    """Bytes given to other workers."""
    num_damaged: int = 0
    """Number of blocks that came with a wrong digest."""
    wait_s: float = 0.0
    """Time for which readers waited for the store or for other workers."""


class FileBlock(NamedTuple):
    """Part of a file."""

    path: str
    version: str
    start: int
    num_bytes: int
    digest: str | None
    """BLAKE3 digest that it must have; None if unknown."""
    key: str

    @property
    def is_lasting(self) -> bool:
        """Whether its key says which content it has, so that another run may use what this one keeps."""
        return bool(self.version or self.digest)


def find_tag(url: str) -> str:
    """Return the mark of the data at an URL: the beginning of its blocks' keys."""
    return blake3(url.encode()).hexdigest()[:8]


def cut(blocks: Mapping[int, bytes], first: int, start: int, num_bytes: int, size: int) -> bytes:
    """Return a range from its blocks."""
    stop = start + num_bytes
    parts = []
    for index in range(start // size, -(-stop // size)):
        begin = index * size
        parts.append(memoryview(blocks[first + index])[max(0, start - begin) : stop - begin])
    return b"".join(parts) if num_bytes else b""
