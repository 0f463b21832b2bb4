"""The positions of the global order that were handed out, and those that were used."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.data.order import GlobalOrder, Interval
from paceline.errors import SettingsError


class Dispatcher(Protocol):
    """Interface through which a worker that runs at its own pace claims positions."""

    @property
    def is_stopping(self) -> bool:
        """Whether `claim` returned None because some worker was asked to stop."""

    @property
    def lost(self) -> str:
        """Words on a worker that is lost, so that the others stop after their present step; empty while none is."""

    def set_source(self, claim_next: Callable[[int], tuple[int, int]], mark_used: Callable[[int, int], None]) -> None:
        """Set the source of positions: `claim_next` returns the next ones, `mark_used` is told which were used."""

    def set_boundary(self, position: int) -> None:
        """Hand out no positions from `position` on; every worker calls it, after the previous boundary was reached."""

    def claim(self, num_samples: int) -> tuple[int, int] | None:
        """Return start and stop of the next unclaimed positions; None where all workers synchronise."""

    def ack(self, interval: tuple[int, int]) -> bool:
        """Record that claimed positions were used; False if they do not count, and are handed out again."""


@dataclass
class Ledger:
    """The positions that were handed out, and those that were used.

    `low_water` is the position below which every sample has been used; `done_above` holds intervals above it that were
    used out of order. A checkpoint keeps both: all other claimed positions are claimed again after a restart, so no
    sample is lost and none is used twice. If all workers step together the state is one integer.
    """

    low_water: int = 0
    done_above: list[Interval] = field(default_factory=list)
    next_claim: int = field(init=False)
    _dropped: dict[int, int] = field(init=False, default_factory=dict)
    """Dropped ends of epochs, by their first position; they count as used once the positions after them are."""

    def __post_init__(self) -> None:
        self.next_claim = self.low_water

    def claim(self, order: GlobalOrder, global_batch: int | Callable[[int], int]) -> Interval:
        """Hand out the next unclaimed global batch.

        Args:
            order: Global order of the positions.
            global_batch: Size of the batch, or a function from the position at which it begins to its size.
        """
        while (interval := self._find_next(order, global_batch)).start > self.next_claim:
            self._dropped[self.next_claim] = interval.start
            self.next_claim = interval.start
        stops = [done.start for done in self.done_above if interval.start < done.start < interval.stop]
        interval = Interval(interval.start, min(stops, default=interval.stop))
        self.next_claim = interval.stop
        return interval

    def _find_next(self, order: GlobalOrder, global_batch: int | Callable[[int], int]) -> Interval:
        self.next_claim = max(self.next_claim, self.low_water)  # the low-water mark may be ahead
        for done in sorted(self.done_above):
            if done.start <= self.next_claim < done.stop:
                self.next_claim = done.stop
        size = global_batch if isinstance(global_batch, int) else global_batch(self.next_claim)
        return order.next_batch(self.next_claim, size)

    def ack(self, interval: Interval) -> None:
        """Note that every sample of a claimed `interval` has been used.

        Raises:
            SettingsError: The interval was never claimed, or was acknowledged before.
        """
        overlaps = any(done.start < interval.stop and interval.start < done.stop for done in self.done_above)
        if interval.start < self.low_water or interval.stop > self.next_claim or overlaps:
            raise SettingsError(
                f"an acknowledged interval must be claimed and not yet used, but got {tuple(interval)} with "
                f"low water {self.low_water} and next claim {self.next_claim}; acknowledge each batch once"
            )
        self.done_above = sorted([*self.done_above, interval])
        while self.done_above and self.done_above[0].start <= self._dropped.get(self.low_water, self.low_water):
            self.low_water = max(self._dropped.pop(self.low_water, 0), self.done_above.pop(0).stop)

    @classmethod
    def of_used(cls, position: int, used: Iterable[Sequence[int]]) -> "Ledger":
        """Return the ledger of samples that were used: those before a position, and sorted ranges."""
        above = []
        for start, stop in used:
            if start <= position:
                position = max(position, stop)
            else:
                above.append(Interval(start, stop))
        return cls(position, above)

    def list_gaps(self) -> list[Interval]:
        """Return positions that are not used, and are followed by used ones."""
        starts = [self.low_water, *(done.stop for done in self.done_above)]
        return [Interval(start, done.start) for start, done in zip(starts, self.done_above, strict=False)]

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint, as JSON."""
        return {"low_water": self.low_water, "done_above": [list(done) for done in self.done_above]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Ledger":
        """Return the ledger of a checkpoint."""
        return cls(int(state["low_water"]), [Interval(*done) for done in state["done_above"]])
