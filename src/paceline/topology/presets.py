"""Kinds of clusters that people have, by name."""

import numpy as np
from pydantic import Field

from paceline.registry import register
from paceline.topology.cluster import Cluster, Host, Network, Paths
from paceline.topology.devices import DeviceField, find_device
from paceline.topology.hosts import Count, Hosts
from paceline.topology.torus import TorusCluster
from paceline.topology.units import BytesPerSecond

_ALL_RANKS = 2**31
"""Devices of the one host of a loopback: more than anybody starts."""


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


class _DGX(Hosts):
    """Hosts of 8 devices joined by NVLink, with a network card each; from NVIDIA's data sheets."""

    devices_per_host: Count = 8
    """Devices, and so ranks, per host."""
    nics_per_host: Count = 8
    """Network cards per host, each of `bandwidth`; device d uses card d mod nics_per_host."""


@register("dgx1")
class DGX1(_DGX):
    """Hosts of 8 V100 joined by NVLink 2 (300 GB/s, both ways together), with 4 cards of 100 Gb/s."""

    device: DeviceField | None = find_device("v100_32gb")
    """Device of every rank: the name of a preset, or a specification."""
    host: Host = Host(num_cores=40, memory_bytes=512e9, disk_bytes=7.7e12, idle_w=500, load_w=1100)
    """Each host without its devices."""
    nics_per_host: Count = 4
    """Network cards per host, each of `bandwidth`; device d uses card d mod nics_per_host."""
    local_bandwidth: BytesPerSecond = BytesPerSecond.parse("150GB/s")
    """Bandwidth of a device to the others of its host, each way."""
    reduce_speed: BytesPerSecond = BytesPerSecond.parse("300GB/s")
    """Received bytes that one device adds to its own per second: about a third of its memory's bandwidth."""


@register("dgx2")
class DGX2(DGX1):
    """Hosts of 16 V100 joined by NVSwitch (300 GB/s, both ways together), with 8 cards of 100 Gb/s."""

    host: Host = Host(num_cores=48, memory_bytes=1.5e12, disk_bytes=30e12, idle_w=1500, load_w=5200)
    """Each host without its devices."""
    devices_per_host: Count = 16
    """Devices, and so ranks, per host."""
    nics_per_host: Count = 8
    """Network cards per host, each of `bandwidth`; device d uses card d mod nics_per_host."""


@register("dgx_a100")
class DGXA100(_DGX):
    """Hosts of 8 A100 joined by NVLink 3 (600 GB/s, both ways together), with 8 cards of 200 Gb/s."""

    device: DeviceField | None = find_device("a100_80gb")
    """Device of every rank: the name of a preset, or a specification."""
    host: Host = Host(num_cores=128, memory_bytes=2e12, disk_bytes=30e12, idle_w=1000, load_w=2500)
    """Each host without its devices."""
    bandwidth: BytesPerSecond = BytesPerSecond.parse("200gbit")
    """Bandwidth of one network card, each way."""
    local_bandwidth: BytesPerSecond = BytesPerSecond.parse("300GB/s")
    """Bandwidth of a device to the others of its host, each way."""
    reduce_speed: BytesPerSecond = BytesPerSecond.parse("600GB/s")
    """Received bytes that one device adds to its own per second: about a third of its memory's bandwidth."""


@register("dgx_h100")
class DGXH100(_DGX):
    """Hosts of 8 H100 joined by NVLink 4 (900 GB/s, both ways together), with 8 cards of 400 Gb/s."""

    device: DeviceField | None = find_device("h100_80gb")
    """Device of every rank: the name of a preset, or a specification."""
    # Published power logs of such hosts (MLPerf Training v4.0): 2.1-2.5 kW idle, 5.8-7.2 kW training, immersion cooled.
    host: Host = Host(num_cores=112, memory_bytes=2e12, disk_bytes=30e12, idle_w=1600, load_w=2000)
    """Each host without its devices."""
    bandwidth: BytesPerSecond = BytesPerSecond.parse("400gbit")
    """Bandwidth of one network card, each way."""
    local_bandwidth: BytesPerSecond = BytesPerSecond.parse("450GB/s")
    """Bandwidth of a device to the others of its host, each way."""
    reduce_speed: BytesPerSecond = BytesPerSecond.parse("1TB/s")
    """Received bytes that one device adds to its own per second: about a third of its memory's bandwidth."""


@register("dgx_b200")
class DGXB200(DGXH100):
    """Hosts of 8 B200 joined by NVLink 5 (1.8 TB/s, both ways together), with 8 cards of 400 Gb/s."""

    device: DeviceField | None = find_device("b200")
    """Device of every rank: the name of a preset, or a specification."""
    host: Host = Host(num_cores=112, memory_bytes=4e12, disk_bytes=34e12, idle_w=2500, load_w=6300)
    """Each host without its devices."""
    local_bandwidth: BytesPerSecond = BytesPerSecond.parse("900GB/s")
    """Bandwidth of a device to the others of its host, each way."""
    reduce_speed: BytesPerSecond = BytesPerSecond.parse("2.5TB/s")
    """Received bytes that one device adds to its own per second: about a third of its memory's bandwidth."""


@register("tpu_v3_pod")
class TPUv3Pod(TorusCluster):
    """Up to 1,024 TPU v3 chips on a 2-D torus of cables of 656 Gb/s (Jouppi et al. 2020)."""

    device: DeviceField | None = find_device("tpu_v3")
    """Device of every rank: the name of a preset, or a specification."""
    bandwidth: BytesPerSecond = BytesPerSecond.parse("82GB/s")
    """Bandwidth of one cable, each way."""


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

    device: DeviceField | None = find_device("cpu")
    """Device of every rank: the name of a preset, or a specification."""

    @property
    def paths(self) -> Paths:
        """Speeds of a ring: every rank's transfer crosses the one bus."""
        return Paths(_ALL_RANKS, self.bandwidth, self.latency_s, self.bandwidth, self.latency_s, is_bus=True)

    def network(self, num_ranks: int) -> Network:
        """Return the one link."""
        return Network(
            capacities_bytes_per_s=np.array([self.bandwidth]),
            latencies_s=np.array([self.latency_s]),
            route=lambda sources, destinations: np.zeros((len(sources), 1), dtype=np.int64),
            reduce_bytes_per_s=self.reduce_speed,
            message_s=self.message_s,
        )
