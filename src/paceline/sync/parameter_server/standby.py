"""Standbys: a second worker applies each request to a server in the same order, and has the same state, bit for bit."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.rpc import NOTHING, RpcClient, RpcEndpoint, RpcHeader, RpcReply, RpcService
from paceline.comm.threads import start_thread
from paceline.errors import CommunicationError
from paceline.sync.parameter_server.server import RequestKind, Server

_NUM_KINDS = len(RequestKind)
_Requests = SimpleQueue[tuple[RpcHeader, Tensor] | None]
"""Requests to be made again at the standby; None at the end."""


def choose_standby(server: int, hosts: Sequence[Sequence[int]]) -> int | None:
    """Return the rank of a server's standby: the next rank on another host, or on its own; None without another.

    Args:
        server: Rank of the server.
        hosts: Ranks of each host.
    """
    size = sum(len(ranks) for ranks in hosts)
    here = next(ranks for ranks in hosts if server in ranks)
    others = [(server + offset) % size for offset in range(1, size)]
    return next((rank for rank in others if rank not in here), others[0] if others else None)


class Standbys:
    """Copies of the requests to each server, on their way to its standby. Every rank of the group makes it.

    A worker gets its reply once the standby has applied all that it rests on.

    Args:
        group: Group of the workers.
        places: Rank of each server and of its standby, by the server's number.
        server: Server of this rank, if any; it has no requests yet.
        make_server: Function that returns the server of a number, for its standby.
    """

    def __init__(
        self,
        group: Group,
        places: Mapping[int, tuple[int, int]],
        server: Server | None,
        make_server: Callable[[int], Server],
    ) -> None:
        mine = {number: first for number, (first, standby) in places.items() if standby == group.rank}
        self.servers = {number: make_server(number) for number in mine}
        """Servers for which this process is the standby, by number."""
        follower = _StandbyService({mine[number]: standing for number, standing in self.servers.items()})
        self._endpoint = RpcEndpoint(group, list(places.values()), follower if mine else None, "standbys")
        requests: _Requests = SimpleQueue()
        self._thread: threading.Thread | None = None
        # The thread refers only to what it needs, so that dropping this object ends it.
        self._end = weakref.finalize(self, requests.put, None)
        self._end.atexit = False
        if server is not None and self._endpoint.clients:
            (client,) = self._endpoint.clients.values()
            server.copy = lambda worker, header, body: requests.put((_address(header, worker), body.clone()))
            stop = partial(requests.put, None)
            self._thread = start_thread(_send, requests, client, server, name="paceline-standby", stop=stop)

    def close(self) -> None:
        """Send the remaining requests, once no worker makes any more."""
        self._end()
        if self._thread is not None:
            self._thread.join()
        self._endpoint.close()


def _address(header: RpcHeader, worker: int) -> RpcHeader:
    """Return a header that tells the standby whose request it is."""
    return replace(header, kind=worker * _NUM_KINDS + header.kind)


def _send(requests: _Requests, client: RpcClient, server: Server) -> None:
    try:
        while (request := requests.get()) is not None:
            client.call(*request)
            server.note_copied()
    except CommunicationError as error:
        server.fail(error)


class _StandbyService(RpcService):
    """Service that makes servers' requests again.

    Args:
        servers: Server for which this process is the standby, by the first one's rank.
    """

    def __init__(self, servers: Mapping[int, Server]) -> None:
        self._servers = servers

    def handle(self, caller: int, header: RpcHeader, body: Tensor) -> Callable[[], RpcReply]:
        """Make the request; nobody waits for its reply."""
        server = self._servers[caller]
        worker, kind = divmod(header.kind, _NUM_KINDS)
        if kind == RequestKind.SWAP and len(body):  # a push may wait for others, longer than this body stays
            body = server.request_buffer(worker).copy_(body)
        server.handle(worker, replace(header, kind=kind), body)
        return lambda: (header, NOTHING)

    def fail(self, error: BaseException) -> None:
        """Fail: a request has failed half-way."""
        for server in self._servers.values():
            server.fail(error)
