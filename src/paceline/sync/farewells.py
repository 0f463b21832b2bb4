"""The end of workers that go at their own pace, once one of them is lost: who is lost, and who has left by itself."""

import threading
import time
from collections.abc import Sequence

from paceline.errors import CommunicationError, PeerTimeoutError

_LONGEST_WAIT_S = 15.0
"""Time that the first worker gives the others to finish their step: launchers kill those that outlive a lost one."""


class Farewells:
    """Workers that are gone, as the first worker knows them.

    Args:
        num_workers: Number of workers, the first included.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_others = num_workers - 1
        self._changed = threading.Condition()
        self._left: set[int] = set()
        self._lost: list[int] = []
        self._first_hangs = False

    @property
    def is_complete(self) -> bool:
        """Whether no worker is lost."""
        return not self._lost

    def tell(self) -> float:
        """Return for a reply which worker was lost first, as `read_lost` takes it; 0 while none is."""
        return (self._lost[0] + 1.0) * (-1.0 if self._first_hangs else 1.0) if self._lost else 0.0

    def lose(self, rank: int, error: BaseException) -> bool:
        """Record that a worker is lost, by the error of its connection; False if it was gone before."""
        with self._changed:
            if rank in self._left or rank in self._lost:
                return False
            if not self._lost:
                self._first_hangs = isinstance(error, PeerTimeoutError) and bool(error.hung_ranks)
            self._lost.append(rank)
            self._changed.notify_all()
            return True

    def leave(self, rank: int) -> None:
        """Record that a worker has stopped, since another is lost."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def wait(self) -> list[int]:
        """Wait until all others are gone, and return the lost ranks, with those that did not stop in time."""
        deadline_s = time.monotonic() + _LONGEST_WAIT_S
        with self._changed:
            while len(self._left) + len(self._lost) < self._num_others:
                if not self._changed.wait(max(0.0, deadline_s - time.monotonic())):
                    break
            gone = self._left | set(self._lost)
            self._lost += [rank for rank in range(1, self._num_others + 1) if rank not in gone]
            return sorted(self._lost)


def read_lost(told: float, names: Sequence[int]) -> CommunicationError | None:
    """Return the error of a worker that is lost, from what the first one tells of it: it accuses one that hangs.

    Args:
        told: Number that `Farewells.tell` returned there.
        names: Number of each rank in errors.
    """
    if not told:
        return None
    name = names[int(abs(told)) - 1]
    if told > 0:
        return CommunicationError(f"rank {name} is lost, so that all others stop")
    error = PeerTimeoutError(f"rank {name} hangs, so that all others stop")
    error.hung_ranks = (name,)
    return error
