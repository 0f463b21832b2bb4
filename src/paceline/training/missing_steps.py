"""Lines of the log that a lost first worker did not come to write: those of steps that others have made too."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from paceline.monitor.events import StepFinished
from paceline.monitor.reader import find_last_step
from paceline.replica.step_result import StepResult
from paceline.training.log_events import note_step
from paceline.training.session import Session
from paceline.training.training import Training

_MOST_SENT = 3
"""Number of steps that workers of a layout tell each other: none of them is further ahead of another."""


def note_unfinished(session: Session, num_samples: int) -> None:
    """Note the step whose update was the last that this worker made before others were lost."""
    state = session.replica.state
    number, result = state.last_result or (-1, None)
    if number == state.num_updates and isinstance(result, StepResult):
        note_step(session, result, num_samples)


def log_missing_steps(training: Training, steps: Iterable[tuple[int, StepFinished]]) -> None:
    """Log those of the `steps` up to the present one that the log does not have; only the first worker calls it."""
    newest = find_last_step(training.log.path)
    for step, event in sorted(dict(steps).items()):  # of a step that was made again the last
        if newest < step <= training.step:
            training.log.write(event, step=step)


def show_steps(training: Training) -> list[list[Any]]:
    """Return the newest steps of this worker, as JSON."""
    return [[step, asdict(event)] for step, event in list(training.newest_steps)[-_MOST_SENT:]]


def read_steps(shown: Iterable[list[Any]]) -> list[tuple[int, StepFinished]]:
    """Return the steps that workers have shown."""
    return [(step, StepFinished(**event)) for step, event in shown]
