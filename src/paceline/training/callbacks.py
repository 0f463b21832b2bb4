"""Functions of a person's own that are called with what happens in a training."""

from typing import ClassVar

from paceline.functions import Function


class Callback(Function):
    """A function that is called with each event of a training, and with a view of it.

    `paceline.monitor` has the events: `StepFinished` after each step, `Evaluated`, `CheckpointSaved` and others. It is
    called after the event was written to the log, in the midst of training, which waits for it.
    """

    given: ClassVar[tuple[str, ...]] = ("an event", "the training")

    all_workers: bool = False
    """Whether every worker calls it, each with the events that it knows; by default rank 0 alone."""
