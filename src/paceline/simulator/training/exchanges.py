"""What the axes of a layout exchange in a step, as numbers: bytes over links inside a host and between hosts."""

from dataclasses import dataclass, replace
from enum import IntEnum

from paceline.topology import Paths


class Axis(IntEnum):
    """Reason of an exchange, which says when it runs and what can hide it."""

    TENSOR = 0
    """Activations between operators, which little can hide."""
    CONTEXT = 1
    """Keys and values while attention computes."""
    PIPELINE = 2
    """Activations from one stage to the next."""
    SHARD = 3
    """Parameters and gradients of each micro-batch, beside its computing."""
    DATA = 4
    """Gradients of a step, beside the last backward."""


@dataclass(frozen=True)
class Exchange:
    """Exchange of one rank, `count` times in a micro-batch; in a step if its axis is `DATA`.

    Args:
        axis: Reason of it.
        local_bytes: Bytes that the rank sends to others of its host.
        network_bytes: Bytes that it sends to other hosts.
        num_messages: Messages that follow each other.
        count: Number of such exchanges.
    """

    axis: Axis
    local_bytes: float
    network_bytes: float
    num_messages: float
    count: float = 1.0


@dataclass(frozen=True, slots=True)
class GradientExchange:
    """Exchange between replicas, beside the usual one: an all-reduce of gradients a step, in buckets of default size.

    Args:
        sent: Bytes that a rank sends in a step, to those of the usual one.
        messages: Messages in a step, to its.
        parts: Buckets, to its: the last of them never hides behind computing.
        hidden_steps: Steps whose computing can hide that of one step; None: the last backward pass, as usual.
        coding: Passes of codecs over the gradients' fp32 bytes in a step, each as long as a copy of them.
        state_bytes: Bytes of state for each parameter: residuals, outer parameters and momentum.
    """

    sent: float = 1.0
    messages: float = 1.0
    parts: float = 1.0
    hidden_steps: float | None = None
    coding: float = 0.0
    state_bytes: float = 0.0

    def apply(self, exchange: Exchange) -> Exchange:
        """Return what becomes of the usual exchange."""
        return replace(
            exchange,
            local_bytes=exchange.local_bytes * self.sent,
            network_bytes=exchange.network_bytes * self.sent,
            num_messages=exchange.num_messages * self.messages,
        )


USUAL = GradientExchange()


@dataclass(frozen=True)
class AxisGroup:
    """Ranks of one axis: how many there are, and how many of them are on one host."""

    size: int
    on_host: int

    @classmethod
    def of_axis(cls, size: int, stride: int, paths: Paths) -> "AxisGroup":
        """Return the group of an axis whose neighbours are `stride` ranks apart."""
        return cls(size, min(size, max(1, paths.devices_per_host // stride)))

    def gather(self, axis: Axis, num_bytes: float, count: float = 1.0) -> Exchange:
        """Return an all-gather to `num_bytes` (or a reduce-scatter of them): inside hosts, and between them.

        Each card carries its device's part alone (hierarchical), as a ring through all cards of a host does too.
        """
        num_hosts = -(-self.size // self.on_host)
        local = (self.on_host - 1) / self.on_host * num_bytes
        network = (num_hosts - 1) / num_hosts * num_bytes / self.on_host
        messages = (self.on_host - 1) + min(num_hosts - 1.0, 2.0 * (num_hosts - 1).bit_length())
        return Exchange(axis, local, network, messages, count)

    def reduce(self, axis: Axis, num_bytes: float, count: float = 1.0) -> Exchange:
        """Return an all-reduce of `num_bytes`: a reduce-scatter and an all-gather."""
        half = self.gather(axis, num_bytes, count)
        return Exchange(axis, 2 * half.local_bytes, 2 * half.network_bytes, 2 * half.num_messages, count)

    def send(self, axis: Axis, num_bytes: float, count: float = 1.0) -> Exchange:
        """Return one message to the next rank of the axis, which the slowest link decides."""
        local = num_bytes if self.on_host == self.size else 0.0
        return Exchange(axis, local, num_bytes - local, 1.0, count)
