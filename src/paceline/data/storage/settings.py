"""Settings of stores that are far away."""

from pathlib import Path

from pydantic import Field

from paceline.registry import Settings


class StoreSettings(Settings):
    """Time limits and caches of a store that an URL names; folders of this machine need none."""

    timeout_s: float = Field(20.0, gt=0)
    """Longest silence of the store before a request is sent again."""
    patience_s: float = Field(120.0, gt=0)
    """Longest time to send a request again and again before it is an error."""
    num_parallel: int = Field(16, ge=1)
    """Number of blocks that are fetched at once."""
    memory_bytes: int = Field(256 * 2**20, ge=8 * 2**20)
    """Memory of each process for blocks, half of it for those that are fetched ahead."""
    disk_bytes: int = Field(16 * 2**30, ge=0)
    """Size of the cache on this machine's disk, all runs together; 0 for none."""
    disk_folder: Path | None = None
    """Folder of that cache; by default ``paceline/blocks`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    hands_on: bool = True
    """Whether the workers of a run hand blocks to each other, so that each is fetched from the store once."""
