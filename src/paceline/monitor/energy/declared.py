"""Energy where nothing can be measured: declared power, times the time or the load."""

import time
from collections.abc import Callable


class DeclaredProcessor:
    """Share of a host's processor: idle power all the time, and power of a core while this process computes on one.

    Args:
        idle_w: Idle power of this worker's share of the host.
        core_w: Power of a core at work, beside that.
        about: Origin of the two, in words.
        clock: Monotonic clock.
        processor_clock: Time that all threads of this process have spent computing.
    """

    part = "cpu"
    interval_s = None

    def __init__(
        self,
        idle_w: float,
        core_w: float,
        about: str,
        clock: Callable[[], float] = time.monotonic,
        processor_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._idle_w, self._core_w, self._about = idle_w, core_w, about
        self._clock, self._processor_clock = clock, processor_clock
        self._began_s, self._began_processor_s = clock(), processor_clock()

    @property
    def source(self) -> str:
        """Origin of the numbers, in words."""
        power = f"{self._idle_w:.3g} W idle and {self._core_w:.3g} W for a core at work"
        return f"declared, not measured: {power} ({self._about})"

    def read_j(self) -> float:
        """Return the energy since the meter was made."""
        elapsed_s, computed_s = self._clock() - self._began_s, self._processor_clock() - self._began_processor_s
        return self._idle_w * elapsed_s + self._core_w * computed_s


class DeclaredPower:
    """Device at its full power all the time.

    Args:
        part: Part whose energy it is.
        power_w: Power of the device.
        about: Origin of the power, in words.
        clock: Monotonic clock.
    """

    interval_s = None

    def __init__(self, part: str, power_w: float, about: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.part, self._power_w, self._about, self._clock = part, power_w, about, clock
        self._began_s = clock()

    @property
    def source(self) -> str:
        """Origin of the numbers, in words."""
        return f"declared, not measured: {self._power_w:.4g} W all the time ({self._about})"

    def read_j(self) -> float:
        """Return the energy since the meter was made."""
        return self._power_w * (self._clock() - self._began_s)
