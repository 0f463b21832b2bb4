"""The cost of a collective program on a cluster.

A rank's part of a round: it encodes its data, all transfers of the round share links max-min fairly from the
same moment on, each arrives after its latency, and its destination decodes and adds. Adding in segments
while the rest is still under way is not modelled: where adding is slow the estimate is too high.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.errors import SettingsError
from paceline.programs import Program
from paceline.simulator.network import transfer_times_s
from paceline.simulator.own_pace import run_at_own_pace
from paceline.simulator.transfers import CodecCost, Transfers, price_round
from paceline.topology.cluster import Cluster, Floats, Network


@dataclass(frozen=True)
class Cost:
    """Time of a program, by the activity of the ranks that hold up the others.

    Args:
        transfer_s: Time of waiting for links and latency.
        add_s: Time of adding received chunks.
        codec_s: Time of encoding and decoding.
    """

    transfer_s: float
    add_s: float
    codec_s: float

    @property
    def total_s(self) -> float:
        """Sum of the three."""
        return self.transfer_s + self.add_s + self.codec_s


def simulate(
    program: Program,
    num_bytes: float,
    cluster: Cluster | Network,
    *,
    codec: CodecCost | None = None,
    own_pace: bool = False,
) -> Cost:
    """Return the cost of `program` on `cluster`.

    By default a round begins when the one before it has ended on all ranks. Then similar rounds are priced once, so
    that 4,096 ranks take no longer than their largest round; scaling up all links never slows a program down; and ranks
    that drift apart gain nothing, so the estimate is rather too high. No link ever carries more than its capacity.

    Args:
        program: Program to cost.
        num_bytes: Size of the buffer that the program's chunks are parts of; chunks count as equal. For an all-to-all,
            the size of all ranks' data together.
        cluster: Cluster to run on: settings, or a network made from them.
        codec: Cost of the codec; None without one.
        own_pace: Whether each rank goes on as soon as its own part of a round has ended and its partners are ready, as
            in `execute`. That is more accurate where links differ, most of all for pipelined trees, but takes minutes
            from some hundreds of ranks on, and, as in any network, a faster link may let a rival start earlier and so
            make the end a little later.

    Raises:
        SettingsError: `num_bytes` is negative, or the cluster has too few devices.
    """
    network = cluster.network(program.num_ranks) if isinstance(cluster, Cluster) else cluster
    capacities = [network.capacities_bytes_per_s]
    return simulate_each(program, num_bytes, network, capacities, codec=codec, own_pace=own_pace)[0]


def simulate_each(
    program: Program,
    num_bytes: float,
    network: Network,
    capacities_bytes_per_s: Sequence[Floats],
    *,
    codec: CodecCost | None = None,
    own_pace: bool = False,
) -> list[Cost]:
    """Return the costs of `program` as `simulate` does, for each of several capacities of the links of `network`.

    Each round is made and routed once for all of them.

    Raises:
        SettingsError: `num_bytes` is negative.
    """
    if not 0 <= num_bytes < np.inf:
        raise SettingsError(f"num_bytes must be at least 0 and finite, but got {num_bytes}; give the buffer's size")
    codec = codec or CodecCost()
    chunk_bytes = num_bytes / program.num_chunks
    costs = [[Cost(0.0, 0.0, codec.around_s(program, num_bytes))] for _ in capacities_bytes_per_s]
    if own_pace:
        rounds = [price_round(round_, chunk_bytes, network, codec) for round_ in program.rounds()]
        for mine, capacities in zip(costs, capacities_bytes_per_s, strict=True):
            total_s, add_s, codec_s = run_at_own_pace(rounds, capacities)
            mine.append(Cost(total_s - add_s - codec_s, add_s, codec_s))
    else:
        for index, count in program.round_classes():
            transfers = price_round(program.round(index), chunk_bytes, network, codec)
            for mine, capacities in zip(costs, capacities_bytes_per_s, strict=True):
                cost = _simulate_round(transfers, capacities)
                mine.append(Cost(count * cost.transfer_s, count * cost.add_s, count * cost.codec_s))
    return [_sum(mine) for mine in costs]


def _simulate_round(transfers: Transfers, capacities_bytes_per_s: Floats) -> Cost:
    """Return the cost of a round, by the rank that ends it last."""
    if not len(transfers.sources):
        return Cost(0.0, 0.0, 0.0)
    encode_s = np.bincount(transfers.sources, transfers.encode_s).max()
    left_s = transfer_times_s(transfers.routes, transfers.wire_bytes, capacities_bytes_per_s)
    add_s = np.bincount(transfers.destinations, transfers.add_s)
    decode_s = np.bincount(transfers.destinations, transfers.decode_s)
    arrived_s = np.zeros(len(add_s))
    np.maximum.at(arrived_s, transfers.destinations, left_s + transfers.delays_s)
    last = int(np.argmax(arrived_s + decode_s + add_s))
    return Cost(float(arrived_s[last]), float(add_s[last]), float(encode_s + decode_s[last]))


def _sum(costs: Iterable[Cost]) -> Cost:
    transfer_s, add_s, codec_s = np.array([(cost.transfer_s, cost.add_s, cost.codec_s) for cost in costs]).sum(axis=0)
    return Cost(float(transfer_s), float(add_s), float(codec_s))
