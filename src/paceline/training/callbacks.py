"""Functions of a person's own that are called with what happens in a training."""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from paceline.functions import Function

if TYPE_CHECKING:
    from paceline.training.run import Run
    from paceline.training.training import Training


class Callback(Function):
    """A function that is called with each event of a training, and with a view of it.

    `paceline.monitor` has the events: `StepFinished` after each step, `Evaluated`, `CheckpointSaved` and others. It is
    called after the event was written to the log, in the midst of training, which waits for it.
    """

    given: ClassVar[tuple[str, ...]] = ("an event", "the training")

    all_workers: bool = False
    """Whether every worker calls it, each with the events that it knows; by default rank 0 alone."""


class TrainingView:
    """What a callback may know of a training, and ask of it."""

    def __init__(self, training: "Training") -> None:
        self._training = training

    @property
    def run(self) -> "Run":
        """Settings of the run."""
        return self._training.run

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return self._training.directory

    @property
    def step(self) -> int:
        """Updates done."""
        return self._training.step

    @property
    def num_steps(self) -> int:
        """Updates of the whole training."""
        return self._training.num_steps

    @property
    def rank(self) -> int:
        """This process's number."""
        return self._training.replica.shard.world.rank

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._training.replica.shard.data_parallel_group.size

    @property
    def module(self) -> nn.Module:
        """The module that is trained, or this rank's part of it; it is to be looked at, not changed."""
        return self._training.replica.module

    def request_stop(self, reason: str = "a callback asked for it") -> None:
        """Ask all workers to end the training after a step; it is then evaluated and finished as after its last one."""
        self._training.end_reason = self._training.end_reason or reason
        self._training.membership.request_stop(reason)
