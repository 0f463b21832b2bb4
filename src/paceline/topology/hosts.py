"""Clusters of hosts with network cards, joined by one switch or by pods of switches."""

from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from paceline.errors import SettingsError
from paceline.topology.cluster import Cluster, Integers, Network, Paths
from paceline.topology.devices import Device, DeviceField
from paceline.topology.units import BytesPerSecond

Count = Annotated[int, Field(ge=1)]


class Hosts(Cluster):
    """Settings of hosts with devices and network cards; the presets have their own defaults for them.

    Devices of one host talk through a switch inside it (NVLink, PCIe), which takes nothing from the network cards.
    Cards go to a switch that never blocks. With `hosts_per_pod` there is one such switch for each pod, and uplinks join
    the pods. Their load counts as perfectly balanced: a pod has one thick cable each way.
    """

    num_hosts: Count | None = None
    """Number of hosts; None: as many as the ranks need."""
    devices_per_host: Count = 1
    """Devices, and so ranks, per host."""
    nics_per_host: Count = 1
    """Network cards per host, each of `bandwidth`; device d uses card d mod nics_per_host."""
    local_bandwidth: BytesPerSecond = BytesPerSecond.parse("25GB/s")
    """Bandwidth of a device to the others of its host, each way; the default is PCIe 4.0 with 16 lanes."""
    local_latency_s: float = Field(default=2e-6, ge=0)
    """Latency from one device to another of its host."""
    host_bandwidths: dict[int, BytesPerSecond] = Field(default={})
    """Bandwidth of the cards of single hosts that differ, by host: {3: "10gbit"} makes host 3 slow."""
    host_devices: dict[int, DeviceField] = Field(default={})
    """Devices of single hosts that differ, by host: {3: "v100_32gb"} makes host 3 older."""
    hosts_per_pod: Count | None = None
    """Hosts per switch; None: all of them."""
    oversubscription: float = Field(default=1.0, ge=1)
    """Bandwidth of a pod's cards divided by that of its uplink."""
    core_latency_s: float = Field(default=5e-6, ge=0)
    """Additional latency from one pod to another."""

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        for field in ("host_bandwidths", "host_devices"):
            unknown = [host for host in getattr(self, field) if host < 0 or host >= (self.num_hosts or host + 1)]
            if unknown:
                raise ValueError(
                    f"{field} must be of hosts from 0 to num_hosts - 1, but got {unknown[0]}; name another"
                )
        return self

    @property
    def devices_per_island(self) -> int:
        """Devices of a host, or, if each host has one, devices of a pod."""
        return self.devices_per_host if self.devices_per_host > 1 else self.hosts_per_pod or 1

    @property
    def paths(self) -> Paths:
        """Speeds of a ring: its slowest host's card, an uplink's share where pods are oversubscribed."""
        card = min([self.bandwidth, *self.host_bandwidths.values()])
        per_device = card * self.nics_per_host / self.devices_per_host
        return Paths(
            devices_per_host=self.devices_per_host,
            local_bytes_per_s=self.local_bandwidth,
            local_latency_s=self.local_latency_s,
            network_bytes_per_s=per_device / (self.oversubscription if self.hosts_per_pod else 1.0),
            network_latency_s=self.latency_s + (self.core_latency_s if self.hosts_per_pod else 0.0),
        )

    def check_size(self, num_ranks: int) -> None:
        """Raise SettingsError if the cluster has fewer devices."""
        self._count_hosts(num_ranks)

    def device_of_slowest(self, num_ranks: int) -> Device | None:
        """Return the device with the lowest fp32 peak among the hosts that `num_ranks` ranks use."""
        num_hosts = self._count_hosts(num_ranks)
        others = {host: device for host, device in self.host_devices.items() if host < num_hosts}
        devices = [*others.values()] if len(others) == num_hosts else [*others.values(), self.device]
        known = [device for device in devices if device is not None]
        return min(known, key=lambda device: device.peak_flops["fp32"]) if len(known) == len(devices) else None

    def network(self, num_ranks: int) -> Network:
        """Return the links: cards up and down, devices up and down, pods up and down."""
        num_hosts = self._count_hosts(num_ranks)
        num_pods = -(-num_hosts // self.hosts_per_pod) if self.hosts_per_pod else 1
        pod_bandwidth = self.bandwidth * self.nics_per_host * (self.hosts_per_pod or num_hosts) / self.oversubscription
        bandwidths = np.full(num_hosts, float(self.bandwidth))
        for host, bandwidth in self.host_bandwidths.items():
            bandwidths[host : host + 1] = bandwidth  # a host without ranks is left out
        kinds = [
            (np.repeat(bandwidths, self.nics_per_host), self.latency_s),
            (np.full(num_hosts * self.devices_per_host, float(self.local_bandwidth)), self.local_latency_s),
            (np.full(num_pods, pod_bandwidth), self.core_latency_s),
        ]
        return Network(
            capacities_bytes_per_s=np.concatenate([capacities for capacities, _ in kinds for _ in ("up", "down")]),
            latencies_s=np.concatenate(
                [np.full(2 * len(capacities), latency_s / 2) for capacities, latency_s in kinds]
            ),
            route=_HostRoutes(num_hosts, self.devices_per_host, self.nics_per_host, self.hosts_per_pod or num_hosts),
            reduce_bytes_per_s=self.reduce_speed,
            message_s=self.message_s,
        )

    def _count_hosts(self, num_ranks: int) -> int:
        needed = -(-num_ranks // self.devices_per_host)
        if self.num_hosts is not None and needed > self.num_hosts:
            raise SettingsError(
                f"ranks must be at most num_hosts x devices_per_host = {self.num_hosts} x {self.devices_per_host} = "
                f"{self.num_hosts * self.devices_per_host}, but got {num_ranks}; raise num_hosts"
            )
        return self.num_hosts or needed


@dataclass(frozen=True)
class _HostRoutes:
    """Routes between devices: inside a host, under one switch, or over the uplinks of two pods."""

    num_hosts: int
    devices_per_host: int
    nics_per_host: int
    hosts_per_pod: int

    def __call__(self, sources: Integers, destinations: Integers) -> Integers:
        num_cards, num_devices = self.num_hosts * self.nics_per_host, self.num_hosts * self.devices_per_host
        num_pods = -(-self.num_hosts // self.hosts_per_pod)
        first_device = 2 * num_cards
        first_pod = first_device + 2 * num_devices
        source_hosts, destination_hosts = sources // self.devices_per_host, destinations // self.devices_per_host
        source_pods, destination_pods = source_hosts // self.hosts_per_pod, destination_hosts // self.hosts_per_pod
        is_local = source_hosts == destination_hosts
        crosses = source_pods != destination_pods
        columns = [
            np.where(is_local, first_device + sources, self._cards(sources)),
            np.where(is_local, first_device + num_devices + destinations, num_cards + self._cards(destinations)),
        ]
        if crosses.any():
            columns.append(np.where(crosses, first_pod + source_pods, -1))
            columns.append(np.where(crosses, first_pod + num_pods + destination_pods, -1))
        return np.stack(columns, axis=1)

    def _cards(self, ranks: Integers) -> Integers:
        hosts, devices = np.divmod(ranks, self.devices_per_host)
        return np.asarray(hosts * self.nics_per_host + devices % self.nics_per_host)
