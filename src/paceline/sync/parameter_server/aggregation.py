"""Aggregation of the pushes of one step: summed in the order of ranks, once enough have arrived."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from paceline.sync.parameter_server.clocks import StepClocks
from paceline.sync.parameter_server.shard import Push, ServerUpdate, Shard


@dataclass
class Aggregated:
    """The mean over the samples of all pushes.

    Args:
        values: Mean gradients, by block.
        used: Whether any push had each block.
        rates: Learning rates, by parameter group.
    """

    values: list[Tensor]
    used: list[bool]
    rates: list[float]


def aggregate(pushes: Mapping[int, Push]) -> Aggregated | None:
    """Return the mean of pushes by worker, or None if none had samples. The first push's buffer holds the sum."""
    weighing = [pushes[worker] for worker in sorted(pushes) if pushes[worker].weight > 0]
    if not weighing:
        return None
    weight = sum(push.weight for push in weighing)
    first = weighing[0]
    for number, total in enumerate(first.values):
        if first.unit != weight:
            total.mul_(first.unit / weight)
        for push in weighing[1:]:
            total.add_(push.values[number], alpha=push.unit / weight)
    used = [any(flags) for flags in zip(*(push.used for push in weighing), strict=True)]
    return Aggregated(list(first.values), used, list(weighing[-1].rates))


class StepAggregation(ServerUpdate):
    """Keeps the pushes of a step until enough have arrived.

    Args:
        clocks: Clocks that say when enough have arrived.
        apply: Function that applies the mean of a step.

    Attributes:
        announce: Function called with each finished step and the workers that count in it.
    """

    clocks: StepClocks

    def __init__(self, clocks: StepClocks, apply: Callable[[Shard, Aggregated], None]) -> None:
        super().__init__(clocks)
        self._apply = apply
        self.announce: Callable[[int, Collection[int]], None] = lambda step, workers: None
        self._pushes: dict[int, Push] = {}
        """Pushes of unfinished steps; their values lie in buffers that stay until the reply."""

    def push(self, shard: Shard, push: Push) -> bool:
        """Keep the push, unless its step is finished."""
        if self.clocks.is_late(push.worker):
            return False
        self._pushes[push.worker] = push
        return True

    def settle(self, shard: Shard) -> None:
        """Apply the step if enough pushes have arrived."""
        while self.clocks.is_complete:
            workers = self.clocks.advance()
            self.announce(self.clocks.step - 1, workers)
            aggregated = aggregate({worker: self._pushes[worker] for worker in workers})
            shard.delays[0] += len(workers)
            for worker in workers:
                shard.note_used(self._pushes[worker])
            self._pushes = {worker: self._pushes[worker] for worker in self.clocks.arrived}
            if aggregated is not None:
                self._apply(shard, aggregated)
