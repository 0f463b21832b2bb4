"""Learning-rate schedules: factors of the optimizer's learning rate, step by step."""

import math
from abc import abstractmethod
from typing import Any, ClassVar

from pydantic import Field

from paceline.functions import Function
from paceline.registry import Family, register


class LearningRate(Family):
    """Change of learning rates from step to step. A `Run` also takes a function that returns a torch scheduler."""

    family = "learning-rate schedule"


class DecaySchedule(LearningRate):
    """A factor of the base learning rate for each step: a linear warm-up, then the decay of the variant."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the factor rises linearly to 1 (Goyal 2017), by 1 / `warmup_steps` each."""
    warmup_from: float = Field(default=0.0, ge=0, le=1)
    """Factor that the warm-up starts from, before the first step."""

    def factor(self, step: int, total_steps: int) -> float:
        """Return the factor for update `step` (from 0) of `total_steps`."""
        if step < self.warmup_steps:
            return self.warmup_from + (1 - self.warmup_from) * (step + 1) / self.warmup_steps
        left = total_steps - self.warmup_steps
        return self.decay(min(1.0, (step - self.warmup_steps) / left) if left > 0 else 1.0)

    @abstractmethod
    def decay(self, progress: float) -> float:
        """Return the factor at `progress` from 0 (warm-up done) to 1 (the end)."""


@register("constant")
class Constant(DecaySchedule):
    """No decay."""

    def decay(self, progress: float) -> float:
        """Return 1."""
        return 1.0


@register("linear")
class Linear(DecaySchedule):
    """A straight line from 1 to `final_factor`."""

    final_factor: float = Field(default=0.0, ge=0)
    """Factor at the end, after the last step."""

    def decay(self, progress: float) -> float:
        """Return the point on the line."""
        return 1 + (self.final_factor - 1) * progress


@register("cosine")
class Cosine(DecaySchedule):
    """Half a cosine from 1 to `final_factor` (Loshchilov and Hutter 2017, without restarts)."""

    final_factor: float = Field(default=0.1, ge=0)
    """Factor at the end, after the last step."""

    def decay(self, progress: float) -> float:
        """Return the point on the cosine."""
        return self.final_factor + (1 - self.final_factor) * (1 + math.cos(math.pi * progress)) / 2


@register("polynomial")
class Polynomial(DecaySchedule):
    """A power of the remaining part of training, from 1 to `final_factor`: squared for LARS (You 2017), 1 for LAMB."""

    power: float = Field(default=2.0, gt=0)
    """Exponent of the remaining part; 1 is a straight line."""
    final_factor: float = Field(default=0.0, ge=0)
    """Factor at the end, after the last step."""

    def decay(self, progress: float) -> float:
        """Return the point on the curve."""
        return self.final_factor + (1 - self.final_factor) * math.pow(1 - progress, self.power)


@register("function")
class FunctionSchedule(Function, LearningRate):
    """A torch learning-rate scheduler, made by a function or by one of torch's classes.

    The function is called with an optimizer, and with the run's number of steps if it has a parameter ``num_steps``,
    ``total_steps`` or ``num_training_steps``. The optimizer stands for the run's own: it has the same parameter groups
    and settings, but tensors of one element as parameters. The scheduler is stepped once a step; its state is saved.
    """

    given: ClassVar[tuple[str, ...]] = ("the optimizer",)
    offered: ClassVar[tuple[str, ...]] = ("num_steps", "total_steps", "num_training_steps")
    returned: ClassVar[str] = "torch.optim.lr_scheduler:LRScheduler"

    def build(self, optimizer: Any, num_steps: int) -> Any:
        """Call the function.

        Raises:
            SettingsError: The function refuses its arguments.
        """
        return self.make(optimizer, **dict.fromkeys(self.offered, num_steps))
