"""The contract of a cluster: settings that describe its kind, and its network for a number of ranks.

A network is a set of directed links, each with a capacity, and a route of links from every rank to every
other. Routes are computed on demand: 4,096 ranks have 16 million of them. Links are full duplex
unless a variant says otherwise: a cable is two links, one each way, which do not slow each other down.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceline.registry import Family
from paceline.topology.units import BytesPerSecond

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Network:
    """The links of a cluster for ranks 0, 1, ..., which fill its hosts in order.

    Args:
        capacities_bytes_per_s: Capacity of each link.
        latencies_s: Latency of each link: the time of a message on it without its bytes.
        route: Function that returns the links from sources to destinations, shape ``(num_pairs, most links of a
            route)``; -1 pads shorter routes.
        reduce_bytes_per_s: Received bytes that a rank adds to its own per second.
        message_s: Time that a rank's processor or network card spends on each message, sent or received.
    """

    capacities_bytes_per_s: Floats
    latencies_s: Floats
    route: Callable[[Integers, Integers], Integers]
    reduce_bytes_per_s: float
    message_s: float

    def route_latencies_s(self, routes: Integers) -> Floats:
        """Return the latency of each route."""
        padded = np.append(self.latencies_s, 0.0)  # the padding of a shorter route, -1, finds the zero
        return np.asarray(padded[routes].sum(axis=1))


class Cluster(Family):
    """Settings of a kind of cluster."""

    family = "cluster"

    bandwidth: BytesPerSecond = BytesPerSecond.parse("100gbit")
    """Bandwidth of one link of the network, each way, in bytes/s or with a unit: 100gbit, 12.5GB/s."""
    latency_s: float = Field(default=5e-6, ge=0)
    """Latency from one end of the network to the other, through one switch."""
    message_s: float = Field(default=1e-6, ge=0)
    """Time that a rank spends on each message, sent or received: a hundred at once take a hundred times as long."""
    reduce_speed: BytesPerSecond = BytesPerSecond.parse("200GB/s")
    """Received bytes that one device adds to its own per second: about a third of its memory's bandwidth."""

    @property
    def devices_per_island(self) -> int:
        """Number of devices that are closer to each other than to the rest; 1 if there are no such groups."""
        return 1

    @abstractmethod
    def network(self, num_ranks: int) -> Network:
        """Return the network of `num_ranks` ranks.

        Raises:
            SettingsError: The cluster has fewer devices.
        """

    def with_bandwidth(self, bandwidth: float | str) -> Self:
        """Return the same cluster with another network bandwidth."""
        return self.model_copy(update={"bandwidth": BytesPerSecond.parse(bandwidth)})
