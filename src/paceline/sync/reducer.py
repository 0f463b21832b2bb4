"""The contract of a reducer, which sums tensors over workers in flat buckets, encoded if there is a codec.

Every exchanged value is a numerator with a weight; `finalize` divides.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Size, Tensor

from paceline.comm.group import Work
from paceline.comm.link_speed import TimedExchange

Divisor = Callable[[], float | Tensor]
"""Function that returns the divisor of numerators, once the weights of all workers are known: a number, or on a GPU a
0-dim tensor of the calling thread's stream."""


@dataclass
class FlatBucket:
    """Some parameters' gradients, exchanged together.

    Args:
        name: Name in errors.
        buffer: Flat buffer: the gradients of all blocks, then one element per block that says whether it was used here.
        blocks: Gradients by parameter, as views of the buffer.
    """

    name: str
    buffer: Tensor
    blocks: dict[str, Tensor]
    findings: Tensor | None = None
    """If the exchange checks them, known once it is done: the number of workers whose gradients were not finite, and
    1 if the sum is finite, else 0; on the buffer's device."""

    numerators: Tensor = field(init=False)
    """Part of the buffer with the gradients."""
    flags: Tensor = field(init=False)
    """Usage elements at the buffer's end: summed, they say which blocks no worker used."""

    def __post_init__(self) -> None:
        num_elements = len(self.buffer) - len(self.blocks)
        self.numerators, self.flags = self.buffer[:num_elements], self.buffer[num_elements:]


def read_findings(buckets: Iterable[FlatBucket]) -> list[tuple[int, bool]]:
    """Return, for each bucket, the number of workers whose gradients were not finite, and whether the sum is finite.

    Buckets whose exchange does not check it count as finite. One read on a GPU, however many buckets there are.
    """
    checked = [bucket.findings for bucket in buckets]
    found = [findings for findings in checked if findings is not None]
    rows = iter(torch.stack(found).tolist() if found else [])
    return [(0, True) if findings is None else _as_numbers(next(rows)) for findings in checked]


def _as_numbers(row: list[float]) -> tuple[int, bool]:
    return int(row[0]), row[1] > 0


class GradientReducer(ABC):
    """Sums flat buckets over the workers. All ranks make the same calls; buckets are summed in that order."""

    bucket_bytes: int | None = None
    """Best size of a bucket; None for the device's default."""

    max_in_flight: int = 1
    """Number of exchanges under way at a time."""

    can_split: bool = False
    """Whether any part of a buffer may be exchanged separately, with the same result."""

    state_of: str = ""
    """Name of the codec whose state it keeps; no other codec can load it."""

    timed: list[TimedExchange] | None = None
    """List to which a codec's collectives are appended, if somebody has set one, who also empties it."""

    @abstractmethod
    def reduce(self, bucket: FlatBucket, divisor: Divisor, step: int, loss_scale: float = 1.0) -> Work:
        """Start to sum the bucket's blocks and flags over the workers, in place.

        Args:
            bucket: Bucket to sum; leave it alone until the work is done.
            divisor: Divisor of numerators. May be called from another thread.
            step: Number of updates done before.
            loss_scale: Scale of fp16's gradients, which stays in the sum.
        """

    def begin_layout(self, buckets: Sequence[FlatBucket]) -> None:
        """Set the buckets of a step, from now on."""

    @abstractmethod
    def finalize(self, bucket: FlatBucket, divisor: float) -> None:
        """Divide an arrived bucket's sums, in place, to make them means."""

    def commit(self, unused: Collection[str]) -> None:
        """Keep the new state of this step's exchanges, except for `unused` blocks, which have no gradient."""

    def roll_back(self) -> None:
        """Keep the state before this step: its sums were not used."""

    def state(self) -> dict[str, Tensor]:
        """Return this worker's state, as named tensors."""
        return {}

    def detached_state(self, shapes: Mapping[str, Size]) -> dict[str, Tensor]:
        """Return this worker's state for any other number of workers (`Codec.detach`); nothing is exchanged."""
        return self.state()

    def load_state(self, saved: list[dict[str, Tensor]], shapes: Mapping[str, Size]) -> None:
        """Load the states that all workers saved, whatever their number was."""

    @abstractmethod
    def wire_bytes(self, bucket: FlatBucket) -> int:
        """Return the bytes that this worker sends for such a bucket."""

    def close(self) -> None:
        """Close connections and threads."""
