"""Who may go on and who waits: the clocks of workers, without threads or time.

A clock counts the steps that a worker has told of. Workers may join and leave at any moment; those that have left, or
died, are waited for by nobody.
"""

from abc import ABC, abstractmethod


class Clocks(ABC):
    """The clocks of the workers that take part.

    Attributes:
        clocks: Steps that each has told of, by worker.
    """

    def __init__(self) -> None:
        self.clocks: dict[int, int] = {}
        self._furthest = 0
        """The highest clock that there ever was."""

    def join(self, worker: int, clock: int = 0) -> int:
        """Let a worker take part, and return its clock: not behind the others, so that nobody waits for its past.

        Args:
            worker: Whose number is not among those that take part.
            clock: The one it had.
        """
        assert worker not in self.clocks
        slowest = min(self.clocks.values(), default=self._furthest)
        self.clocks[worker] = max(clock, slowest)
        self._furthest = max(self._furthest, self.clocks[worker])
        return self.clocks[worker]

    def leave(self, worker: int) -> None:
        """Take a worker out, if it takes part."""
        self.clocks.pop(worker, None)

    def tick(self, worker: int) -> None:
        """Note that a worker has told of a step."""
        self.clocks[worker] += 1
        self._furthest = max(self._furthest, self.clocks[worker])

    @abstractmethod
    def may_read(self, worker: int) -> bool:
        """Whether a worker, which has told of its step, may have the parameters for its next one now."""

    def read(self, worker: int) -> None:
        """Note that a worker has the parameters for its next step."""


class FreeClocks(Clocks):
    """Nobody waits."""

    def may_read(self, worker: int) -> bool:
        """Always."""
        return True


class BoundedClocks(Clocks):
    """Stale-synchronous parallel (Ho et al. 2013): a read at clock c sees everybody's updates up to c - staleness - 1.

    So no worker that reads is more than `staleness` steps ahead of one that takes part. With staleness 0 all are at the
    same step.

    Args:
        staleness: At least 0.
    """

    def __init__(self, staleness: int) -> None:
        super().__init__()
        self.staleness = staleness

    def may_read(self, worker: int) -> bool:
        """Whether the updates of all others are in that it must see."""
        return min(self.clocks.values()) >= self.clocks[worker] - self.staleness

    @property
    def slowest(self) -> int:
        """The lowest clock of those that take part; steps below it are complete."""
        return min(self.clocks.values(), default=self._furthest)


class Quorum(Clocks):
    """All take the same step, which is done when enough have told of it (backup workers: Chen et al. 2016).

    Args:
        num_backups: How many of those that take part need not have come.
    """

    def __init__(self, num_backups: int = 0) -> None:
        super().__init__()
        self.num_backups = num_backups
        self.step = 0
        """Steps that are done."""
        self.arrived: set[int] = set()
        """Who has told of the step under way."""

    def join(self, worker: int, clock: int = 0) -> int:
        """Let a worker take part, from the step under way on."""
        assert worker not in self.clocks
        self.step = max(self.step, clock)
        self.clocks[worker] = self.step
        return self.step

    def leave(self, worker: int) -> None:
        """Take a worker out; what it told of the step under way still counts."""
        super().leave(worker)

    def tick(self, worker: int) -> None:
        """Note that a worker has told of its step; if that is done without it, it is late and nothing changes."""
        if not self.is_late(worker):
            self.arrived.add(worker)

    def is_late(self, worker: int) -> bool:
        """Whether the step that a worker is at was done without it."""
        return self.clocks[worker] < self.step

    @property
    def is_complete(self) -> bool:
        """Whether enough have told of the step under way: all but the backups, of those that take part or have told."""
        num_workers = len(self.clocks.keys() | self.arrived)
        return bool(self.arrived) and len(self.arrived) >= num_workers - self.num_backups

    def advance(self) -> None:
        """Begin the next step."""
        assert self.is_complete
        self.step += 1
        self.arrived.clear()

    def may_read(self, worker: int) -> bool:
        """Whether the step that a worker is at is done; after reading it is at the step under way."""
        return self.is_late(worker)

    def read(self, worker: int) -> None:
        """Note that a worker has the parameters of the step under way."""
        self.clocks[worker] = self.step
