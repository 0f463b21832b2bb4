"""The cost of the transfers of a round, apart from how they share links."""

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from paceline.programs.base import Collective, Program, Round
from paceline.registry import Settings
from paceline.topology.cluster import Floats, Integers, Network


class CodecCost(Settings):
    """Saving of a codec on the wire and its own cost, in numbers; bytes are those before encoding."""

    compression: float = Field(default=1.0, gt=0)
    """Ratio of bytes before encoding to bytes on the wire."""
    encode_bytes_per_s: float | None = Field(default=None, gt=0)
    """Speed of encoding; None: it costs nothing."""
    decode_bytes_per_s: float | None = Field(default=None, gt=0)
    """Speed of decoding; None: it costs nothing."""
    at_every_hop: bool = False
    """Whether each transfer is encoded, decoded and added dense (int8). Otherwise encoded payloads are added (bf16,
    PowerSGD) or gathered (top-k), with one encoding before the program and one decoding after it."""

    def around_s(self, program: Program, num_bytes: float) -> float:
        """Return the time to encode a rank's data before `program`, and to decode them after it."""
        if self.at_every_hop or program.num_ranks == 1:
            return 0.0
        part = num_bytes / program.num_ranks
        is_whole_before = program.collective not in (Collective.ALL_GATHER, Collective.ALL_TO_ALL)
        is_whole_after = program.collective not in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
        before = num_bytes if is_whole_before else part
        after = num_bytes if is_whole_after else part
        return before / (self.encode_bytes_per_s or np.inf) + after / (self.decode_bytes_per_s or np.inf)


@dataclass(frozen=True)
class Transfers:
    """The transfers of one or more rounds; every array has one element for each.

    Args:
        sources: Ranks that send.
        destinations: Ranks that receive.
        routes: Links on the way, shape ``(num_transfers, most links of one)``; -1 pads shorter routes.
        wire_bytes: Bytes on each of these links.
        delays_s: Time from the last byte's departure to its arrival: latency, and the round's other messages at either
            end.
        encode_s: Time of encoding at the source before it sends.
        decode_s: Time of decoding at the destination.
        add_s: Time of adding at the destination.
    """

    sources: Integers
    destinations: Integers
    routes: Integers
    wire_bytes: Floats
    delays_s: Floats
    encode_s: Floats
    decode_s: Floats
    add_s: Floats


def price_round(round_: Round, chunk_bytes: float, network: Network, codec: CodecCost) -> Transfers:
    """Return the cost of the transfers of one round on a network.

    Args:
        round_: The round.
        chunk_bytes: Bytes of a chunk before encoding.
        network: Network to run on.
        codec: Cost of the codec.
    """
    counts = round_.counts.astype(np.float64)
    num_bytes, wire_bytes = counts * chunk_bytes, counts * (chunk_bytes / codec.compression)
    hop_bytes = num_bytes if codec.at_every_hop else np.zeros(len(round_))
    added = np.where(round_.adds, num_bytes if codec.at_every_hop else wire_bytes, 0.0)
    routes = network.route(round_.sources, round_.destinations)
    num_sent = np.bincount(round_.sources)[round_.sources]
    num_received = np.bincount(round_.destinations)[round_.destinations]
    return Transfers(
        sources=round_.sources,
        destinations=round_.destinations,
        routes=routes,
        wire_bytes=wire_bytes,
        delays_s=network.route_latencies_s(routes) + network.message_s * np.maximum(num_sent, num_received),
        encode_s=hop_bytes / (codec.encode_bytes_per_s or np.inf),
        decode_s=hop_bytes / (codec.decode_bytes_per_s or np.inf),
        add_s=added / network.reduce_bytes_per_s,
    )
