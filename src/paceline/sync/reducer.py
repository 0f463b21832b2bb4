"""What sums tensors over workers, in flat buckets: as they are, or through a codec.

Everything exchanged is a numerator whose weight travels beside it; `finalize` divides.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Size, Tensor

from paceline.comm.group import Work


@dataclass
class FlatBucket:
    """Some parameters' gradients, exchanged together.

    Args:
        name: What errors call it.
        buffer: Flat: the gradients of all blocks, then one element a block that says whether it was used here.
        blocks: The gradients, by parameter: views of the buffer.
    """

    name: str
    buffer: Tensor
    blocks: dict[str, Tensor]
    num_non_finite: int = 0
    """Workers whose gradients were not finite, where the exchange looked; known once it is done."""

    numerators: Tensor = field(init=False)
    """The gradients' part of the buffer."""
    flags: Tensor = field(init=False)
    """The usage elements at the buffer's end: summed, they say which blocks nobody used."""

    def __post_init__(self) -> None:
        num_elements = len(self.buffer) - len(self.blocks)
        self.numerators, self.flags = self.buffer[:num_elements], self.buffer[num_elements:]


class GradientReducer(ABC):
    """Sums flat buckets over the workers. Ranks call it alike; buckets are summed in the order of the calls."""

    bucket_bytes: int | None = None
    """Size of a bucket that suits it; None where the device's does."""

    max_in_flight: int = 1
    """Exchanges under way at a time."""

    can_split: bool = False
    """Whether any part of a buffer may be exchanged by itself, with the same result."""

    state_of: str = ""
    """Name of the codec whose state it keeps; no other can go on from that."""

    @abstractmethod
    def reduce(self, bucket: FlatBucket, divisor: Callable[[], float], step: int, loss_scale: float = 1.0) -> Work:
        """Start to sum the bucket's blocks and flags over the workers, in place.

        Args:
            bucket: What is summed; to be left alone until the work is done.
            divisor: Returns what numerators are divided by to become gradients, once all workers have said their
                weights. May be called from another thread.
            step: Updates done before.
            loss_scale: What fp16's gradients are scaled by; they stay so.
        """

    def begin_layout(self, buckets: Sequence[FlatBucket]) -> None:
        """Note the buckets of a step, from now on."""

    @abstractmethod
    def finalize(self, bucket: FlatBucket, divisor: float) -> None:
        """Make means of an arrived bucket's sums, in place."""

    def commit(self, unused: Collection[str]) -> None:
        """Keep the state that this step's exchanges led to, but for blocks that nobody used: these have no gradient."""

    def roll_back(self) -> None:
        """Keep the state from before this step: its sums were not used."""

    def state(self) -> dict[str, Tensor]:
        """Return this worker's state, as named tensors."""
        return {}

    def load_state(self, saved: list[dict[str, Tensor]], shapes: Mapping[str, Size]) -> None:
        """Take on the states that all workers saved, of whatever number they were."""

    @abstractmethod
    def wire_bytes(self, bucket: FlatBucket) -> int:
        """Return the bytes this worker sends for such a bucket."""

    def close(self) -> None:
        """Let connections and threads go."""
