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

from paceline.registry import Family, Settings
from paceline.topology.devices import Device, DeviceField
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


@dataclass(frozen=True)
class Paths:
    """What a ring of ranks gets from a cluster, as numbers.

    Args:
        devices_per_host: Devices that talk to each other without the network.
        local_bytes_per_s: Bytes that a device sends to others of its host per second, while all do.
        local_latency_s: Latency of a message inside a host.
        network_bytes_per_s: Bytes that a device sends to other hosts per second, while all devices of its host do.
        network_latency_s: Latency of a message between hosts.
        is_bus: Whether all ranks share `local_bytes_per_s`.
    """

    devices_per_host: int
    local_bytes_per_s: float
    local_latency_s: float
    network_bytes_per_s: float
    network_latency_s: float
    is_bus: bool = False


class Host(Settings):
    """A machine without its devices: an estimate of a common server, where nothing better is known."""

    num_cores: int = Field(default=64, ge=1)
    """Cores of its processors."""
    memory_bytes: float = Field(default=512e9, gt=0)
    """Size of its memory."""
    disk_bytes: float = Field(default=2e12, gt=0)
    """Size of its own disks."""
    disk_speed: BytesPerSecond = BytesPerSecond.parse("2GB/s")
    """Bytes that its disks write per second."""
    link_speed: BytesPerSecond = BytesPerSecond.parse("25GB/s")
    """Bytes per second between its memory and each device, each way: PCI Express 4.0 with 16 lanes."""
    memory_speed: BytesPerSecond = BytesPerSecond.parse("200GB/s")
    """Bytes that its processors read and write in its memory per second."""
    idle_w: float = Field(default=300.0, ge=0)
    """Power of processors, memory, fans and cards while nothing trains."""
    load_w: float = Field(default=600.0, ge=0)
    """The same while its devices train."""


class Cluster(Family):
    """Settings of a kind of cluster."""

    family = "cluster"

    device: DeviceField | None = None
    """Device of every rank: the name of a preset, or a specification; None: not known."""
    host: Host = Host()
    """Each host without its devices."""

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

    @property
    @abstractmethod
    def paths(self) -> Paths:
        """Speeds that a ring of ranks gets."""

    def check_size(self, num_ranks: int) -> None:
        """Raise SettingsError if the cluster has fewer devices; by default it has any number."""

    def device_of_slowest(self, num_ranks: int) -> Device | None:
        """Return the device that the others wait for; None if devices are not known."""
        return self.device

    @abstractmethod
    def network(self, num_ranks: int) -> Network:
        """Return the network of `num_ranks` ranks.

        Raises:
            SettingsError: The cluster has fewer devices.
        """

    def with_bandwidth(self, bandwidth: float | str) -> Self:
        """Return the same cluster with another network bandwidth."""
        return self.model_copy(update={"bandwidth": BytesPerSecond.parse(bandwidth)})
