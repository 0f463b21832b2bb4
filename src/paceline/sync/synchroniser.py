"""What workers do with their parameters besides summing gradients: average, mix, pull, push."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.errors import CommunicationError


@dataclass(frozen=True)
class WorkerContext:
    """The objects that a rule works on: one worker's model, and the groups of the worker.

    Args:
        module: The worker's model.
        optimizer: Optimizer of the module's parameters.
        group: Group of all workers.
        seed: Random seed of the rule.
        world: Group of all processes, the workers first, if servers have their own processes.
        local_parameters: This rank's part of each parameter, if ranks share them.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    group: Group
    seed: int = 0
    world: Group | None = None
    local_parameters: Mapping[str, Tensor] | None = None

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Trained parameters by name: this rank's tensors, which may be changed in place."""
        return dict(self.local_parameters or {name: p for name, p in self.module.named_parameters() if p.requires_grad})


@dataclass(frozen=True)
class LocalStep:
    """The present step of this worker.

    Args:
        number: Number of updates done before.
        weight: Weight of this worker's samples since the last sync step, including this step.
        total_weight: Weight of all workers' samples since then, if this is a sync step; else 0.
        stop_requested: Whether this worker was asked to stop.
    """

    number: int
    weight: float
    total_weight: float = 0.0
    stop_requested: bool = False


@dataclass(frozen=True)
class SyncResult:
    """Result of a rule in a step.

    Args:
        waited_s: Time that this worker waited for others.
        wire_bytes: Bytes that it sent.
        stop: Whether all workers stop here; for rules without sync steps, whose workers agree on it themselves.
    """

    waited_s: float = 0.0
    wire_bytes: int = 0
    stop: bool = False


class Abandoned(Enum):
    """What an update is that had begun to change a worker when its exchange was abandoned."""

    TORN = "torn"
    """Changed in part."""
    DUE = "due"
    """Whole but for its exchange, which can be made again: nothing has changed since the optimizer's step."""
    DONE = "done"
    """Whole: what was abandoned belongs to later updates, or can be left out."""
    OPEN = "open"
    """Dropped here, where nothing of it is needed: servers know whether it counts. See `Synchroniser.progress`."""


@dataclass(frozen=True)
class ServedProgress:
    """What servers had applied when workers changed.

    Args:
        used: Pairs of start and stop, sorted: positions of samples, or numbers of steps if workers step together.
        lost: Words on what is lost; empty if nothing is.
    """

    used: Sequence[Sequence[int]]
    lost: str = ""


class SampleDispatcher(ABC):
    """Hands out samples to workers that go at their own pace, and says when all of them come together."""

    @property
    @abstractmethod
    def is_stopping(self) -> bool:
        """Whether `claim` returned None because a stop was requested."""

    @property
    @abstractmethod
    def lost(self) -> CommunicationError | None:
        """Error of a worker that is lost, so that the others stop after their present step; None while none is."""

    @abstractmethod
    def set_source(self, claim_next: Callable[[int], tuple[int, int]], mark_used: Callable[[int, int], None]) -> None:
        """Set the source of samples, on rank 0: `claim_next` returns the next, `mark_used` is called with used ones."""

    @abstractmethod
    def set_boundary(self, position: int) -> None:
        """Hand out no position from `position` on; every worker calls it, after reaching the boundary before."""

    @abstractmethod
    def claim(self, num_samples: int) -> tuple[int, int] | None:
        """Return start and stop of at most `num_samples` positions that no other worker has; from any thread.

        It waits while all are handed out and not yet acknowledged. None once all before the boundary have been used,
        or a stop was requested and all samples that were handed out have been used.
        """

    @abstractmethod
    def ack(self, interval: tuple[int, int]) -> bool:
        """Record that claimed positions were used; False if the push was dropped, so that they are handed out again."""


@dataclass(frozen=True)
class HandedOver:
    """What the first worker knows of the others once they have left, since one is lost.

    Args:
        lost_ranks: Ranks that are lost.
        num_steps: Number of steps by rank: those that each living worker has done, and those of each lost one that are
            in what lives; empty if a dispatcher knows what was used.
    """

    lost_ranks: list[int]
    num_steps: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Delays:
    """Delays of pushes to a server, or of gradients among workers that average in pairs.

    Args:
        counts: Number of pushes by delay: the number of others' updates between their pull and them. Among pairs,
            number of gradients by the number of averages between the parameters that they are of and their use.
        num_dropped: Number of pushes that came too late for their step.
    """

    counts: dict[int, int]
    num_dropped: int

    def since(self, before: "Delays") -> dict[int, int]:
        """Return the number of pushes by delay since an earlier count."""
        return {delay: new for delay, count in self.counts.items() if (new := count - before.counts.get(delay, 0)) > 0}


class Synchroniser(ABC):
    """Executes a rule on the parameters of one replica; it holds connections and state.

    In each step the replica computes gradients, sums them over `Rule.reduce_ranks`, clips them, and calls
    `before_update`, its optimizer, and `after_update`. All workers make the same calls, unless the rule is
    asynchronous.
    """

    @property
    def dispatcher(self) -> SampleDispatcher | None:
        """Source of samples of workers that go at their own pace; None if they step together."""
        return None

    def count_delays(self) -> Delays | None:
        """Return the delays of this run's pushes; None if there are no pushes."""
        return None

    def is_sync_step(self, number: int) -> bool:
        """Return whether all workers add up their weights in step `number`; the same on every worker."""
        return False

    def before_update(self, step: LocalStep) -> None:
        """Change gradients or parameters before the optimizer's step; the gradients are those of these parameters."""

    @abstractmethod
    def after_update(self, step: LocalStep) -> SyncResult:
        """Exchange what is due, after the optimizer's step."""

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """While active, parameters are the consensus of all workers, to evaluate and save; afterwards, their own again.

        Every worker enters it at the same step. By default parameters do not change.
        """
        yield

    def abandon(self) -> Abandoned:
        """Drop what is under way, whose peers are lost, without waiting for it.

        Returns:
            What the update is, if it had begun to change this worker.
        """
        return Abandoned.TORN

    def repair(self, *, is_new: bool) -> str:
        """Make what workers have in common fit the present ones, after `load_state`; all of them call it.

        Args:
            is_new: Whether this worker was sent the first one's state, and has none of its own.

        Returns:
            Words on what was changed; empty if nothing was.
        """
        return ""

    def part(self) -> None:
        """Give each other what is not to be lost with a worker that leaves now, at the end of a step; all call it."""

    @property
    def progress(self) -> ServedProgress | None:
        """What servers had applied when workers changed, after `load_state`; None if each worker knows by itself."""
        return None

    def last_exchange(self, number: int) -> int:
        """Return the number of updates, at most `number`, after which all of this worker's progress was exchanged."""
        return number

    def last_mixed(self) -> Mapping[int, int]:
        """Return the number of updates of each other worker's model when it was mixed in last, by rank; for gossip."""
        return {}

    def shared_state(self) -> dict[str, Tensor]:
        """Return the common state of all workers, as named tensors: it is saved once."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Return this worker's own state, as named tensors; exchanges under way are finished first."""
        return {}

    def detached_state(self) -> dict[str, Tensor]:
        """Return this worker's own state for any other number of workers; nothing is exchanged."""
        return self.state()

    def hand_over(self, alone: Group) -> HandedOver | None:
        """Leave to the first worker what this one has, since a worker is lost; each living worker calls it.

        The first waits for the others, and stands for all from then on, so that it can save alone: parameters,
        `consensus`, `state` and `shared_state` are those of what lives. Only for asynchronous rules.

        Args:
            alone: Group of this worker alone.

        Returns:
            None on all but the first worker.

        Raises:
            CommunicationError: The first worker or a server is lost.
        """
        raise AssertionError(f"workers of {type(self).__name__} stop together")

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Load a saved state; parameters, buffers and the optimizer's state have been loaded before.

        Args:
            saved: States of all workers, by rank. If their number is the same as now, only this worker's is filled in,
                and parameters are its own; else parameters are the consensus. Empty if another rule saved them: then
                the rule restarts from these parameters.
            shared: Common state of the workers; empty too if another rule saved it.
        """

    def document(self) -> dict[str, Any]:
        """Return the rest of this worker's state, as JSON."""
        return {}

    def load_document(self, document: Mapping[str, Any]) -> None:
        """Load a saved document of the same worker, if the number of workers is the same."""

    def close(self) -> None:
        """Close connections and threads."""
