"""The time that a training takes on hosts whose link is slower than this machine: computing, and what is exchanged.

Computing is measured; exchanges are those that a rule states by `traffic`, priced as the simulator prices them. Of an
exchange, what its rule hides behind computing is free, but a link carries one exchange after another. The work of
encoding counts as nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Size

from paceline.comm.host_group import choose_algorithm
from paceline.comm.pacing import HEADERS
from paceline.simulator import simulate_collective
from paceline.sync import Rule, Traffic
from paceline.sync.parameter_server.settings import ServerSettings
from paceline.sync.rule import find_exposed_s
from paceline.topology import BytesPerSecond, Switch


@dataclass(frozen=True)
class Link:
    """Hosts on a switch, with one worker on each."""

    num_hosts: int
    bandwidth: BytesPerSecond
    """Bandwidth of each host, each way."""
    latency_s: float
    """Latency from one host to another."""

    def __str__(self) -> str:
        """Return it in words."""
        return f"on {self.num_hosts} hosts at {8e-6 * self.bandwidth:,.4g} Mbit/s"

    def exchange_s(self, traffic: Traffic, num_servers: int = 1) -> float:
        """Return the time of one exchange.

        All-reduces go by the program that leaders of hosts take by default. What is sent to neighbours leaves one after
        another. A server's host is the narrow place of pushes and of pulls: all other workers share its link.
        """
        if traffic.peers == "host":  # the worker is alone there
            return 0.0
        if traffic.peers == "servers":
            share = max(1.0, (self.num_hosts - 1) / num_servers)
            return share * traffic.wire_bytes / self.bandwidth + self.latency_s
        if traffic.collective != "all_reduce":
            return traffic.wire_bytes / self.bandwidth + self.latency_s
        cluster = Switch(bandwidth=self.bandwidth, latency_s=self.latency_s)
        dense_wire = 2 * (self.num_hosts - 1) / self.num_hosts
        return simulate_collective(
            "all_reduce",
            traffic.wire_bytes / dense_wire,
            self.num_hosts,
            cluster,
            algorithm=choose_algorithm(self.num_hosts),
        ).total_s


def price_training(rule: Rule, shapes: Sequence[Size], link: Link, compute_s: float, num_steps: float) -> float:
    """Return the seconds of the first `num_steps` of a training.

    Workers that synchronise wait for what computing does not hide of each exchange. Those at their own pace with
    servers take turns at them: a step takes a worker's own computing and messages, or, where that is longer, the time
    in which a server's link carries the messages of all. Bytes on the link have headers.

    Args:
        rule: Rule of synchronisation, fitted to the length of the run.
        shapes: Shapes of the parameters.
        link: Hosts and their link.
        compute_s: Time of computing in a step, for one worker.
        num_steps: Number of steps; parts of an exchange count as such.
    """
    num_servers = rule.num_servers if isinstance(rule, ServerSettings) else 1
    if rule.max_bandwidth is not None:
        link = replace(link, bandwidth=min(link.bandwidth, rule.max_bandwidth))
    link = replace(link, bandwidth=BytesPerSecond(link.bandwidth / HEADERS))
    traffic = rule.traffic(shapes, link.num_hosts)
    if rule.is_asynchronous and traffic and all(each.peers == "servers" for each in traffic):
        own_s = sum((each.wire_bytes / link.bandwidth + link.latency_s) / each.period for each in traffic)
        server_s = max(link.exchange_s(each, num_servers) / each.period for each in traffic)
        return num_steps * max(compute_s + own_s, server_s)
    exposed_s = busy_s = 0.0
    for each in traffic:
        exchange_s, count = link.exchange_s(each, num_servers), each.count(num_steps)
        exposed_s += count * find_exposed_s(exchange_s, each.overlap * compute_s, each.last_part)
        busy_s += count * exchange_s
    return max(num_steps * compute_s + exposed_s, busy_s)
