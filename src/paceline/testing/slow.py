"""Scripted sleep as computing, so that idle cores do not help, and workers have prescribed speeds."""

import time
from collections.abc import Callable
from typing import Any

from pydantic import Field
from torch import Tensor, nn

from paceline.data.base import Source
from paceline.data.batch import Batch
from paceline.data.permutation import derive_seed
from paceline.registry import register
from paceline.replica.loss import Loss
from paceline.replica.replica import Replica
from paceline.testing.faults import Fault, strike
from paceline.training.objective import Objective


@register("scripted")
class Scripted(Objective):
    """Another objective, on workers that sleep for each training sample, with scripted faults.

    With ``sample_s=(0.001, 0.003)`` rank 1 is always three times slower than rank 0; with ``slow_part=0.1,
    slow_factor=5`` each worker is five times slower in a tenth of its steps, drawn by rank and step. Evaluation never
    sleeps.
    """

    objective: Objective
    """Training loss to compute."""
    sample_s: tuple[float, ...] = Field(min_length=1)
    """Seconds to sleep per sample, by rank; further ranks start again at the first."""
    slow_part: float = Field(default=0.0, ge=0, le=1)
    """Fraction of its steps in which a worker is slow."""
    slow_factor: float = Field(default=1.0, ge=0)
    """Factor of the sleep in a slow step."""
    faults: tuple[Fault, ...] = ()
    """Faults, at the last micro-batch of a step."""

    def loss(self, model: Callable[[Tensor], Any], batch: Batch) -> Loss:
        """Return the other objective's loss, and sleep: between forward and backward, where it counts as computing."""
        loss = self.objective.loss(model, batch)
        if isinstance(model, Replica) and model.module.training:
            rank, step = model.group.rank, model.num_updates
            is_slow = derive_seed(step, rank) / 2**64 < self.slow_part
            factor = self.slow_factor if is_slow else 1.0
            time.sleep(factor * batch.num_samples * self.sample_s[rank % len(self.sample_s)])
            if batch.last:
                strike(self.faults, rank=rank, step=step)
        return loss

    def showcase(self, module: nn.Module, held_out: Source) -> str | None:
        """Return the other objective's text."""
        return self.objective.showcase(module, held_out)
