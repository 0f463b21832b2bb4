"""By which weights global batches are divided, and from where in the global order on."""

import math
import threading
from collections.abc import Sequence
from typing import Any

from paceline.errors import SettingsError


class Shares:
    """One non-negative weight a worker; it may change at a position of the global order.

    A loader's background thread reads it while the training changes it.

    Args:
        weights: From the start on; evenly without them.
        num_workers: How many there are.

    Raises:
        SettingsError: See `check_shares`.
    """

    def __init__(self, weights: Sequence[float] | None, num_workers: int) -> None:
        self._num_workers = num_workers
        self._lock = threading.Lock()
        self._changes: list[tuple[int, list[float]]] = [(0, check_shares(weights, num_workers))]

    @property
    def newest(self) -> list[float]:
        """The weights that were given last, whether in force yet or not."""
        return self._changes[-1][1]

    def at(self, position: int) -> list[float]:
        """Return the weights of the global batch that begins at `position`."""
        with self._lock:
            return self._since(position)[0][1]

    def change(self, start: int, weights: Sequence[float], *, position: int) -> None:
        """Divide global batches from `start` on by other weights; nothing below `position` is asked for any more.

        Raises:
            SettingsError: See `check_shares`.
        """
        checked = check_shares(weights, self._num_workers)
        with self._lock:
            self._changes = [change for change in self._since(position) if change[0] < start] + [(start, checked)]

    def state(self, position: int) -> list[list[Any]]:
        """Return the weights in force at `position`, and those that follow, as JSON."""
        with self._lock:
            return [[start, weights] for start, weights in self._since(position)]

    def load(self, state: Sequence[Sequence[Any]]) -> bool:
        """Take on a saved state, if it is of as many workers; return whether it is."""
        if len(state[0][1]) != self._num_workers:
            return False
        with self._lock:
            self._changes = [(start, check_shares(weights, self._num_workers)) for start, weights in state]
            self._changes[0] = (0, self._changes[0][1])
        return True

    def _since(self, position: int) -> list[tuple[int, list[float]]]:
        number = max(number for number, (start, _) in enumerate(self._changes) if start <= position)
        return self._changes[number:]


def check_shares(shares: Sequence[float] | None, num_workers: int) -> list[float]:
    """Return the weights of all workers.

    Raises:
        SettingsError: There are too few or too many, one is negative or not finite, or all are 0.
    """
    weights = [1.0] * num_workers if shares is None else [float(weight) for weight in shares]
    if len(weights) != num_workers or not min(weights) >= 0 or not 0 < sum(weights) < math.inf:
        raise SettingsError(
            f"shares must be {num_workers} weights (one a worker), none negative and not all 0, but got {shares}"
        )
    return weights
