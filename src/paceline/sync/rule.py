"""The contract of a synchronisation rule: four small answers.

*What* is exchanged, *when*, *with whom*, and *how arrivals are applied*. A rule is settings only. A replica makes
from it a `GradientReducer`, which sums gradients at every step over its `reduce_ranks`, and a `Synchroniser`, which
does everything else with parameters or servers.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch import Size

from paceline.comm.group import Group
from paceline.registry import Family
from paceline.sync.reducer import GradientReducer
from paceline.sync.reducers import DenseReducer
from paceline.sync.synchroniser import Synchroniser, WorkerContext
from paceline.topology.units import BytesPerSecond


@dataclass(frozen=True)
class Traffic:
    """Traffic of one kind of exchange, for the simulator.

    Args:
        collective: Usual name of the operation: ``all_reduce``, ``send``, ``push``, ``pull``.
        num_bytes: Size of its buffer, in bytes, before any codec.
        wire_bytes: Bytes that a worker sends in one exchange.
        period: Steps from one exchange to the next.
        peers: Partners of a worker.
        first_step: Step with which the first period begins.
        end_step: Step from which on it no longer happens; None if it continues.
        overlap: Computing that can hide it, in steps: 0 if workers wait for it, 1 if it travels during a whole step.
        last_part: Part of it that is ready only when that computing ends, and so never hides.
    """

    collective: str
    num_bytes: int
    wire_bytes: int
    period: int = 1
    peers: Literal["all", "host", "neighbours", "servers"] = "all"
    first_step: int = 0
    end_step: int | None = None
    overlap: float = 0.0
    last_part: float = 0.0

    def count(self, num_steps: float) -> float:
        """Return the number of exchanges in the first `num_steps` of a training; parts of a period count as such."""
        end_step = num_steps if self.end_step is None else min(num_steps, self.end_step)
        return max(end_step - self.first_step, 0) / self.period


def find_exposed_s(exchange_s: float, hidden_s: float, last_part: float = 0.0) -> float:
    """Return the time for which an exchange keeps workers waiting.

    Args:
        exchange_s: Time of the exchange.
        hidden_s: Time of computing behind which it can hide.
        last_part: Part of the exchange that is ready only when that computing ends.
    """
    return max(exchange_s - hidden_s, last_part * exchange_s)


class Rule(Family):
    """Settings of a synchronisation method."""

    family = "sync"
    setting = "sync"

    max_bandwidth: BytesPerSecond | None = None
    """Largest mean speed at which each worker sends over the network between CPUs, such as 50mbit; None: no limit."""

    @property
    @abstractmethod
    def keeps_replicas_equal(self) -> bool:
        """Whether parameters are equal on all workers after every step, so that their hashes can be compared."""

    @property
    def keeps_optimizers_equal(self) -> bool:
        """Whether the optimizer's state is equal on all workers after every step too."""
        return self.keeps_replicas_equal

    @property
    def copies_first_parameters(self) -> bool:
        """Whether parameters are copied when the replica is made, so that they must be right by then."""
        return self.is_asynchronous

    @property
    def carries_momentum(self) -> bool:
        """Whether the exchanged values include momentum, so that the optimizer must have none."""
        return False

    @property
    def runs_optimizer(self) -> bool:
        """Whether each worker's optimizer takes its step; else a server's does."""
        return True

    @property
    def weighs_samples(self) -> bool:
        """Whether workers count by the weight of their samples; else all count equally, whatever their samples."""
        return True

    @property
    def reads_gradients(self) -> bool:
        """Whether it needs gradients as well as parameters, in full: ranks cannot share a model then."""
        return False

    @property
    def is_asynchronous(self) -> bool:
        """Whether workers step at their own pace, together only to evaluate and save."""
        return False

    @property
    def survives_loss(self) -> bool:
        """Whether workers can go on from memory when others are lost; else all restart from the newest checkpoint."""
        return False

    def find_missing(self, held: Sequence[Mapping[str, Any]]) -> str:
        """Return why workers cannot go on from what each of them holds for all; empty if they can.

        Args:
            held: Facts on the states that each living worker holds: `held` of its synchroniser's document.
        """
        return ""

    @property
    def meets_on_change(self) -> bool:
        """Whether workers take the mean of parameters and optimizers when others are lost or join."""
        return False

    def fit_workers(self, num_workers: int) -> Self:
        """Return the rule as it goes on among another number of workers than it was started with."""
        return self

    @property
    def num_server_processes(self) -> int:
        """Number of processes that only serve: the last ranks of all, after the workers."""
        return 0

    def serve(self, context: WorkerContext, num_workers: int) -> None:
        """Run one of the processes that only serve, until all workers have left.

        Args:
            context: Model and optimizer, built like the workers'; `world` is the group of all processes, workers first.
            num_workers: Number of workers among them.

        Raises:
            CommunicationError: Workers were lost.
        """
        raise AssertionError(f"sync {self.name} has no processes that only serve")

    def reduce_ranks(self, group: Group, step: int) -> Sequence[int]:
        """Return the ranks, including this one, that sum their gradients in a step."""
        return range(group.size)

    def fit_length(self, num_steps: int) -> Self:
        """Return the rule with what it leaves open chosen for a run of `num_steps`."""
        return self

    def phase(self, step: int) -> int:
        """Return the phase of training of a step; each phase starts a new reducer."""
        return 0

    def next_change(self, step: int) -> int | None:
        """Return the first step after `step` in which `reduce_ranks` or `phase` change; None if they do not."""
        return None

    def start_reducer(self, group: Group, seed: int = 0, *, step: int = 0) -> GradientReducer:
        """Return the reducer of gradients over `group`, the workers of `reduce_ranks`. Each of them calls it.

        Args:
            group: Group of these workers.
            seed: Random seed of the codecs.
            step: First step that uses it; the last one is that of its `phase`.
        """
        return DenseReducer(group, None)

    def start_synchroniser(self, context: WorkerContext) -> Synchroniser | None:
        """Return the synchroniser, or None if summing gradients is all. Every worker calls it, also one alone."""
        return None

    @abstractmethod
    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """Return the traffic of a model's exchanges, with fp32 parameters of those shapes."""
