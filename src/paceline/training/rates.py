"""The learning rates of a run, step by step."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from paceline.errors import SettingsError
from paceline.optim import Optimizer
from paceline.schedules import DecaySchedule, FunctionSchedule, LearningRate

_FUNCTION_OF_STEP = "for a factor of each step give functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=...)"


class Rates:
    """Sets the learning rates of an optimizer before each step.

    A torch scheduler is built on a stand-in, whose parameter groups have the settings of the optimizer's: its changes
    (learning rates, momentum) are then set in the optimizer, scaled by `Optimizer.scaling`. So
    it also works if a server steps, or ranks share the optimizer's state.

    Args:
        optimizer: New optimizer, with the learning rates from which the schedule starts.
        settings: Settings of that optimizer.
        schedule: Learning-rate schedule.
        num_steps: Number of steps of the whole training.

    Raises:
        SettingsError: The schedule returns no scheduler, or one that follows a loss or ends before the training.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: Optimizer, schedule: LearningRate, num_steps: int
    ) -> None:
        self._settings, self._schedule, self._num_steps = settings, schedule, num_steps
        self._optimizer = optimizer
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._given = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._stand_in = _StandIn(optimizer)
        self._num_scheduled = 0
        self._scheduler: Any = None
        if isinstance(schedule, FunctionSchedule):
            self._scheduler = _build(schedule, self._stand_in, num_steps)

    def set(self, step: int, global_batch: int) -> None:
        """Set the rates of `step`, which takes `global_batch` samples; steps must ascend."""
        factor = self._settings.scale_rate(global_batch)
        groups = self._optimizer.param_groups  # other groups after a state was loaded
        if isinstance(self._schedule, DecaySchedule):
            scheduled = self._schedule.factor(step, self._num_steps)
            for group, rate in zip(groups, self._base, strict=True):
                group["lr"] = rate * factor * scheduled
            return
        while self._num_scheduled < step:
            self._step()
        for group, changed in zip(groups, self._stand_in.param_groups, strict=True):
            settings = {name: value for name, value in changed.items() if name in group and name != "params"}
            group.update(settings | {"lr": settings["lr"] * factor})

    def _step(self) -> None:
        try:
            self._scheduler.step()
        except Exception as error:
            error.add_note(
                f"This is of the schedule, which must have a learning rate for each of the run's {self._num_steps} "
                f"steps, at step {self._num_scheduled + 1}; give it the run's number of steps."
            )
            raise
        self._num_scheduled += 1

    def reset(self) -> None:
        """Give the optimizer back the settings from which the schedule starts, so that others can be made for it."""
        for group, given in zip(self._optimizer.param_groups, self._given, strict=True):
            group.update(given)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the scheduler and the stand-in; empty without a scheduler."""
        if self._scheduler is None:
            return {}
        return {
            "schedule": self._schedule.model_dump_json(),
            "num_scheduled": self._num_scheduled,
            "scheduler": self._scheduler.state_dict(),
            "groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in self._stand_in.param_groups
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; if it is of another schedule, this one is stepped from its beginning instead."""
        if self._scheduler is None or state.get("schedule") != self._schedule.model_dump_json():
            return
        self._scheduler.load_state_dict(state["scheduler"])
        for group, saved in zip(self._stand_in.param_groups, state["groups"], strict=True):
            group.update(saved)
        self._num_scheduled = state["num_scheduled"]


class _StandIn(torch.optim.Optimizer):
    """An optimizer without parameters, with the settings of another's parameter groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [{**group, "params": [torch.zeros(1, requires_grad=True)]} for group in optimizer.param_groups]
        super().__init__(groups, dict(optimizer.defaults))
        self._opt_called = True  # otherwise a scheduler would warn that no step was taken

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def _build(schedule: FunctionSchedule, stand_in: _StandIn, num_steps: int) -> LRScheduler:
    path = schedule.path
    try:
        scheduler = schedule.build(stand_in, num_steps)
    except TypeError as error:
        if _StandIn.__name__ not in str(error):  # it was not taken for a number
            raise
        raise SettingsError(
            f"{path} must take an optimizer and return a torch learning-rate scheduler, but takes a number ({error}); "
            f"{_FUNCTION_OF_STEP}"
        ) from error
    if isinstance(scheduler, ReduceLROnPlateau):
        raise SettingsError(
            f"{path} must return a torch learning-rate scheduler that is stepped without a loss, but got "
            "ReduceLROnPlateau; take one such as OneCycleLR, and for a plateau stop_after"
        )
    if not isinstance(scheduler, LRScheduler):
        raise SettingsError(
            f"{path} must take an optimizer and return a torch learning-rate scheduler, but got "
            f"{type(scheduler).__name__}; take one such as OneCycleLR, or {_FUNCTION_OF_STEP}"
        )
    if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < num_steps - 1:
        raise SettingsError(
            f"total_steps of {path} must be at least the run's {num_steps} steps, but got {scheduler.total_steps}; "
            "leave it out, for the run's own number, or lower --num_steps"
        )
    return scheduler
