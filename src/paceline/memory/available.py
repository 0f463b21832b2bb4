"""Memory available to a rank on this machine."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch

PROCESS_BYTES = 400 * 10**6
"""Memory of a worker's process before its first tensor: Python, torch and their libraries. Measured: 404 MB on CPUs."""
_GPU_RESERVE_BYTES = 1 << 30
"""Memory of a GPU for the CUDA context, NCCL and workspaces of kernels."""
_CGROUP = Path("/sys/fs/cgroup")
_FILES = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}
"""Files of a control group, and names of what files are read into, by the controllers of a line of ``cgroup``."""


def guess_device(num_processes: int) -> torch.device:
    """Return the kind of device that `num_processes` processes train on here, as `paceline.join` chooses it."""
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= num_processes
    return torch.device("cuda" if has_gpus else "cpu")


def available_bytes(device: torch.device, num_processes: int) -> int:
    """Return the bytes of tensors that each of `num_processes` processes here may have on `device`.

    Each process has its own GPU. CPU memory is divided among the processes: as much as is free for new processes
    (``MemAvailable``, and the limits of this process's control group and of those around it).
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) - _GPU_RESERVE_BYTES
    return max(0, min(_free_bytes(), find_limit().left) // num_processes - PROCESS_BYTES)


class MemoryLimit(NamedTuple):
    """A limit of a control group's memory."""

    left: int
    """Bytes that its processes may take yet; what files are read into counts, since the kernel gives that up."""
    bytes: int
    """The limit; `NO_LIMIT` where there is none."""


NO_LIMIT = 2**62


def find_limit(root: Path = _CGROUP, own: Path = Path("/proc/self/cgroup")) -> MemoryLimit:
    """Return the limit that leaves the least, of this process's control group and all around it.

    Args:
        root: Directory in which control groups are mounted, of version 2, or of version 1 in a directory ``memory``.
        own: File that names the groups of this process. Batch systems (Slurm) and systemd nest them; a container may
            see its own as the root, and then has no directory of that name.
    """
    limits = [MemoryLimit(NO_LIMIT, NO_LIMIT)]
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root / controllers
            group = top / path.lstrip("/")
            files = _FILES[controllers]
            limits += [_read_limit(folder, *files) for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return min(limits)


def _read_limit(folder: Path, limit: str, used: str, cached: Collection[str]) -> MemoryLimit:
    try:
        most = (folder / limit).read_text().strip()
        taken = int((folder / used).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return MemoryLimit(NO_LIMIT, NO_LIMIT)
    if not most.isdigit() or int(most) >= NO_LIMIT:
        return MemoryLimit(NO_LIMIT, NO_LIMIT)
    held = taken - sum(int(counts.get(name, 0)) for name in cached)
    return MemoryLimit(max(0, int(most) - max(0, held)), int(most))


def _free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return NO_LIMIT
