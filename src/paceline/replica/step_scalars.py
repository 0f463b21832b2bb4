"""Scalars that all workers share before a step's gradients arrive: weight, loss, and votes to stop.

Workers that do not sum gradients at every step share them at sync steps, and vote on stopping in between.
"""

import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypeGuard

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.streams import HostCopy, SideStream
from paceline.errors import GradientError
from paceline.parallel.model_shard import ModelShard
from paceline.parallel.tensor import full_tensor
from paceline.replica.loss import Loss
from paceline.sync.synchroniser import Synchroniser

_VOTE_STEPS = 10


@dataclass(frozen=True)
class StepTotals:
    """Sums over the workers, the same on each."""

    weight: float
    """Weight of the global batch: its number of samples, or of tokens."""
    weight_since_sync: float
    """Weight of the samples since the last sync step."""
    loss: float
    """Sum of the losses times their weights."""
    num_non_finite: int
    """Number of workers whose loss is not finite."""
    stop: bool
    """Whether any worker has asked to stop."""
    measured: tuple[float, ...] = ()
    """Sums of what workers measured, if they measure anything."""


class StepScalars:
    """One step's scalars in transit: sent ahead of the gradients, summed over the workers in float64.

    On a GPU they go to the host on a stream of their own, queued before backward: who waits for them does not wait for
    backward.

    Args:
        group: The workers.
        weight: Weight of this worker's samples, on the host or 0-dim on the device.
        loss: Sum of their losses, each times its weight; 0-dim.
        stop: Whether this worker was asked to stop, like `weight`.
        weight_since_sync: Weight of its samples since the last sync step; by default `weight`.
    """

    def __init__(
        self,
        group: Group,
        weight: float | Tensor,
        loss: Tensor,
        stop: bool | Tensor,
        weight_since_sync: float | Tensor | None = None,
        measured: Sequence[float] | Tensor = (),
    ) -> None:
        self._values = torch.zeros(5 + len(measured), dtype=torch.float64, device=group.device)
        if len(measured):
            self._values[5:] = torch.as_tensor(measured, dtype=torch.float64)
        self._values[0] = weight
        self._values[1] = loss
        self._values[2] = ~torch.isfinite(loss)
        self._values[3] = stop
        self._values[4] = weight if weight_since_sync is None else weight_since_sync
        self._work = group.all_reduce(self._values, name="step scalars")
        self._copy = self._start_copy(group.device) if group.device.type != "cpu" else None
        self._lock = threading.Lock()  # codecs ask from their own thread
        self._totals: StepTotals | None = None

    def wait(self) -> StepTotals:
        """Return the totals, once all workers have sent theirs."""
        with self._lock:
            if self._totals is None:
                self._work.wait()
                if self._copy is None:
                    values = self._values.tolist()
                else:
                    values = self._copy.tolist()
                    self._work.check()  # or they would be those of an operation that was aborted
                weight, loss, num_bad, num_stops, since_sync, *measured = values
                self._totals = StepTotals(weight, since_sync, loss, int(num_bad), num_stops > 0, tuple(measured))
            return self._totals

    def divisor(self, weight_unit: float) -> float | Tensor:
        """Return the divisor of the step's numerators, once all workers have sent their weights.

        On a GPU it is a 0-dim tensor of the calling thread's stream, in fp32, so that no thread waits.
        """
        if self._copy is None:
            return (self.wait().weight or weight_unit) / weight_unit
        self._work.wait()
        weight = self._values[0]
        return (torch.where(weight == 0, weight_unit, weight) / weight_unit).float()

    def _start_copy(self, device: torch.device) -> HostCopy:
        stream = _scalar_stream(device)
        with stream.running(stream.mark()):
            self._work.wait()
            return HostCopy(self._values)


@functools.cache
def _scalar_stream(device: torch.device) -> SideStream:
    return SideStream(device)


class StopVotes:
    """The sums over all workers at sync steps, and the votes on stopping between them.

    A vote is sent in every tenth step and counted ten steps later, long after its arrival: no worker waits for it,
    and all stop after the same step.

    Args:
        group: All workers.
        synchroniser: Synchroniser, which knows the sync steps.
    """

    def __init__(self, group: Group, synchroniser: Synchroniser) -> None:
        self._group = group
        self._synchroniser = synchroniser
        self._sync_scalars: StepScalars | None = None
        self._vote: StepScalars | None = None
        self.weight_since_sync: float | Tensor = 0.0
        """Weight of this worker's samples since the last sync step, to be reset after one."""
        self._weight_before: float | Tensor | None = None
        """That weight before the step under way."""

    def begin(self, number: int, weight: float | Tensor, loss: Tensor, stop: bool | Tensor) -> None:
        """Send this worker's scalars of step `number`, if it is a sync step or one with a vote."""
        self._weight_before = self.weight_since_sync
        self.weight_since_sync = self.weight_since_sync + weight
        if self._synchroniser.is_sync_step(number):
            self._sync_scalars = StepScalars(self._group, weight, loss, stop, weight_since_sync=self.weight_since_sync)
        if number % _VOTE_STEPS == 0 and self._vote is None:
            self._vote = StepScalars(self._group, 0.0, loss.new_zeros(()), stop)

    def commit(self) -> None:
        """Keep the weight of the step under way, whose update has ended."""
        self._weight_before = None

    def roll_back(self) -> None:
        """Forget the weight of the step under way, if there is one: it lasts until its update and exchange have ended.

        Otherwise samples that are taken again would weigh twice.
        """
        if self._weight_before is not None:
            self.weight_since_sync, self._weight_before = self._weight_before, None

    def end(self, number: int) -> tuple[StepTotals | None, bool]:
        """Return the totals of all workers, if step `number` is a sync step, and whether all stop after it."""
        all_totals, stop = None, False
        if self._sync_scalars is not None:
            all_totals, self._sync_scalars = self._sync_scalars.wait(), None
            stop = all_totals.stop
        if self._vote is not None and number % _VOTE_STEPS == _VOTE_STEPS - 1:
            stop |= self._vote.wait().stop
            self._vote = None
        return all_totals, stop


def read_loss(given: object, weight: object, reduction: str, shard: ModelShard) -> tuple[Tensor, float]:
    """Return a loss that backward may run from, and its weight.

    Raises:
        GradientError: The loss would be counted wrongly; the message says why.
        SettingsError: The loss uses parameters itself of which ranks of the shard's layout have parts.
    """
    loss: object = given
    if isinstance(given, Loss):
        loss, weight, reduction = given.mean, given.weight, "mean"
    if not isinstance(loss, Tensor):
        raise GradientError(f"loss must be a 0-dim tensor, but got {loss!r}; pass what the forward pass led to")
    shard.check_loss(loss)
    loss = loss if type(loss) is Tensor else full_tensor(loss)
    if loss.dim():
        raise GradientError(f"loss must be 0-dim, but got shape {tuple(loss.shape)}; take its mean or sum first")
    if weight is None:
        raise GradientError(
            "the weight of a loss must be given, or uneven shares would be averaged wrongly; call "
            "replica.backward(loss, weight=batch.count()), or batch.count(mask) for a mean over the mask's elements"
        )
    if not is_number(weight) or not 0 <= weight < math.inf:
        raise GradientError(f"weight must be a number of at least 0, but got {weight!r}; give batch.count()")
    if reduction not in ("mean", "sum"):
        raise GradientError(f"reduction must be mean or sum, but got {reduction!r}")
    if weight and not loss.requires_grad:
        raise GradientError(
            "loss must depend on parameters that require gradients, but it does not; run forward without "
            "torch.no_grad, and do not detach what it returns"
        )
    return loss, float(weight)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a number, or a tensor that holds one."""
    return isinstance(value, Real) or (isinstance(value, Tensor) and not value.dim())
