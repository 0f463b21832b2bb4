"""Energy counters of processors and memory (Intel and AMD RAPL) through the kernel's powercap files."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
_MOST_W = 2000.0
"""Power of one domain that no host exceeds: a counter is read four times while that would let it wrap around."""
_NAME = "intel-rapl:*"
"""Name of a domain's folder; AMD's processors have the same."""


@dataclass
class _Domain:
    """One counter, which begins again at 0 when it is full."""

    file: Path
    range_uj: int
    last_uj: int

    def read_uj(self) -> int:
        """Return the energy since the last read.

        Raises:
            OSError: The file can be read no longer.
        """
        now_uj = int(self.file.read_text())
        used_uj = now_uj - self.last_uj
        self.last_uj = now_uj
        return used_uj if used_uj >= 0 else used_uj + self.range_uj


class RaplMeter:
    """Sum of the counters of one kind of all sockets of a host.

    Args:
        part: Part whose energy it is.
        domains: Folders of the counters.

    Raises:
        OSError: A counter cannot be read.
        ValueError: A counter holds no number.
    """

    def __init__(self, part: str, domains: Sequence[Path]) -> None:
        self.part = part
        self._domains = [
            _Domain(
                folder / "energy_uj",
                int((folder / "max_energy_range_uj").read_text()),
                int((folder / "energy_uj").read_text()),
            )
            for folder in domains
        ]
        self._total_uj = 0
        self._lock = threading.Lock()
        self._num_lost = 0

    @property
    def source(self) -> str:
        """Origin of the numbers, in words."""
        lost = f", of which {self._num_lost} could be read no longer" if self._num_lost else ""
        plural = "" if len(self._domains) == 1 else "s"
        return f"measured by {len(self._domains)} RAPL counter{plural} of the whole host{lost}"

    @property
    def interval_s(self) -> float | None:
        """Time in which no counter wraps around twice."""
        return min(domain.range_uj for domain in self._domains) / 1e6 / _MOST_W / 4

    def read_j(self) -> float:
        """Return the energy since the meter was made."""
        with self._lock:
            self._num_lost = 0
            for domain in self._domains:
                try:
                    self._total_uj += domain.read_uj()
                except (OSError, ValueError):
                    self._num_lost += 1
            return self._total_uj / 1e6


def find_rapl(root: Path = POWERCAP) -> list[RaplMeter]:
    """Return meters of processors and of memory, as far as their counters can be read.

    A package's counter holds what its cores and its graphics use, so these are left out; the memory's is apart. Where
    one socket's counter cannot be read, the part has no meter: half a host is no host.
    """
    by_part: dict[str, list[Path]] = {"cpu": [], "memory": []}
    for folder in sorted(root.glob(_NAME)):
        try:
            name = (folder / "name").read_text().strip()
        except OSError:
            continue
        part = "cpu" if name.startswith("package") else "memory" if name == "dram" else None
        if part is not None:
            by_part[part].append(folder)
    meters = []
    for part, folders in by_part.items():
        try:
            meters += [RaplMeter(part, folders)] if folders else []
        except (OSError, ValueError):  # only root may read them on most hosts
            continue
    return meters
