"""Who may go on and who waits: the clocks of workers, without threads or time.

A clock counts the steps that a worker has told of. Workers may join and leave at any moment; those that have left, or
died, are waited for by nobody.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection


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


class StepClocks(Clocks):
    """All take the same step; who comes too late for it is given the next one.

    Attributes:
        step: Steps that are done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def is_late(self, worker: int) -> bool:
        """Whether the step that a worker is at was done without it."""
        return self.clocks[worker] < self.step

    def may_read(self, worker: int) -> bool:
        """Whether the step that a worker is at is done; after reading it is at the step under way."""
        return self.is_late(worker)

    def read(self, worker: int) -> None:
        """Note that a worker has the parameters of the step under way."""
        self.clocks[worker] = self.step

    @property
    @abstractmethod
    def arrived(self) -> Collection[int]:
        """Who has told of a step that is not done."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the step under way can be done."""

    @abstractmethod
    def advance(self) -> frozenset[int]:
        """Begin the next step, and return whose gradients the one that is done takes."""


class Quorum(StepClocks):
    """A step is done when enough have told of it (backup workers: Chen et al. 2016).

    Args:
        num_backups: How many of those that take part need not have come.
    """

    def __init__(self, num_backups: int = 0) -> None:
        super().__init__()
        self.num_backups = num_backups
        self._arrived: set[int] = set()

    @property
    def arrived(self) -> Collection[int]:
        """Who has told of the step under way; of those that have left since, it still counts."""
        return self._arrived

    def join(self, worker: int, clock: int = 0) -> int:
        """Let a worker take part, from the step under way on."""
        assert worker not in self.clocks
        self.step = max(self.step, clock)
        self.clocks[worker] = self.step
        return self.step

    def tick(self, worker: int) -> None:
        """Note that a worker has told of its step; if that is done without it, it is late and nothing changes."""
        if not self.is_late(worker):
            self._arrived.add(worker)

    @property
    def is_complete(self) -> bool:
        """Whether enough have told of the step under way: all but the backups, of those that take part or have told."""
        num_workers = len(self.clocks.keys() | self._arrived)
        return bool(self._arrived) and len(self._arrived) >= num_workers - self.num_backups

    def advance(self) -> frozenset[int]:
        """Begin the next step; all that have told of this one count."""
        assert self.is_complete
        taken = frozenset(self._arrived)
        self.step += 1
        self._arrived.clear()
        return taken


class FollowedQuorum(StepClocks):
    """Another server's quorum, so that all servers take the gradients of the same workers.

    Its announcements come here later than a worker may come with its next clock: so clocks run ahead of `step`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reported: dict[int, int] = {}
        """The clock of each that has told of a step which is not done."""
        self._announcements: deque[tuple[int, frozenset[int]]] = deque()

    @property
    def arrived(self) -> Collection[int]:
        """Who has told of a step that is not done; of those that have left since, it still counts."""
        return self._reported

    def join(self, worker: int, clock: int = 0) -> int:
        """Let a worker take part from a step that the other server has given it, or from a later one."""
        assert worker not in self.clocks
        self.clocks[worker] = max(clock, self.step)
        return self.clocks[worker]

    def tick(self, worker: int) -> None:
        """Note that a worker has told of its step, unless it is late."""
        if not self.is_late(worker):
            self._reported[worker] = self.clocks[worker]

    def follow(self, step: int, workers: Collection[int]) -> None:
        """Note who counts in a step, later than in all before."""
        self._announcements.append((step, frozenset(workers)))

    @property
    def is_complete(self) -> bool:
        """Whether all who count have told of the next announced step, or have left."""
        if not self._announcements:
            return False
        step, workers = self._announcements[0]
        return not any(
            self._reported.get(worker) != step and self.clocks.get(worker, step + 1) <= step for worker in workers
        )

    def advance(self) -> frozenset[int]:
        """Begin the step after the next announced one; who told of it and does not count is late."""
        assert self.is_complete
        step, workers = self._announcements.popleft()
        self.step = step + 1
        taken = frozenset(worker for worker in workers if self._reported.get(worker) == step)
        self._reported = {worker: clock for worker, clock in self._reported.items() if clock > step}
        return taken
