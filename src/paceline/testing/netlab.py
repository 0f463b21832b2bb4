"""Hosts with slow links on one machine: network namespaces joined by a bridge, each link limited both ways.

A host runs real processes with real sockets; only the link is simulated. A link carries `bandwidth_bits_per_s` in
each direction at once, headers included (with frames of 1,500 bytes 4.5% of the traffic); its queue holds 50 ms, and
it adds no latency: the kernel's token bucket (``tc tbf``) has none. All hosts share the machine's cores.
"""

import functools
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from pydantic import JsonValue

from paceline.errors import SettingsError
from paceline.testing.netlab_namespaces import Namespace
from paceline.testing.processes import RankResult, open_store, run_processes

T = TypeVar("T")

INTERFACE = "eth0"
"""Name of a host's interface, inside the host."""
_MAX_BURST_BYTES = 64 * 1024
_BURST_S = 0.005
"""Largest burst of a link, as time at its bandwidth: small so that small transfers are limited like large ones."""
_MIN_BURST_BYTES = 4096
# The kernel passes on several frames as one, as to a network card. A bucket that cannot hold such a bundle must split
# it, which uses the cores that workers need: at 1 Gbit/s four hosts then got half of their bandwidth.
_FRAMES = "gso_max_size 32768"
_QUEUE_S = 0.05
_MIN_QUEUE_BYTES = 128 * 1024
_SUBNET = "10.77.0"
_MAX_HOSTS = 254


@dataclass(frozen=True)
class LinkCounters:
    """Bytes over one host's link since its creation, with one header for each bundle of frames."""

    sent_bytes: int
    received_bytes: int


@functools.cache
def netlab_missing() -> str:
    """Return the reason why no `Netlab` can be made here; empty if one can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, but this is {sys.platform}"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command {tool} is missing; install iproute2"
    try:
        _Network([1e9]).close()
    except OSError as error:
        return f"network namespaces cannot be made ({error}); it takes root with CAP_SYS_ADMIN and CAP_NET_ADMIN"
    return ""


class Netlab:
    """Hosts with limited links, in which workers can run.

    Args:
        num_hosts: Number of hosts.
        bandwidth_bits_per_s: Bandwidth of each link, in each direction; one number for all, or one per host.

    Example:
        >>> with Netlab(num_hosts=4, bandwidth_bits_per_s=100e6) as lab:  # doctest: +SKIP
        ...     results = lab.run(function, {"num_bytes": 2**20})

    Raises:
        SettingsError: Network namespaces cannot be made here, or the arguments are invalid.
    """

    def __init__(self, num_hosts: int, bandwidth_bits_per_s: float | Sequence[float]) -> None:
        if not 1 <= num_hosts <= _MAX_HOSTS:
            raise SettingsError(f"num_hosts must be in [1, {_MAX_HOSTS}], but got {num_hosts}; choose another")
        if isinstance(bandwidth_bits_per_s, Sequence):
            bandwidths = [float(bandwidth) for bandwidth in bandwidth_bits_per_s]
        else:
            bandwidths = [float(bandwidth_bits_per_s)] * num_hosts
        if len(bandwidths) != num_hosts:
            raise SettingsError(
                f"bandwidth_bits_per_s must be one number, or one for each of {num_hosts} hosts, but got "
                f"{len(bandwidths)}; give one per host"
            )
        for bandwidth in bandwidths:
            _check_bandwidth(bandwidth)
        if reason := netlab_missing():
            raise SettingsError(f"a netlab must be made where it can be, but {reason}")
        self.num_hosts = num_hosts
        self._network = _Network(bandwidths)

    def run(
        self,
        function: str | Callable[..., JsonValue],
        arguments: Mapping[str, JsonValue] | None = None,
        *,
        ranks_per_host: int = 1,
        timeout_s: float = 40.0,
        wait_for: Collection[int] | None = None,
        environment: Mapping[str, str] | None = None,
        first_host: int = 0,
    ) -> list[RankResult]:
        """Run ``function(**arguments)`` in `ranks_per_host` processes of each host, and return the result of each.

        Ranks are numbered host by host, from `first_host` on, and have torchrun's environment; their rendezvous store
        is in that host. Everything else is as in `run_processes`.
        """
        hosts = self._network.hosts[first_host:]
        store = hosts[0].call(open_store)
        return run_processes(
            len(hosts) * ranks_per_host,
            function,
            arguments,
            timeout_s=timeout_s,
            wait_for=wait_for,
            store=store,
            environment={**_network_environment(first_host), **(environment or {})},
            namespaces=[host.path for host in hosts for _ in range(ranks_per_host)],
        )

    def call(self, host: int, function: Callable[[], T]) -> T:
        """Return the result of a function, run inside a host by a thread of this process: what it opens stays there."""
        return self._network.hosts[host].call(function)

    def counters(self) -> list[LinkCounters]:
        """Return the counters of each host's link, by host."""
        return [host.call(read_counters) for host in self._network.hosts]

    def set_bandwidth(self, host: int, bandwidth_bits_per_s: float) -> None:
        """Change the bandwidth of one host's link, in both directions, while it is in use."""
        _check_bandwidth(bandwidth_bits_per_s)
        if not 0 <= host < self.num_hosts:
            raise SettingsError(f"host must be in [0, {self.num_hosts}), but got {host}; choose another")
        self._network.limit(host, bandwidth_bits_per_s)

    def close(self) -> None:
        """Remove the hosts and links."""
        self._network.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def address(host: int) -> str:
    """Return the address of a host."""
    return f"{_SUBNET}.{host + 1}"


def _network_environment(first_host: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": address(first_host),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else a warning that addresses have no names here
    }


class _Network:
    """The namespaces: one for each host, and one for the bridge between them."""

    def __init__(self, bandwidths_bits_per_s: Sequence[float]) -> None:
        self.hosts: list[Namespace] = []
        self._bridge = Namespace()
        try:
            self._bridge.batch("ip", "link add bridge type bridge", "link set bridge up")
            for host, bandwidth in enumerate(bandwidths_bits_per_s):
                self.hosts.append(Namespace())
                self._connect(host)
                self.limit(host, bandwidth)
        except OSError:
            self.close()
            raise

    def _connect(self, host: int) -> None:
        """Connect a host. Its TCP congestion control is reno, which every kernel has, whatever the machine's own is."""
        namespace = self.hosts[host]
        self._bridge.batch(
            "ip",
            f"link add host{host} {_FRAMES} type veth peer name {INTERFACE} {_FRAMES} netns {namespace.path}",
            f"link set host{host} master bridge up",
        )
        namespace.batch(
            "ip",
            "link set lo up",
            f"link set {INTERFACE} addrgenmode none",  # no IPv6, whose discovery of neighbours is noise
            f"address add {address(host)}/24 dev {INTERFACE} noprefixroute",
            f"link set {INTERFACE} up",
            f"route add {_SUBNET}.0/24 dev {INTERFACE} congctl reno",
        )

    def limit(self, host: int, bandwidth_bits_per_s: float) -> None:
        """Limit the host's sent traffic where it leaves the host, and received traffic where it leaves the bridge."""
        bytes_per_s = bandwidth_bits_per_s / 8
        burst = min(max(_MIN_BURST_BYTES, _BURST_S * bytes_per_s), _MAX_BURST_BYTES)
        queue = max(_MIN_QUEUE_BYTES, _QUEUE_S * bytes_per_s)
        bucket = f"root tbf rate {bandwidth_bits_per_s:.0f}bit burst {burst:.0f} limit {burst + queue:.0f}"
        self.hosts[host].batch("tc", f"qdisc replace dev {INTERFACE} {bucket}")
        self._bridge.batch("tc", f"qdisc replace dev host{host} {bucket}")

    def close(self) -> None:
        for namespace in (*self.hosts, self._bridge):
            namespace.close()


def read_counters() -> LinkCounters:
    """Return the counters of the link of this thread's host."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            fields = numbers.split()
            return LinkCounters(sent_bytes=int(fields[8]), received_bytes=int(fields[0]))
    raise AssertionError(f"a host has {INTERFACE}")


def _check_bandwidth(bandwidth_bits_per_s: float) -> None:
    if not 1e3 <= bandwidth_bits_per_s <= 1e12:
        raise SettingsError(
            f"bandwidth_bits_per_s must be in [1e3, 1e12], but got {bandwidth_bits_per_s:g}; choose another"
        )
