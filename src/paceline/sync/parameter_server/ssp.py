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

    Each worker's own optimizer takes its step, and what that changed is pushed; servers only add it, weighted by the
    worker's part of a step's weight, and the worker pulls: its own updates are in it, those of the others up to the
    bound, and later ones as they have come. It waits only for workers that are more than `staleness` steps behind. A
    worker that died, or has no samples left, is waited for by nobody. With staleness 0 it equals `EveryStep` up to the
    order of summation, with SGD, and with momentum too where a worker's part stays the same. Wire: a push
    and a pull of all parameters a step.

    Each worker clips its own gradient. The difference to Ho et al.: a worker's part is of the weight of the last
    step that was complete, since that of this step is not known yet; with staleness 0 it is of the step itself.
    """

    staleness: int = Field(default=3, ge=0)
    """Steps that a worker may be ahead of the slowest."""

    @property
    def is_asynchronous(self) -> bool:
        """Always."""
        return True

    def start_server_update(
        self, num_workers: int, optimizer: torch.optim.Optimizer, *, number: int = 0
    ) -> ServerUpdate:
        """Return what adds updates."""
        if self.staleness == 0:
            return StepAggregation(Quorum(), lambda shard, mean: _add(shard, mean.values, 1.0))
        return _AddUpdates(self.staleness)


class _AddUpdates(ServerUpdate):
    """Adds each update as it comes."""

    clocks: BoundedClocks

    def __init__(self, staleness: int) -> None:
        super().__init__(BoundedClocks(staleness))
        self._weights: dict[int, float] = {}
        """What was pushed of each step that is not complete."""
        self._step_weight = 0.0
        """Of the last step that was; 0 before there was one."""

    def push(self, shard: Shard, push: Push) -> bool:
        """Add it."""
        clock = self.clocks.clocks[push.worker]
        self._weights[clock] = self._weights.get(clock, 0.0) + push.weight
        if push.weight > 0:
            shard.delays[shard.version - push.version] += 1
            step_weight = self._step_weight or push.weight * len(self.clocks.clocks)
            _add(shard, push.values, push.unit / step_weight)
        return True

    def settle(self, shard: Shard) -> None:
        """Learn the weight of steps that became complete."""
        for clock in sorted(clock for clock in self._weights if clock < self.clocks.slowest):
            self._step_weight = self._weights.pop(clock) or self._step_weight

    def state(self, shard: Shard) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the weight of a step."""
        return {}, {"step_weight": self._step_weight}

    def load_state(self, shard: Shard, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """Take on the weight of a step."""
        self._step_weight = numbers.get("step_weight", 0.0)


def _add(shard: Shard, values: Sequence[Tensor], factor: float) -> None:
    if values:
        torch._foreach_add_(shard.values.tensors, list(values), alpha=factor)
    shard.version += 1
