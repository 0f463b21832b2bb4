"""Memory available to a rank on this machine."""

from pathlib import Path

import torch

PROCESS_BYTES = 400 * 10**6
"""Memory of a worker's process before its first tensor: Python, torch and their libraries. Measured: 404 MB on CPUs."""
_GPU_RESERVE_BYTES = 1 << 30
"""Memory of a GPU for the CUDA context, NCCL and workspaces of kernels."""
_CGROUP = Path("/sys/fs/cgroup")


def guess_device(num_processes: int) -> torch.device:
    """Return the kind of device that `num_processes` processes train on here, as `paceline.join` chooses it."""
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= num_processes
    return torch.device("cuda" if has_gpus else "cpu")


def available_bytes(device: torch.device, num_processes: int) -> int:
    """Return the bytes of tensors that each of `num_processes` processes here may have on `device`.

    Each process has its own GPU. CPU memory is divided among the processes: as much as is free for new processes
    (``MemAvailable``, and the limit of this process's control group).
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) - _GPU_RESERVE_BYTES
    return max(0, min(_free_bytes(), _limit_bytes()) // num_processes - PROCESS_BYTES)


def _free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 2**62


def _limit_bytes(root: Path = _CGROUP) -> int:
    """Return the memory left in the control group; a nested group may have less, which is ignored."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most = (root / limit).read_text().strip()
            if most != "max":
                return max(0, int(most) - int((root / used).read_text()))
        except (OSError, ValueError):
            continue
    return 2**62
