"""Samples that a loader will read, for storages that fetch ahead and drop by next use."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from paceline.data.base import Source
from paceline.data.division import Ending
from paceline.data.order import GlobalOrder, Interval, Positions, list_positions
from paceline.data.orders import Indices
from paceline.data.pipeline import StepReads


class UpcomingSamples:
    """The global order from a position on, and this worker's part of it.

    Args:
        order: Global order.
        position: Position of the first sample that is not read yet.
        ending: End of the data, which may move where data grows.
        divide: Function that returns the step from a position on, and its parts that this worker reads.
    """

    def __init__(
        self,
        order: GlobalOrder,
        position: int,
        ending: Ending,
        divide: Callable[[int], tuple[Interval, Sequence[Positions]]],
    ) -> None:
        self.position = position
        """Position before which this worker reads no more; the loader moves it."""
        self._order, self._ending, self._divide = order, ending, divide

    @property
    def stop(self) -> int | None:
        """Position at which the data ends; None if it does not."""
        return self._ending.position

    @property
    def epoch_samples(self) -> int:
        """Number of positions in an epoch."""
        return self._order.num_samples

    def samples(self, start: int, stop: int) -> Indices:
        """Return the index of the sample at each position."""
        return self._order.samples_at(Interval(start, stop))

    def step_at(self, position: int) -> tuple[int, Indices]:
        """Return the end of the step that begins at a position, and the positions in it that this worker reads."""
        interval, parts = self._divide(position)
        return interval.stop, np.concatenate([list_positions(part) for part in parts])


def announce(
    source: Source,
    upcoming: UpcomingSamples,
    steps: Iterator[StepReads],
    num_ahead: int,
) -> Iterator[StepReads]:
    """Yield the steps that a loader plans, after `source` was told of them all, and again when the data has grown.

    Args:
        source: Source that will read them.
        upcoming: Samples from the first step on; its position is moved as steps are planned.
        steps: Steps that are planned.
        num_ahead: Number of steps, before one that is planned, that may still be read.
    """
    starts: deque[int] = deque(maxlen=num_ahead + 1)
    source.expect(upcoming)
    epoch_samples = upcoming.epoch_samples
    for step in steps:
        starts.append(step.interval.start)
        upcoming.position = starts[0]
        if epoch_samples != upcoming.epoch_samples:  # later epochs have other samples in other places
            epoch_samples = upcoming.epoch_samples
            source.expect(upcoming)
        yield step
