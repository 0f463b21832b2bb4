"""Stale-synchronous parallel: workers run ahead of each other by a bounded number of steps."""

from collections.abc import Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor

from paceline.registry import register
from paceline.sync.parameter_server.aggregation import StepAggregation
from paceline.sync.parameter_server.base import ServedRule
from paceline.sync.parameter_server.clocks import BoundedClocks, Quorum
from paceline.sync.parameter_server.shard import Push, ServerUpdate, Shard


@register("ssp")
class SSP(ServedRule):
    """Stale-synchronous parallel (Ho et al. 2013): a read at clock c sees all updates up to c - staleness - 1.

    Each worker's own optimizer takes its step, and the worker pushes the change; servers only add it, weighted by the
    worker's part of a step's weight, and the worker pulls: the result includes its own updates, those of the others up
    to the bound, and some later ones. It waits only for workers that are more than `staleness` steps behind. No worker
    waits for one that died, or has no samples left. With staleness 0 it equals `EveryStep` up to the order of
    summation, with SGD, and with momentum too if each worker's part stays the same. Wire: a push and a pull of all
    parameters a step.

    Each worker clips its own gradient. The difference from Ho et al.: a worker's part is that of the weight of the last
    complete step, since this step's is not known yet; with staleness 0 it is that of the step itself.
    """

    staleness: int = Field(default=3, ge=0)
    """Largest lead of a worker over the slowest, in steps."""

    @property
    def is_asynchronous(self) -> bool:
        """Always true."""
        return True

    @property
    def applies_at_once(self) -> bool:
        """Whether updates are added on arrival; with staleness 0 those of a step are added together."""
        return self.staleness > 0

    def start_server_update(
        self, num_workers: int, optimizer: torch.optim.Optimizer, *, number: int = 0
    ) -> ServerUpdate:
        """Return the update that adds pushes."""
        if self.staleness == 0:
            return StepAggregation(Quorum(), lambda shard, mean: _add(shard, mean.values, 1.0))
        return _AddUpdates(self.staleness, num_workers)


class _AddUpdates(ServerUpdate):
    """Adds each update on arrival.

    A step is complete when all workers have pushed it. Those that some have not pushed, since they were away before an
    evaluation or a checkpoint, say nothing of the weight of a step.

    Args:
        staleness: Largest lead in steps.
        num_workers: Number of workers.
    """

    clocks: BoundedClocks

    def __init__(self, staleness: int, num_workers: int) -> None:
        super().__init__(BoundedClocks(staleness))
        self._num_workers = num_workers
        self._weights: dict[int, dict[int, float]] = {}
        """Weight that each worker has pushed, by step that is not settled."""
        self._step_weight = 0.0
        """Weight of the last complete step; 0 before there is one."""

    def push(self, shard: Shard, push: Push) -> bool:
        """Add the update."""
        shard.note_used(push)
        if push.worker in self.clocks.clocks:  # else it is made again, while nobody steps
            clock = self.clocks.clocks[push.worker]
            self._weights.setdefault(clock, {})[push.worker] = push.weight
        if push.weight > 0:
            shard.delays[shard.version - push.version] += 1
            step_weight = self._step_weight or push.weight * self._num_workers
            _add(shard, push.values, push.unit / step_weight)
        return True

    def settle(self, shard: Shard) -> None:
        """Record the weight of steps that became complete."""
        for clock in sorted(clock for clock in self._weights if clock < self.clocks.slowest):
            pushed = self._weights.pop(clock)
            if len(pushed) >= self._num_workers:
                self._step_weight = sum(pushed.values()) or self._step_weight

    def lose(self, worker: int) -> None:
        """Expect one worker fewer in a step."""
        self._num_workers -= 1

    def state(self, shard: Shard) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the weight of a step."""
        return {}, {"step_weight": self._step_weight}

    def load_state(self, shard: Shard, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """Load the weight of a step."""
        self._step_weight = numbers.get("step_weight", 0.0)


def _add(shard: Shard, values: Sequence[Tensor], factor: float) -> None:
    if values:
        torch._foreach_add_(shard.values.tensors, list(values), alpha=factor)
    shard.version += 1
