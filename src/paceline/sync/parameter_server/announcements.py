"""Announcements with backup workers on several servers: the first says which workers' gradients count in a step."""

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.rpc import NOTHING, RpcClient, RpcEndpoint, RpcHeader, RpcReply, RpcService
from paceline.comm.threads import start_thread
from paceline.errors import CommunicationError
from paceline.sync.parameter_server.aggregation import StepAggregation
from paceline.sync.parameter_server.server import Server

_Announcements = SimpleQueue[tuple[int, Collection[int]] | None]
"""Steps and the workers that count in them; None at the end."""


class StepAnnouncements:
    """Announcements of the first server to the others, in the order of steps. Every rank of the group makes it.

    Args:
        group: Group of the servers' ranks.
        servers: Ranks of the servers.
        server: Server of this rank, if any.
    """

    def __init__(self, group: Group, servers: Sequence[int], server: Server | None) -> None:
        first, *others = servers
        follower = _Follower(server) if server is not None and group.rank in others else None
        self._endpoint = RpcEndpoint(group, [(first, other) for other in others], follower, "announcements")
        announced: _Announcements = SimpleQueue()
        self._thread: threading.Thread | None = None
        # The thread refers only to what it needs, so that dropping this object ends it.
        self._end = weakref.finalize(self, announced.put, None)
        self._end.atexit = False
        if server is not None and group.rank == first:
            assert isinstance(server.server_update, StepAggregation)
            server.server_update.announce = lambda step, workers: announced.put((step, workers))
            clients = list(self._endpoint.clients.values())
            stop = partial(announced.put, None)
            self._thread = start_thread(_announce, announced, clients, server, name="paceline-announcements", stop=stop)

    def close(self) -> None:
        """Send the remaining announcements, once no worker makes requests any more."""
        self._end()
        if self._thread is not None:
            self._thread.join()
        self._endpoint.close()


def _announce(announced: _Announcements, clients: Sequence[RpcClient], server: Server) -> None:
    try:
        while (announcement := announced.get()) is not None:
            step, workers = announcement
            body = torch.tensor(sorted(workers)).view(torch.uint8)
            for client in clients:
                client.begin(RpcHeader(0, clock=step), body)
            for client in clients:
                client.finish()
    except CommunicationError as error:
        server.fail(error)


class _Follower(RpcService):
    """Service that receives the first server's announcements."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def handle(self, caller: int, header: RpcHeader, body: Tensor) -> Callable[[], RpcReply]:
        """Pass the announcement to this process's server."""
        self._server.follow(header.clock, body.view(torch.int64).tolist())
        return lambda: (header, NOTHING)

    def drop_caller(self, caller: int, error: BaseException | None) -> None:
        """Fail: without the first server no step can finish."""
        if error is not None:
            self._server.fail(error)

    def fail(self, error: BaseException) -> None:
        """Fail: a step that the announcement made due has failed."""
        self._server.fail(error)
