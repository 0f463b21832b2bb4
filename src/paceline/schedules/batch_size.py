"""Batch schedules: the number of samples of a step, over all workers.

A larger batch late in training has the effect of a lower learning rate, with fewer updates and less communication for
the same samples (Smith et al. 2018, "Don't decay the learning rate, increase the batch size"). Samples keep their one
global order: a schedule only decides where batches end. The learning rate follows the batch by the optimizer's
`scaling`: not at all if growth replaces a decay.
"""

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.registry import Family, register


class BatchSchedule(Family):
    """The global batch of each step; that of the first is the run's `global_batch`."""

    family = "batch schedule"

    def plan(self, first: int, num_steps: int) -> list[tuple[int, int]]:
        """Return the changes known before training: (step, global batch from that step on), in order.

        Args:
            first: Global batch of step 0.
            num_steps: Steps of the run.
        """
        return []

    def check(self, first: int) -> None:
        """Refuse a first global batch that the schedule cannot start with.

        Raises:
            ValueError: The batch is refused; the message names allowed ones.
        """

    def smallest(self, first: int) -> int:
        """Return the smallest global batch that any step may take."""
        return first

    @property
    def adds_micro_batches(self) -> bool:
        """Whether a batch that has grown is split into more micro-batches, rather than into larger ones."""
        return False

    @property
    def noise_interval(self) -> int:
        """Steps between the measurements of the gradient noise scale that the schedule needs; 0 if it needs none."""
        return 0


@register("constant")
class ConstantBatch(BatchSchedule):
    """The same batch at every step."""


class ChangingBatch(BatchSchedule):
    """A batch that changes, and how its micro-batches change with it."""

    micro_batches: Literal["more", "larger"] = "more"
    """Change of a larger batch: more micro-batches, which keeps memory the same, or larger ones."""

    @property
    def adds_micro_batches(self) -> bool:
        """Whether `micro_batches` is "more"."""
        return self.micro_batches == "more"


@register("growing")
class GrowingBatch(ChangingBatch):
    """b(t) = min(b_max, b(0) * factor^n), with n = t // interval. With a factor of 1 it is the constant batch."""

    factor: float = Field(default=2.0, ge=1)
    """Factor of each growth."""
    interval: int = Field(default=100, ge=1)
    """Steps from one growth to the next."""
    max_batch: int = Field(default=256, ge=1)
    """Largest global batch, in samples."""

    def check(self, first: int) -> None:
        """Refuse a first batch beyond the largest."""
        _check_range(self, first, 1, self.max_batch)

    def plan(self, first: int, num_steps: int) -> list[tuple[int, int]]:
        """Return the growths before `num_steps`, until the largest batch is reached."""
        changes: list[tuple[int, int]] = []
        batch, step = first, self.interval
        while step < num_steps and batch < self.max_batch and self.factor > 1:
            grown = round(min(self.max_batch, first * self.factor ** (step // self.interval)))
            if grown > batch:
                changes.append((step, grown))
            batch, step = grown, step + self.interval
        return changes


@register("stepped")
class SteppedBatch(ChangingBatch):
    """A batch with a given size for each range of steps."""

    steps: tuple[tuple[int, int], ...] = ()
    """Pairs of a step and the global batch from that step on: [[1000, 64], [2000, 256]]."""

    @field_validator("steps")
    @classmethod
    def _must_ascend(cls, steps: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        numbers = [0, *(step for step, _ in steps)]
        if any(later <= earlier for earlier, later in pairwise(numbers)) or any(batch < 1 for _, batch in steps):
            raise ValueError(
                f"steps must be pairs of ascending steps from 1 on and batches of at least 1, but got {steps}; "
                "the first batch is global_batch"
            )
        return steps

    def plan(self, first: int, num_steps: int) -> list[tuple[int, int]]:
        """Return the pairs before `num_steps`."""
        return [(step, batch) for step, batch in self.steps if step < num_steps]

    def smallest(self, first: int) -> int:
        """Return the smallest of all batches."""
        return min([first, *(batch for _, batch in self.steps)])


@register("noise_scale")
class NoiseScaleBatch(ChangingBatch):
    """A batch that follows the measured gradient noise scale.

    McCandlish et al. 2018, "An empirical model of large-batch training". At a batch of ``tr(S) / |G|^2``
    samples, noise and signal weigh the same in a step: below it twice the batch is worth nearly twice the steps, above
    it more samples are mostly wasted. If the noise is so large that ``|G|^2`` cannot be distinguished from 0, the batch
    grows as fast as `max_change` allows. A change takes effect once the samples that are read ahead are used. With
    min_batch = max_batch it is the constant batch.
    """

    interval: int = Field(default=50, ge=1)
    """Steps from one measurement, and change, to the next."""
    min_batch: int | None = Field(default=None, ge=1)
    """Smallest global batch, in samples; by default that of the first step."""
    max_batch: int = Field(default=256, ge=1)
    """Largest global batch, in samples."""
    multiple_of: int = Field(default=8, ge=1)
    """Divisor of the batch: it is rounded to a multiple of this, if one lies in the range."""
    max_change: float = Field(default=2.0, gt=1)
    """Largest factor of growth or shrinkage in one change, since a single measurement is noisy."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_batch is not None and self.min_batch > self.max_batch:
            raise ValueError(
                f"min_batch must be at most max_batch, but got {self.min_batch} and {self.max_batch}; swap them"
            )
        return self

    def check(self, first: int) -> None:
        """Refuse a first batch outside the range."""
        _check_range(self, first, self.min_batch or 1, self.max_batch)

    def smallest(self, first: int) -> int:
        """Return the lower end of the range."""
        return self.min_batch or first

    @property
    def noise_interval(self) -> int:
        """Steps between measurements: the schedule's `interval`."""
        return self.interval

    def choose(self, noise_scale: float | None, present: int, first: int) -> int:
        """Return the global batch that follows `present`.

        Args:
            noise_scale: Measured noise scale, in samples; None if it is too large to be measured.
            present: Present global batch.
            first: Global batch of step 0.
        """
        most, least = present * self.max_change, present / self.max_change
        wanted = most if noise_scale is None else min(most, max(least, noise_scale))
        rounded = round(wanted / self.multiple_of) * self.multiple_of
        return min(self.max_batch, max(self.smallest(first), rounded))


def _check_range(schedule: BatchSchedule, first: int, least: int, most: int) -> None:
    if not least <= first <= most:
        raise ValueError(
            f"global_batch must be from {least} to {most} with batch_schedule {schedule.name}, but got {first}; change "
            "it, or the schedule's largest and smallest batch"
        )
