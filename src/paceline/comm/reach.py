"""Whether ranks of several machines can connect to each other, tried before they open a group.

Without that, native code waits for minutes for an address that does not answer, as behind a firewall that lets only the
port of the launcher's store through, and cannot say which one it is.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed import Store

from paceline.comm.connecting import connect
from paceline.comm.shared_memory import exchange_documents
from paceline.comm.threads import start_thread
from paceline.comm.torch_group import HOST_ADDRESS
from paceline.errors import CommunicationError

REACH_S = 20.0
"""Longest time that is tried to reach a rank, unless operations have less; the kernel tries five times in it."""
_PAUSE_S = 0.5
_NUM_TOLD = 2

Address: TypeAlias = Sequence[str | int]
"""Host and port."""


@dataclass(frozen=True)
class Obstruction:
    """A connection that two ranks could not open."""

    rank: int
    """Rank that tried."""
    other: int
    """Rank that it could not reach."""
    words: str
    """Address, time and reason, in words."""

    def describe(self, names: Sequence[str]) -> str:
        """Return it in words, given the names of ranks."""
        return f"{names[self.rank]} could not connect to {names[self.other]} at {self.words}"


class UnreachableError(CommunicationError):
    """Ranks of different machines cannot connect to each other.

    Args:
        obstructions: Connections that could not be opened.
        size: Number of ranks.
    """

    def __init__(self, obstructions: Sequence[Obstruction], size: int) -> None:
        names = [f"rank {rank}" for rank in range(size)]
        super().__init__(f"{describe_all(obstructions, names)}; let connections to all ports of these machines through")
        self.obstructions = tuple(obstructions)


def describe_all(obstructions: Sequence[Obstruction], names: Sequence[str]) -> str:
    """Return the first connections that could not be opened in words, and the number of others."""
    said = "; ".join(one.describe(names) for one in obstructions[:_NUM_TOLD])
    num_more = len(obstructions) - _NUM_TOLD
    return said + (f"; and {num_more} more such connections" if num_more > 0 else "")


@contextmanager
def listening(size: int) -> Iterator[Address | None]:
    """Listen where others of the same run, on other machines, can try to connect; they are not answered.

    Yields:
        Address; None if no launcher has said by which one others reach this machine, or an interface was named instead.
    """
    host = None if os.environ.get("GLOO_SOCKET_IFNAME") else os.environ.get(HOST_ADDRESS)  # as gloo chooses it
    try:
        family = socket.getaddrinfo(host, None)[0][0] if host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=2 * size + 8) if host else None
    except OSError:  # gloo says so
        listener = None
    if listener is None:
        yield None
        return
    with listener:
        yield listener.getsockname()[:2]


def check_reach(
    store: Store,
    rank: int,
    addresses: Sequence[Address | None],
    hosts: Sequence[str],
    *,
    timeout_s: float,
    epoch: int,
) -> None:
    """Return on all ranks once each has reached all that are on other machines.

    Args:
        store: Store of this check alone.
        rank: Rank of this process.
        addresses: Addresses at which ranks listen; None where nothing is tried.
        hosts: Keys that are the same on all ranks of a machine.
        timeout_s: Longest time of an operation.
        epoch: Number of the membership.

    Raises:
        UnreachableError: Some rank did not reach another one; raised on all ranks.
        CommunicationError: Some rank is known to be lost.
    """
    limit_s, size = min(timeout_s, REACH_S), len(hosts)
    targets = {n: one for n, one in enumerate(addresses) if one is not None and hosts[n] != hosts[rank]}
    failed: dict[int, str] = {}
    if targets:
        failed = connect(lambda: try_connections(targets, limit_s), store, epoch, [*targets], limit_s + timeout_s)
    said = exchange_documents(store, rank, size, sorted(failed.items()), limit_s + timeout_s)
    if found := [Obstruction(one, other, words) for one, pairs in enumerate(said) for other, words in pairs]:
        raise UnreachableError(found, size)


def try_connections(addresses: Mapping[int, Address], timeout_s: float) -> dict[int, str]:
    """Return address, time and reason of those that could not be reached, in words, by rank."""
    failed: dict[int, str] = {}

    def reach(number: int, host: str, port: int) -> None:
        deadline_s, reason = time.monotonic() + timeout_s, "timed out"
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                socket.create_connection((host, port), left_s).close()
                return
            except OSError as error:
                reason = str(error)
            time.sleep(max(0.0, min(_PAUSE_S, deadline_s - time.monotonic())))
        failed[number] = f"{host}:{port} within {timeout_s:g} s ({reason})"

    threads = [start_thread(reach, number, *address, name="paceline-reach") for number, address in addresses.items()]
    for thread in threads:
        thread.join()
    return failed
