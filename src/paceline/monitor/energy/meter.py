"""What a meter is, and the thread that reads those which must be read often."""

import threading
from collections.abc import Sequence
from typing import Protocol


class Meter(Protocol):
    """Energy of one part of a host, such as a GPU."""

    @property
    def part(self) -> str:
        """Part whose energy it is: gpu, cpu or memory."""

    @property
    def source(self) -> str:
        """Origin of the numbers, in words."""

    @property
    def interval_s(self) -> float | None:
        """Longest time between two reads for which the energy is right; None for any."""

    def read_j(self) -> float:
        """Return the energy since the meter was made."""


class MeterThread:
    """Thread that reads meters as often as they need, while nobody else does; none where no meter needs it.

    Args:
        meters: Meters of this process.
    """

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._meters = [meter for meter in meters if meter.interval_s is not None]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if self._meters:
            self._thread = threading.Thread(target=self._run, name="energy meters", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        interval_s = min(meter.interval_s for meter in self._meters if meter.interval_s is not None)
        while not self._stop.wait(interval_s):
            for meter in self._meters:
                meter.read_j()
