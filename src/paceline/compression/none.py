"""No compression: sums of uncompressed values."""

from torch import Size, Tensor

from paceline.compression.codec import (
    Algebra,
    Codec,
    CodecContext,
    Exchange,
    Request,
    State,
    dense_payloads,
    exchange_dense,
)
from paceline.registry import register


@register("none")
class NoCodec(Codec):
    """The identity, which every other codec degenerates to where it loses nothing.

    On the wire: one all-reduce of fp32, 4 bytes an element.
    """

    algebra = Algebra.LINEAR
    is_exact = True

    def exchange(self, value: Tensor, state: State, context: CodecContext) -> Exchange:
        """Sum the uncompressed value."""
        return exchange_dense(value)

    def payloads(self, shape: Size, num_workers: int) -> list[tuple[type[Request], int]]:
        """One round."""
        return dense_payloads(shape)
