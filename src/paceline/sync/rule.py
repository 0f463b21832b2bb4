"""What a synchronisation method is: four small answers.

*What* is exchanged, *when*, *with whom*, and *what is done on arrival*. A rule is settings only. Of it a replica makes
a `GradientReducer`, which sums gradients at every step over its `reduce_ranks`, and a `Synchroniser`, which does the
rest: what happens to parameters, or with servers.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Size

from paceline.comm.group import Group
from paceline.registry import Family
from paceline.sync.reducer import GradientReducer
from paceline.sync.reducers import DenseReducer
from paceline.sync.synchroniser import Synchroniser, WorkerContext


@dataclass(frozen=True)
class Traffic:
    """What one kind of exchange puts on the wire, for simulator and planner.

    Args:
        collective: The operation, by its usual name: ``all_reduce``, ``send``, ``push``, ``pull``.
        num_bytes: Size of the buffer it runs on, in bytes, before any codec.
        wire_bytes: What a worker sends in one.
        period: Steps from one to the next.
        peers: With whom.
        first_step: The step that the first period begins with.
        end_step: The step from which on it does not happen any more; None where it goes on.
    """

    collective: str
    num_bytes: int
    wire_bytes: int
    period: int = 1
    peers: Literal["all", "host", "neighbours", "servers"] = "all"
    first_step: int = 0
    end_step: int | None = None

    def count(self, num_steps: int) -> float:
        """Return how often it happens in the first `num_steps` of a training; parts of a period count as such."""
        end_step = num_steps if self.end_step is None else min(num_steps, self.end_step)
        return max(end_step - self.first_step, 0) / self.period


class Rule(Family):
    """Settings of a synchronisation method."""

    family = "sync"

    @property
    @abstractmethod
    def keeps_replicas_equal(self) -> bool:
        """Whether parameters are the same on all workers after every step, so that hashing them is a check."""

    @property
    def carries_momentum(self) -> bool:
        """Whether momentum is part of what is exchanged, so that the optimizer must have none of its own."""
        return False

    @property
    def runs_optimizer(self) -> bool:
        """Whether each worker's optimizer takes its step; else a server's does."""
        return True

    @property
    def reads_gradients(self) -> bool:
        """Whether it needs gradients as well as parameters, whole ones: ranks cannot share a model then."""
        return False

    @property
    def is_asynchronous(self) -> bool:
        """Whether workers go through steps of their own, at their own pace, together only to evaluate and save."""
        return False

    @property
    def num_server_processes(self) -> int:
        """Processes that only serve: the last ranks of all, beyond the workers."""
        return 0

    def serve(self, context: WorkerContext, num_workers: int) -> None:
        """Be one of the processes that only serve, until all workers have left.

        Args:
            context: A model and an optimizer as the workers build them; its `world` is all processes, workers first.
            num_workers: How many of them are workers.

        Raises:
            CommunicationError: Workers were lost.
        """
        raise AssertionError(f"sync {self.name} has no processes that only serve")

    def reduce_ranks(self, group: Group, step: int) -> Sequence[int]:
        """Return the ranks, this one among them, over whose gradients this worker's are summed in a step."""
        return range(group.size)

    def phase(self, step: int) -> int:
        """Return which part of the training a step is in; with each, what sums gradients is started anew."""
        return 0

    def next_change(self, step: int) -> int | None:
        """Return the first step after `step` in which `reduce_ranks` or `phase` change; None if they stay."""
        return None

    def start_reducer(self, group: Group, seed: int = 0, *, step: int = 0) -> GradientReducer:
        """Return what sums gradients over `group`, the workers of `reduce_ranks`. Each of them calls it.

        Args:
            group: The workers.
            seed: Random seed of the codecs.
            step: The first step that it is for; the last one is that of its `phase`.
        """
        return DenseReducer(group, None)

    def start_synchroniser(self, context: WorkerContext) -> Synchroniser | None:
        """Return what does the rest, or None where summed gradients are all. Every worker calls it, also one alone."""
        return None

    @abstractmethod
    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """Return what exchanges of a model, with fp32 parameters of those shapes, put on the wire."""
