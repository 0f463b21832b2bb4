"""Kinds of clusters that people have, by name."""

import numpy as np
from pydantic import Field

from paceline.registry import register
from paceline.topology.cluster import Cluster, Network
from paceline.topology.hosts import Count, Hosts
from paceline.topology.units import BytesPerSecond


@register("switch")
class Switch(Hosts):
    """Hosts on one switch that never blocks: only a host's own cables can be full."""


@register("fat_tree")
class FatTree(Hosts):
    """Pods of hosts whose uplinks have less bandwidth than all cards of the pod (Al-Fares 2008, oversubscribed).

    With an oversubscription of 1 no uplink is ever full, and it is a switch with more latency between pods.
    """

    hosts_per_pod: Count | None = 16
    """Hosts per switch; None: all of them."""
    oversubscription: float = Field(default=4.0, ge=1)
    """Bandwidth of a pod's cards divided by that of its uplink."""


@register("dgx_a100")
class DGXA100(Hosts):
    """Hosts of 8 A100 joined by NVLink 3 (600 GB/s, both ways together), with 8 cards of 200 Gb/s."""

    bandwidth: BytesPerSecond = BytesPerSecond.parse("200gbit")
    """Bandwidth of one network card, each way."""
    devices_per_host: Count = 8
    """Devices, and so ranks, per host."""
    nics_per_host: Count = 8
    """Network cards per host, each of `bandwidth`; device d uses card d mod nics_per_host."""
    local_bandwidth: BytesPerSecond = BytesPerSecond.parse("300GB/s")
    """Bandwidth of a device to the others of its host, each way."""
    reduce_speed: BytesPerSecond = BytesPerSecond.parse("600GB/s")
    """Received bytes that one device adds to its own per second: about a third of its memory's bandwidth."""


@register("dgx_h100")
class DGXH100(Hosts):
    """Hosts of 8 H100 joined by NVLink 4 (900 GB/s, both ways together), with 8 cards of 400 Gb/s."""

    bandwidth: BytesPerSecond = BytesPerSecond.parse("400gbit")
    """Bandwidth of one network card, each way."""
    devices_per_host: Count = 8
    """Devices, and so ranks, per host."""
    nics_per_host: Count = 8
    """Network cards per host, each of `bandwidth`; device d uses card d mod nics_per_host."""
    local_bandwidth: BytesPerSecond = BytesPerSecond.parse("450GB/s")
    """Bandwidth of a device to the others of its host, each way."""
    reduce_speed: BytesPerSecond = BytesPerSecond.parse("1TB/s")
    """Received bytes that one device adds to its own per second: about a third of its memory's bandwidth."""


@register("loopback")
class Loopback(Cluster):
    """One host whose processes talk through its memory: all transfers share one bus, both ways."""

    bandwidth: BytesPerSecond = BytesPerSecond.parse("4GB/s")
    """Bandwidth of the bus, for all transfers together."""
    latency_s: float = Field(default=2e-5, ge=0)
    """Latency of one message through the kernel."""
    message_s: float = Field(default=1e-5, ge=0)
    """Time that a rank spends on each message, sent or received."""
    reduce_speed: BytesPerSecond = BytesPerSecond.parse("4GB/s")
    """Received bytes that one process adds to its own per second."""

    def network(self, num_ranks: int) -> Network:
        """Return the one link."""
        return Network(
            capacities_bytes_per_s=np.array([self.bandwidth]),
            latencies_s=np.array([self.latency_s]),
            route=lambda sources, destinations: np.zeros((len(sources), 1), dtype=np.int64),
            reduce_bytes_per_s=self.reduce_speed,
            message_s=self.message_s,
        )
