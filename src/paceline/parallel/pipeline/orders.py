"""The orders in which the ranks of a pipeline work, each with its assignment of stages and its theoretical bubble."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

OrderName = Literal["layer_wise", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
ChunkLoss = Callable[[Any, Any], Tensor]
"""Function from the model's output and data of a micro-batch to the value that backward starts from."""
LossOfPlaces = Callable[[Tensor, Tensor], Tensor]
"""The same, from the output and the indices of its samples in the batch."""
TorchSchedule = PipelineScheduleSingle | PipelineScheduleMulti


@dataclass(frozen=True, kw_only=True)
class Order:
    """Properties of an order of work."""

    kind: type[TorchSchedule]
    """Torch's class that executes it."""
    bubble: Callable[[int, int, int], float | None]
    """Idle share of a step by ranks, stages per rank and micro-batches, if forward, backward to the inputs and
    backward to the weights of all stages take the same time; None if there is no formula."""
    stages_per_rank: tuple[int, int | None] = (1, 1)
    """Fewest and most stages on a rank."""
    splits_backward: bool = False
    """Whether gradients of weights are computed separately from those of inputs."""
    is_v: bool = False
    """Whether stages go up the ranks and down again, so that the first rank holds the last stage too."""
    in_rounds: bool = False
    """Whether micro-batches go in rounds of equal size: as many as there are ranks, or a few more."""

    def takes(self, stages_per_rank: int) -> bool:
        """Return whether a rank may hold that number of stages."""
        least, most = self.stages_per_rank
        return least <= stages_per_rank <= (most or stages_per_rank)

    def can_run(self, num_micro_batches: int, num_ranks: int) -> bool:
        """Return whether the order is defined for that number of micro-batches."""
        return not self.in_rounds or num_micro_batches % max(1, num_micro_batches // num_ranks) == 0

    def place(self, stage: int, num_ranks: int) -> int:
        """Return the position on the pipeline axis of the rank that holds a stage."""
        lap, place = divmod(stage, num_ranks)
        return num_ranks - 1 - place if self.is_v and lap % 2 else place

    def make(self, stages: Sequence[PipelineStage], num_micro_batches: int, loss: LossOfPlaces) -> TorchSchedule:
        """Return torch's schedule of one rank's `stages`. It sums gradients and divides nothing."""
        kind = self.kind
        if issubclass(kind, PipelineScheduleSingle):
            (stage,) = stages
            if kind is Schedule1F1B and num_micro_batches < stage.num_stages:
                kind = ScheduleGPipe  # torch refuses; with one micro-batch both are the same
            return kind(stage, num_micro_batches, loss_fn=loss, scale_grads=False)
        return kind(list(stages), num_micro_batches, loss_fn=loss, scale_grads=False)


def _one_stage(num_ranks: int, _: int, num_micro_batches: int) -> float:
    return (num_ranks - 1) / (num_micro_batches + num_ranks - 1)


def _interleaved(num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> float:
    # Fewer micro-batches than ranks leave a gap in each lap but the first.
    idle = num_ranks - 1 + (stages_per_rank - 1) * max(0, num_ranks - num_micro_batches)
    return idle / (stages_per_rank * num_micro_batches + idle)


def _zero_bubble(num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> float | None:
    if num_micro_batches < num_ranks:
        return None
    return (num_ranks - 1) / (3 * stages_per_rank * num_micro_batches + num_ranks - 1)


def _zbv(num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> float | None:
    if num_micro_batches < 2 * num_ranks - 1:
        return None
    return (num_ranks - 1) / (3 * stages_per_rank * num_micro_batches + num_ranks - 1)


ORDERS: dict[OrderName, Order] = {
    "layer_wise": Order(kind=ScheduleGPipe, bubble=_one_stage),
    "gpipe": Order(kind=ScheduleGPipe, bubble=_one_stage),
    "1f1b": Order(kind=Schedule1F1B, bubble=_one_stage),
    "interleaved": Order(kind=ScheduleInterleaved1F1B, bubble=_interleaved, stages_per_rank=(2, None), in_rounds=True),
    "zero_bubble": Order(
        kind=ScheduleInterleavedZeroBubble,
        bubble=_zero_bubble,
        stages_per_rank=(1, None),
        splits_backward=True,
        in_rounds=True,
    ),
    "zbv": Order(kind=ScheduleZBVZeroBubble, bubble=_zbv, stages_per_rank=(2, 2), splits_backward=True, is_v=True),
}
"""Orders by name, with their papers:

- layer_wise: one micro-batch, so that one rank works at a time (model parallelism without pipelining); gpipe with 1.
- gpipe: all forwards, then all backwards (Huang et al. 2019). Keeps the activations of all micro-batches.
- 1f1b: forwards and backwards by turns (Narayanan et al. 2019, PipeDream-flush 2021). The bubble of gpipe,
  (p - 1) / (m + p - 1), but activations of p micro-batches at most.
- interleaved: several stages a rank (Narayanan et al. 2021). Bubble (p - 1) / (v m + p - 1), v times the messages.
- zero_bubble: ZB-H1 (Qi et al. 2023): gradients of weights fill the idle time. (p - 1) / (3 v m + p - 1).
- zbv: ZB-V of the same paper in torch's form, which leaves (p - 1) / (6 m + p - 1) rather than zero.

A step sends each micro-batch's activations and their gradients once over each boundary between ranks.
"""
