"""How many samples each step takes, and from where in the global order on."""

import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from paceline.data.order import GlobalOrder


class Stretch(NamedTuple):
    """Steps that take the same global batch: from `step` on, which begins at `position`."""

    step: int
    position: int
    batch: int


class Batches:
    """The global batch of each step, as stretches of the global order.

    A loader's background thread reads it while the training changes it.

    Args:
        order: What is cut into batches.
        first: Global batch of step 0.
        changes: Pairs of a step and the global batch from that step on, by ascending step.
    """

    def __init__(self, order: GlobalOrder, first: int, changes: Sequence[tuple[int, int]] = ()) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._planned = [(0, first), *changes]
        self._stretches = self._lay_out(0, 0)

    @property
    def newest(self) -> int:
        """The global batch of the last stretch."""
        with self._lock:
            return self._stretches[-1].batch

    def at(self, position: int) -> int:
        """Return the global batch of the step that begins at `position`."""
        with self._lock:
            return self._find(position).batch

    def step_of(self, position: int) -> int:
        """Return how many steps are done at `position`."""
        with self._lock:
            stretch = self._find(position)
        return stretch.step + self._order.step_of(position, stretch.batch, start=stretch.position)

    def position_of(self, step: int) -> int:
        """Return the position at which `step` begins."""
        with self._lock:
            stretch = self._stretches[bisect_right(self._stretches, step, key=lambda one: one.step) - 1]
        return self._order.position_of(step - stretch.step, stretch.batch, start=stretch.position)

    def change(self, position: int, batch: int) -> None:
        """Let steps take `batch` samples from `position` on, where a step begins; what was planned beyond it falls."""
        step = self.step_of(position)
        with self._lock:
            kept = [stretch for stretch in self._stretches if stretch.position < position]
            self._stretches = [*kept, Stretch(step, position, batch)]

    def resume(self, step: int, position: int) -> None:
        """Go on as planned, with `step` at `position`."""
        with self._lock:
            self._stretches = self._lay_out(step, position)

    def state(self, position: int) -> list[list[int]]:
        """Return the stretch that `position` is in, cut to begin there, and those that follow, as JSON."""
        here = Stretch(self.step_of(position), position, self.at(position))
        with self._lock:
            return [list(here), *(list(stretch) for stretch in self._stretches if stretch.position > position)]

    def load(self, state: Sequence[Sequence[int]]) -> None:
        """Take on a saved state."""
        with self._lock:
            self._stretches = [Stretch(*stretch) for stretch in state]

    def _lay_out(self, step: int, position: int) -> list[Stretch]:
        batch = [batch for start, batch in self._planned if start <= step][-1]
        stretches = [Stretch(step, position, batch)]
        for start, batch in self._planned:
            if start > step:
                last = stretches[-1]
                position = self._order.position_of(start - last.step, last.batch, start=last.position)
                stretches.append(Stretch(start, position, batch))
        return stretches

    def _find(self, position: int) -> Stretch:
        number = bisect_right(self._stretches, position, key=lambda stretch: stretch.position)
        return self._stretches[max(0, number - 1)]
