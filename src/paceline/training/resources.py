"""Memory and disk space of a host, watched while a run trains, so that a warning comes before they run out."""

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.memory.available import find_limit
from paceline.monitor.events import ResourceLow

_INTERVAL_S = 10.0
"""Time between two looks."""
_NUM_CHECKPOINTS = 2
"""Number of checkpoints for which there must be room: an older one goes only when a newer one is whole."""
_LEAST_DISK_BYTES = 256 * 2**20
_LEAST_MEMORY = 0.05
"""Share of the host's memory, or of its container's, that must be available."""
_ENOUGH = 1.5
"""Factor of what is needed at which there is enough again, so that a warning is not written again and again."""

_MIB = 2**20


class ResourceWatch:
    """Looks now and then whether memory and disk space are about to run out.

    Args:
        directory: Directory of the run; None where this rank writes no checkpoints.
        clock: Monotonic clock in seconds.
        read_memory: Function that returns the bytes of memory that are available, and all; see `read_memory`.
        read_disk: Function that returns the bytes that are free where a path is.
    """

    def __init__(
        self,
        directory: Path | None,
        clock: Callable[[], float] = time.monotonic,
        read_memory: "Callable[[], tuple[int, int] | None] | None" = None,
        read_disk: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        self._directory, self._clock = directory, clock
        self._read_memory, self._read_disk = read_memory or find_memory, read_disk
        self._next_s = 0.0
        self._is_low: dict[str, bool] = {}

    def look(self, checkpoint_bytes: int) -> list[ResourceLow]:
        """Return what has become scarce since the last look, if it is time for one.

        Args:
            checkpoint_bytes: Size of the newest checkpoint; 0 before the first.
        """
        if self._clock() < self._next_s:
            return []
        self._next_s = self._clock() + _INTERVAL_S
        return [*self._look_at_disk(checkpoint_bytes), *self._look_at_memory()]

    def _look_at_disk(self, checkpoint_bytes: int) -> Iterator[ResourceLow]:
        if self._directory is None:
            return
        needed = max(_NUM_CHECKPOINTS * checkpoint_bytes, _LEAST_DISK_BYTES)
        free = self._read_disk(self._directory)
        if self._becomes_low("disk", free, needed):
            why = (
                f"{_NUM_CHECKPOINTS} checkpoints of {checkpoint_bytes / _MIB:,.0f} MiB" if checkpoint_bytes else "a run"
            )
            yield self._describe(
                "disk",
                free,
                needed,
                f"{self._directory} has {free / _MIB:,.0f} MiB free, less than the "
                f"{needed / _MIB:,.0f} MiB for {why}; delete files, or keep fewer checkpoints (--keep_checkpoints)",
            )

    def _look_at_memory(self) -> Iterator[ResourceLow]:
        if (found := self._read_memory()) is None:
            return
        available, total = found
        needed = int(_LEAST_MEMORY * total)
        if self._becomes_low("memory", available, needed):
            yield self._describe(
                "memory",
                available,
                needed,
                f"{available / _MIB:,.0f} MiB of {total / _MIB:,.0f} MiB of memory are "
                "available; lower the batch, recompute activations (--memory.recompute), or start fewer workers here",
            )

    def _becomes_low(self, resource: str, available: int, needed: int) -> bool:
        was_low = self._is_low.get(resource, False)
        self._is_low[resource] = available < (needed * _ENOUGH if was_low else needed)
        return self._is_low[resource] and not was_low

    @staticmethod
    def _describe(resource: str, available: int, needed: int, message: str) -> ResourceLow:
        return ResourceLow(
            host=socket.gethostname(),
            resource=resource,
            available_bytes=available,
            needed_bytes=needed,
            message=message,
        )


def find_memory() -> tuple[int, int] | None:
    """Return the bytes of memory that are available, and all: of the container if it is limited, else of the host."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available, total = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError):
        return None
    limit = find_limit()
    return min(available, limit.left), min(total, limit.bytes)
