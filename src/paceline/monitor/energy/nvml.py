"""Energy of NVIDIA GPUs, from NVML, the library that comes with their driver."""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

_NOT_SUPPORTED = 3
_SAMPLE_S = 0.1
"""Time between two samples of the power of a GPU that does not count its energy."""


class NvmlError(Exception):
    """NVML answered with an error, or is not there."""


class Nvml:
    """The functions of NVML that a meter needs.

    Args:
        library: Library as ctypes has loaded it; by default the driver's.

    Raises:
        NvmlError: There is no such library, or no driver.
    """

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = library if library is not None else ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise NvmlError(str(error)) from error
        self._call("nvmlInit_v2")

    def open_device(self, uuid: str) -> ctypes.c_void_p:
        """Return the handle of the GPU with that UUID; it must begin with GPU- or MIG-."""
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return handle

    def read_energy_mj(self, handle: ctypes.c_void_p) -> int | None:
        """Return the energy in millijoules since the driver was loaded; None if the GPU does not count it."""
        value = ctypes.c_ulonglong()
        code = self._call(
            "nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(value), accepts=(0, _NOT_SUPPORTED)
        )
        return None if code else value.value

    def read_power_mw(self, handle: ctypes.c_void_p) -> int:
        """Return the present power in milliwatts."""
        value = ctypes.c_uint()
        self._call("nvmlDeviceGetPowerUsage", handle, ctypes.byref(value))
        return value.value

    def _call(self, name: str, *arguments: Any, accepts: tuple[int, ...] = (0,)) -> int:
        code = int(getattr(self._library, name)(*arguments))
        if code not in accepts:
            raise NvmlError(f"{name} must return 0, but got {code}")
        return code


class NvmlMeter:
    """Energy of one GPU: its own counter, or the integral of its power where it has none (before Volta).

    Args:
        nvml: The library.
        uuid: UUID of the GPU.
        clock: Monotonic clock.

    Raises:
        NvmlError: The GPU is not there, or tells nothing.
    """

    part = "gpu"

    def __init__(self, nvml: Nvml, uuid: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._handle, self._clock = nvml, nvml.open_device(uuid), clock
        self._lock = threading.Lock()
        self._total_j = 0.0
        self._is_lost = False
        self._last_mj = nvml.read_energy_mj(self._handle)
        self._last_s = clock()
        self._last_w = 0.0 if self._last_mj is not None else nvml.read_power_mw(self._handle) / 1e3

    @property
    def source(self) -> str:
        """Origin of the numbers, in words."""
        how = "counter" if self._last_mj is not None else "power, sampled"
        return f"measured by NVML ({how}{', which can be read no longer' if self._is_lost else ''})"

    @property
    def interval_s(self) -> float | None:
        """Time between two samples of power; None for a counter."""
        return None if self._last_mj is not None else _SAMPLE_S

    def read_j(self) -> float:
        """Return the energy since the meter was made."""
        with self._lock:
            try:
                self._total_j += self._read_power_j() if self._last_mj is None else self._read_counter_j(self._last_mj)
                self._is_lost = False
            except NvmlError:
                self._is_lost = True
            return self._total_j

    def _read_counter_j(self, last_mj: int) -> float:
        now_mj = self._nvml.read_energy_mj(self._handle)
        if now_mj is None:
            raise NvmlError("the counter is gone")
        self._last_mj = now_mj
        used_mj = now_mj - last_mj if now_mj >= last_mj else now_mj  # less than before: the driver was loaded again
        return used_mj / 1e3

    def _read_power_j(self) -> float:
        now_w, now_s = self._nvml.read_power_mw(self._handle) / 1e3, self._clock()
        used_j = (now_w + self._last_w) / 2 * (now_s - self._last_s)
        self._last_w, self._last_s = now_w, now_s
        return used_j
