"""What sums tensors over workers, in parcels: as they are, or through a codec.

Everything exchanged is a numerator whose mass travels beside it; landing divides.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Size, Tensor

from paceline.comm.group import Work


@dataclass
class Parcel:
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


class Exchanger(ABC):
    """Carries out a rule for one replica. Ranks call it alike; parcels are exchanged in the order of the calls."""

    bucket_bytes: int | None = None
    """Size of a parcel that suits it; None where the device's does."""

    num_lanes: int = 1
    """Exchanges under way at a time."""

    can_split: bool = False
    """Whether any part of a buffer may be exchanged by itself, with the same result."""

    state_of: str = ""
    """Name of the codec whose state it keeps; no other can go on from that."""

    @abstractmethod
    def exchange(self, parcel: Parcel, divisor: Callable[[], float], step: int, loss_scale: float = 1.0) -> Work:
        """Start to sum the parcel's blocks and flags over the workers, in place.

        Args:
            parcel: What is exchanged; to be left alone until the work is done.
            divisor: Returns what numerators are divided by to become gradients, once all workers have said their
                weights. May be called from another thread.
            step: Updates done before.
            loss_scale: What fp16's gradients are scaled by; they stay so.
        """

    def begin_layout(self, parcels: Sequence[Parcel]) -> None:
        """Note the buckets of a step, from now on."""

    @abstractmethod
    def land(self, parcel: Parcel, divisor: float) -> None:
        """Make gradients of an arrived parcel, in place."""

    def commit(self, unused: Collection[str]) -> None:
        """Keep the state that this step's exchanges led to, but for blocks that nobody used: they were not landed."""

    def roll_back(self) -> None:
        """Keep the state from before this step: its exchanges were not landed."""

    def state(self) -> dict[str, Tensor]:
        """Return this worker's state, as named tensors."""
        return {}

    def load_state(self, saved: list[dict[str, Tensor]], shapes: Mapping[str, Size]) -> None:
        """Take on the states that all workers saved, of whatever number they were."""

    @abstractmethod
    def wire_bytes(self, parcel: Parcel) -> int:
        """Return the bytes this worker sends in an exchange of such a parcel."""

    def close(self) -> None:
        """Let connections and threads go."""
