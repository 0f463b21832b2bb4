"""Which workers may go on and which wait: the clocks of workers, without threads or time.

A clock counts the steps that a worker has reported. Workers may join and leave at any moment; no worker waits for one
that has left or died.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection


class Clocks(ABC):
    """The clocks of the workers that take part.

    Attributes:
        clocks: Number of steps that each worker has reported.
    """

    def __init__(self) -> None:
        self.clocks: dict[int, int] = {}
        self._furthest = 0
        """Highest clock so far."""

    def join(self, worker: int, clock: int = 0) -> int:
        """Add a worker, and return its clock: not behind the others, so that no worker waits for its past.

        Args:
            worker: Number of the worker, which must not take part yet.
            clock: Former clock of the worker.
        """
        assert worker not in self.clocks
        slowest = min(self.clocks.values(), default=self._furthest)
        self.clocks[worker] = max(clock, slowest)
        self._furthest = max(self._furthest, self.clocks[worker])
        return self.clocks[worker]

    def leave(self, worker: int) -> None:
        """Remove a worker, if it takes part."""
        self.clocks.pop(worker, None)

    def tick(self, worker: int) -> None:
        """Record that a worker has reported a step."""
        self.clocks[worker] += 1
        self._furthest = max(self._furthest, self.clocks[worker])

    @abstractmethod
    def may_read(self, worker: int) -> bool:
        """Whether a worker, which has reported its step, may have the parameters for its next one now."""

    def read(self, worker: int) -> None:
        """Record that a worker has the parameters for its next step."""


class FreeClocks(Clocks):
    """Clocks without waiting."""

    def may_read(self, worker: int) -> bool:
        """Always true."""
        return True


class BoundedClocks(Clocks):
    """Stale-synchronous parallel (Ho et al. 2013): a read at clock c sees all updates up to c - staleness - 1.

    So no worker that reads is more than `staleness` steps ahead of any other. With staleness 0 all are at the
    same step.

    Args:
        staleness: Largest lead in steps, at least 0.
    """

    def __init__(self, staleness: int) -> None:
        super().__init__()
        self.staleness = staleness

    def may_read(self, worker: int) -> bool:
        """Whether the parameters include all updates that the worker must see."""
        return min(self.clocks.values()) >= self.clocks[worker] - self.staleness

    @property
    def slowest(self) -> int:
        """Lowest clock of the workers that take part; steps below it are complete."""
        return min(self.clocks.values(), default=self._furthest)


class StepClocks(Clocks):
    """All workers take the same step; a late worker gets the next one.

    Attributes:
        step: Number of finished steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def is_late(self, worker: int) -> bool:
        """Whether the worker's step finished without it."""
        return self.clocks[worker] < self.step

    def may_read(self, worker: int) -> bool:
        """Whether the worker's step is finished; after reading the worker is at the step under way."""
        return self.is_late(worker)

    def read(self, worker: int) -> None:
        """Record that a worker has the parameters of the step under way."""
        self.clocks[worker] = self.step

    @property
    @abstractmethod
    def arrived(self) -> Collection[int]:
        """Workers that have reported an unfinished step."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the step under way can finish."""

    @abstractmethod
    def advance(self) -> frozenset[int]:
        """Begin the next step, and return the workers whose gradients the finished one uses."""


class Quorum(StepClocks):
    """A step finishes when enough workers have reported it (backup workers: Chen et al. 2016).

    Args:
        num_backups: Number of workers that a step need not wait for.
    """

    def __init__(self, num_backups: int = 0) -> None:
        super().__init__()
        self.num_backups = num_backups
        self._arrived: set[int] = set()

    @property
    def arrived(self) -> Collection[int]:
        """Workers that have reported the step under way, including those that have left since."""
        return self._arrived

    def join(self, worker: int, clock: int = 0) -> int:
        """Add a worker, from the step under way on."""
        assert worker not in self.clocks
        self.step = max(self.step, clock)
        self.clocks[worker] = self.step
        return self.step

    def tick(self, worker: int) -> None:
        """Record that a worker has reported its step; if that finished without it, nothing changes."""
        if not self.is_late(worker):
            self._arrived.add(worker)

    @property
    def is_complete(self) -> bool:
        """Whether all but `num_backups` of the workers that take part, or have reported, have reported the step."""
        num_workers = len(self.clocks.keys() | self._arrived)
        return bool(self._arrived) and len(self._arrived) >= num_workers - self.num_backups

    def advance(self) -> frozenset[int]:
        """Begin the next step; all workers that have reported this one count."""
        assert self.is_complete
        taken = frozenset(self._arrived)
        self.step += 1
        self._arrived.clear()
        return taken


class FollowedQuorum(StepClocks):
    """Another server's quorum, so that all servers use the gradients of the same workers.

    Its announcements may arrive here after a worker's next report: so clocks run ahead of `step`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reported: dict[int, int] = {}
        """Clock of each worker that has reported an unfinished step."""
        self._announcements: deque[tuple[int, frozenset[int]]] = deque()

    @property
    def arrived(self) -> Collection[int]:
        """Workers that have reported an unfinished step, including those that have left since."""
        return self._reported

    def join(self, worker: int, clock: int = 0) -> int:
        """Add a worker, from the step that the other server has given it, or from a later one."""
        assert worker not in self.clocks
        self.clocks[worker] = max(clock, self.step)
        return self.clocks[worker]

    def tick(self, worker: int) -> None:
        """Record that a worker has reported its step, unless it is late."""
        if not self.is_late(worker):
            self._reported[worker] = self.clocks[worker]

    def follow(self, step: int, workers: Collection[int]) -> None:
        """Record the workers that count in a step, which is later than all before."""
        self._announcements.append((step, frozenset(workers)))

    @property
    def is_complete(self) -> bool:
        """Whether all workers that count have reported the next announced step, or have left."""
        if not self._announcements:
            return False
        step, workers = self._announcements[0]
        return not any(
            self._reported.get(worker) != step and self.clocks.get(worker, step + 1) <= step for worker in workers
        )

    def advance(self) -> frozenset[int]:
        """Begin the step after the next announced one; a worker that reported it and does not count is late."""
        assert self.is_complete
        step, workers = self._announcements.popleft()
        self.step = step + 1
        taken = frozenset(worker for worker in workers if self._reported.get(worker) == step)
        self._reported = {worker: clock for worker, clock in self._reported.items() if clock > step}
        return taken
