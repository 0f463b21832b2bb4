"""How far workers are from their consensus, where the rule lets their parameters differ."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.parallel.local import local
from paceline.parallel.model_shard import ModelShard
from paceline.sync.synchroniser import Synchroniser

_MOST_ELEMENTS = 2**22
"""Number of elements that are compared; of larger models every second, third, ..."""


class ConsensusDistance:
    """Distance of workers from their consensus, measured whenever they come together to evaluate or save it.

    Args:
        parameters: Parameters that are trained.
        shard: Model shard of this rank.
        synchroniser: Synchroniser of a rule that lets workers differ; None if they are equal.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], shard: ModelShard, synchroniser: Synchroniser | None
    ) -> None:
        self._parameters = parameters
        self._shard = shard
        self._synchroniser = synchroniser
        self._newest: float | None = None

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Enter the consensus, on all workers at once, and measure how far this moved their parameters."""
        if self._synchroniser is None:
            yield
            return
        own = self._sample()
        with self._synchroniser.consensus():
            squares = torch.zeros(2, dtype=torch.float64, device=self._shard.world.device)
            for mine, common in zip(own, self._sample(), strict=True):
                squares += torch.stack([(mine - common).square().sum(), common.square().sum()]).double()
            self._shard.world.all_reduce(squares, name="distance from the consensus").wait()
            apart, length = squares.sqrt().tolist()
            self._newest = apart / length if length else 0.0
            yield

    def take(self) -> float | None:
        """Return the newest distance, once: root mean square over workers, to the consensus's norm; None without."""
        newest, self._newest = self._newest, None
        return newest

    def _sample(self) -> list[Tensor]:
        """Return copies of evenly spread elements of the parameters: float32, flat."""
        parameters = [local(one.detach()) for one in self._parameters]
        stride = max(1, -(-sum(one.numel() for one in parameters) // _MOST_ELEMENTS))
        return [one.flatten()[::stride].to(torch.float32, copy=True) for one in parameters]
