"""What workers do to their parameters beyond summing gradients: average, mix, pull towards each other, push."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Group


@dataclass(frozen=True)
class WorkerContext:
    """What a rule works on: one worker's model, and the workers it belongs to.

    Args:
        module: The worker's model.
        optimizer: Over parameters of the module.
        group: All workers.
        seed: Random seed of the rule.
        world: All processes, the workers first, where servers have some of their own.
        local_parameters: What this rank holds of each parameter, where ranks share them.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    group: Group
    seed: int = 0
    world: Group | None = None
    local_parameters: Mapping[str, Tensor] | None = None

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Those that are trained, by name; their tensors here, which may be changed in place."""
        return dict(self.local_parameters or {name: p for name, p in self.module.named_parameters() if p.requires_grad})


@dataclass(frozen=True)
class LocalStep:
    """The step that this worker is at.

    Args:
        number: Updates done before.
        weight: Weight of this worker's samples since the last sync step, with those of this step.
        total_weight: Weight of all workers' samples since then, where this is a sync step; else 0.
        stop_requested: Whether this worker was asked to stop.
    """

    number: int
    weight: float
    total_weight: float = 0.0
    stop_requested: bool = False


@dataclass(frozen=True)
class SyncResult:
    """What a rule did in a step.

    Args:
        waited_s: How long this worker stood still for others.
        wire_bytes: What it put on the wire.
        stop: Whether all workers stop here; of rules without sync steps, which agree on it by themselves.
    """

    waited_s: float = 0.0
    wire_bytes: int = 0
    stop: bool = False


class SampleDispatcher(ABC):
    """Hands out samples to workers that go at their own pace, and says when all of them come together."""

    @property
    @abstractmethod
    def is_stopping(self) -> bool:
        """Whether, after `claim` has returned None, it is because somebody was asked to stop."""

    @abstractmethod
    def set_source(self, claim_next: Callable[[int], tuple[int, int]], mark_used: Callable[[int, int], None]) -> None:
        """Set, on rank 0, where samples come from: `claim_next` returns the next, `mark_used` hears what was used."""

    @abstractmethod
    def set_boundary(self, position: int) -> None:
        """Hand out nothing at or after `position`; every worker calls it, after the boundary before was reached."""

    @abstractmethod
    def claim(self, num_samples: int) -> tuple[int, int] | None:
        """Return start and stop of at most so many positions that nobody else has; from any thread.

        It waits while all are handed out and not yet acknowledged. None once all before the boundary have been used,
        or somebody was asked to stop and what was handed out has been used.
        """

    @abstractmethod
    def ack(self, interval: tuple[int, int]) -> bool:
        """Note that claimed positions were used; False if the push was dropped, so that they are handed out again."""


@dataclass(frozen=True)
class Delays:
    """How stale pushes to a server have been.

    Args:
        counts: Pushes, by how many updates of others came between their pull and them.
        num_dropped: Pushes that came too late for their step.
    """

    counts: dict[int, int]
    num_dropped: int


class Synchroniser(ABC):
    """Carries a rule out on the parameters of one replica; it holds connections and state.

    In each step the replica computes gradients, sums them over `Rule.reduce_ranks`, clips them, and calls
    `before_update`, its optimizer, and `after_update`. Every worker calls alike, unless the rule is asynchronous.
    """

    @property
    def dispatcher(self) -> SampleDispatcher | None:
        """Where workers that go at their own pace get their samples; None where they step together."""
        return None

    def count_delays(self) -> Delays | None:
        """Return how stale this run's pushes have been; None where there are none."""
        return None

    def is_sync_step(self, number: int) -> bool:
        """Return whether all workers add up their weights in step `number`; the same on every worker."""
        return False

    def before_update(self, step: LocalStep) -> None:
        """Change gradients, or parameters, before the optimizer takes its step: gradients are of these parameters."""

    @abstractmethod
    def after_update(self, step: LocalStep) -> SyncResult:
        """Exchange what is due, after the optimizer has taken its step."""

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, parameters are what all workers together stand for, to be judged and saved; outside, their own again.

        Every worker enters it at the same step. By default parameters stay as they are.
        """
        yield

    def shared_state(self) -> dict[str, Tensor]:
        """Return the state that is the same on every worker, as named tensors: it is saved once."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Return this worker's own state, as named tensors, with what is on the wire applied first or waited for."""
        return {}

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Take on a saved state; parameters, buffers and the optimizer's state have been loaded before.

        Args:
            saved: Those of all workers, by rank. If they are as many as now, only this worker's is filled in, and its
                parameters are those it had; else parameters are the consensus. Empty if another rule saved them:
                then the rule begins anew from these parameters.
            shared: What was the same on every worker; empty too if another rule saved it.
        """

    def document(self) -> dict[str, Any]:
        """Return the rest of this worker's state, as JSON."""
        return {}

    def load_document(self, document: Mapping[str, Any]) -> None:
        """Take on a saved document, of the same worker among as many."""

    def close(self) -> None:
        """Let connections and threads go."""
