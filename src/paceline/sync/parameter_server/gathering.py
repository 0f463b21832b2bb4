"""Landing of the pushes of one step together: summed in the order of ranks, once enough are there."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from paceline.sync.parameter_server.clocks import StepClocks
from paceline.sync.parameter_server.shard import Landing, Push, Shard


@dataclass
class Gathered:
    """The mean over the samples of all pushes.

    Args:
        values: By piece.
        used: Whether some push had each.
        rates: Learning rates.
    """

    values: list[Tensor]
    used: list[bool]
    rates: list[float]


def gather(pushes: Mapping[int, Push]) -> Gathered | None:
    """Return the mean of pushes by worker, or None if none had samples. It is summed where the first one lies."""
    weighing = [pushes[worker] for worker in sorted(pushes) if pushes[worker].mass > 0]
    if not weighing:
        return None
    mass = sum(push.mass for push in weighing)
    first = weighing[0]
    for number, total in enumerate(first.values):
        if first.unit != mass:
            total.mul_(first.unit / mass)
        for push in weighing[1:]:
            total.add_(push.values[number], alpha=push.unit / mass)
    used = [any(flags) for flags in zip(*(push.used for push in weighing), strict=True)]
    return Gathered(list(first.values), used, list(weighing[-1].rates))


class Together(Landing):
    """Keeps the pushes of a step until enough are there.

    Args:
        clocks: Say when enough are.
        land: What is done with the mean of a step.

    Attributes:
        announce: Called with each step that is done and the workers that count in it.
    """

    clocks: StepClocks

    def __init__(self, clocks: StepClocks, land: Callable[[Shard, Gathered], None]) -> None:
        super().__init__(clocks)
        self._land = land
        self.announce: Callable[[int, Collection[int]], None] = lambda step, workers: None
        self._pushes: dict[int, Push] = {}
        """Those of steps that are not done; their values lie in buffers that stay until they are replied to."""

    def push(self, shard: Shard, push: Push) -> bool:
        """Keep it, unless its step is done."""
        if self.clocks.is_late(push.worker):
            return False
        self._pushes[push.worker] = push
        return True

    def settle(self, shard: Shard) -> None:
        """Land the step if enough are there."""
        while self.clocks.is_complete:
            workers = self.clocks.advance()
            self.announce(self.clocks.step - 1, workers)
            gathered = gather({worker: self._pushes[worker] for worker in workers})
            shard.delays[0] += len(workers)
            self._pushes = {worker: self._pushes[worker] for worker in self.clocks.arrived}
            if gathered is not None:
                self._land(shard, gathered)
