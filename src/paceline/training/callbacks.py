"""Functions of the user's that are called with the events of a training."""

from typing import ClassVar

from paceline.functions import Function


class Callback(Function):
    """A function that is called with each event of a training, and with a view of it.

    `paceline.monitor` has the events: `StepFinished` after each step, `Evaluated`, `CheckpointSaved` and others. The
    function is called after the event was written to the log, and training waits for it.
    """

    given: ClassVar[tuple[str, ...]] = ("an event", "the training")

    all_workers: bool = False
    """Whether every worker calls the function, each with its own events; by default only rank 0 does."""
