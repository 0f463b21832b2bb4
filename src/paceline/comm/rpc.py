"""Remote procedure calls between a worker and a server: push, pull and swap, for workers without a common round.

A request is a header of fixed size and a body of bytes, and so is its reply: a push fills the first, a pull the
second, a swap both. Headers carry clocks and versions; the service defines their meaning. Each worker has its own
link and thread at each service, so that a slow or dead one holds up no other.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial

from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.progress import PROGRESS
from paceline.comm.rpc_connection import NOTHING, RpcConnection, RpcHeader, RpcReply
from paceline.comm.shared_memory.segment import round_to_pages
from paceline.comm.threads import start_thread
from paceline.errors import CommunicationError

__all__ = ["NOTHING", "RpcClient", "RpcEndpoint", "RpcHeader", "RpcReply", "RpcService"]

Route = tuple[int, int]
"""Ranks of the caller and of the server."""

_GOODBYE, _ALIVE = -1, -2
_ALIVE_INTERVAL_S = 1.0


class RpcService(ABC):
    """Answers the requests of workers: those of one worker in order, those of several at once."""

    def request_buffer(self, caller: int) -> Tensor:
        """Return the buffer that receives a caller's request bodies of the usual size: the caller's until the reply."""
        return NOTHING

    def set_reply_buffer(self, caller: int, outbox: Tensor) -> None:
        """Record memory that a caller sees too: a reply body that begins there need not be sent."""

    @abstractmethod
    def handle(self, caller: int, header: RpcHeader, body: Tensor) -> Callable[[], RpcReply]:
        """Process a request without waiting for anyone, and return a function that waits for the reply.

        The body of a reply must stay unchanged until the reply to the caller's next request.
        """

    def drop_caller(self, caller: int, error: BaseException | None) -> None:
        """Record that a caller has left, or is lost with an `error`: from now on nothing may wait for it."""

    def fail(self, error: BaseException) -> None:
        """Record that the service cannot go on: everyone who waits for a reply must get the `error` now."""


class RpcClient(ABC):
    """A worker's connection to one service: one request at a time, from any thread.

    Args:
        server: Rank of the server.

    Attributes:
        outbox: Memory that the service sees too: a request body that begins there need not be sent. Empty if no memory
            is shared.
        inbox: Memory where reply bodies may lie until the next request, instead of the tensor given to `finish`.
    """

    outbox: Tensor = NOTHING
    inbox: Tensor = NOTHING

    def __init__(self, server: int) -> None:
        self.server = server
        self._turn = threading.Lock()
        """Held from a request to the end of its reply."""

    def begin(self, header: RpcHeader, body: Tensor = NOTHING) -> None:
        """Send a request; its body must stay unchanged until `finish`, which must follow.

        Raises:
            CommunicationError: The service is lost.
        """
        self._turn.acquire()
        try:
            self._begin(header, body)
        except BaseException:
            self._turn.release()
            raise

    def finish(self, into: Tensor | None = None) -> RpcReply:
        """Wait for the reply and return it.

        Args:
            into: Tensor for the reply body, if it has that size: uint8, 1-dim.

        Raises:
            CommunicationError: The service is lost; the message names its rank.
        """
        try:
            return self._finish(into)
        finally:
            self._turn.release()

    def call(self, header: RpcHeader, body: Tensor = NOTHING, *, into: Tensor | None = None) -> RpcReply:
        """Send a request and wait for its reply."""
        self.begin(header, body)
        return self.finish(into)

    @abstractmethod
    def _begin(self, header: RpcHeader, body: Tensor) -> None: ...

    @abstractmethod
    def _finish(self, into: Tensor | None) -> RpcReply: ...

    def keep_alive(self) -> None:
        """Tell the service that this worker lives, unless a request is under way anyway."""

    def close(self) -> None:
        """Say goodbye."""


class _LocalClient(RpcClient):
    """Client of the service in the same process."""

    def __init__(self, server: int, service: RpcService) -> None:
        super().__init__(server)
        self._service = service
        self._wait: Callable[[], RpcReply] | None = None

    def _begin(self, header: RpcHeader, body: Tensor) -> None:
        self._wait = self._service.handle(self.server, header, body)

    def _finish(self, into: Tensor | None) -> RpcReply:
        assert self._wait is not None
        header, body = self._wait()
        self._wait = None
        return header, body if into is None or len(into) != len(body) else into.copy_(body)

    def close(self) -> None:
        self._service.drop_caller(self.server, None)


class _RemoteClient(RpcClient):
    """Client of a service in another process."""

    def __init__(self, server: int, connection: RpcConnection, name: str) -> None:
        super().__init__(server)
        self._connection = connection
        self._name = name
        self.outbox, self.inbox = connection.outbox, connection.inbox

    def _begin(self, header: RpcHeader, body: Tensor) -> None:
        try:
            self._connection.send(header, body)
        except CommunicationError as error:
            raise self._explain(error) from error

    def _finish(self, into: Tensor | None) -> RpcReply:
        try:
            return self._connection.receive(NOTHING if into is None else into)
        except CommunicationError as error:
            raise self._explain(error) from error

    def keep_alive(self) -> None:
        self._notify(_ALIVE)

    def close(self) -> None:
        was_sent = self._notify(_GOODBYE)
        self._connection.link.close(None if was_sent else CommunicationError("it left during a request"))

    def _notify(self, kind: int) -> bool:
        """Send a header that has no reply, unless a request is under way; return whether it was sent."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            self._connection.send(RpcHeader(kind), NOTHING)
            self._connection.wait_until_sent()
            return True
        except CommunicationError:
            return False  # the next request raises the error
        finally:
            self._turn.release()

    def _explain(self, error: CommunicationError) -> CommunicationError:
        return type(error)(f"{self._name}: the server on rank {self.server} is lost: {error}")


class RpcEndpoint:
    """RPC clients of this rank, and the threads that serve other ranks.

    Every rank of the group makes it, with the same routes. A caller must send something at least once within the
    group's time-out; a thread does so while the worker computes.

    Args:
        group: Group of the callers and servers.
        routes: Pairs (caller, server) of ranks that may talk.
        service: Service that answers here; None on ranks that are not servers.
        name: Name of the endpoint in errors.
        body_bytes: Sizes of request and reply bodies by server, for bodies that should lie in memory that both ends
            share, if they can.
    """

    def __init__(
        self,
        group: Group,
        routes: Collection[Route],
        service: RpcService | None,
        name: str,
        body_bytes: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        group = group.on_cpu()
        self.clients: dict[int, RpcClient] = {}
        """Clients by the rank of the server."""
        self._service = service
        self._connections: list[RpcConnection] = []
        self._callers: list[tuple[int, str]] = []
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._boxes = _share_boxes(group, routes, body_bytes or {})
        # In the same order on all ranks, which avoids deadlock.
        for caller, server in sorted(routes, key=lambda route: (min(route), max(route), route)):
            if group.rank in (caller, server):
                self._open(group, caller, server, f"{name} of rank {caller} at {server}")
        for connection, (caller, title) in zip(self._connections, self._callers, strict=True):
            arguments = self._service, connection, caller, self._connections
            stop = partial(connection.link.close, CommunicationError("its process ends"))
            self._threads.append(start_thread(_serve, *arguments, name=title, stop=stop))
        # Threads refer only to what they need: they would keep a dropped endpoint alive otherwise.
        self._end = weakref.finalize(self, self._closed.set)
        self._end.atexit = False
        if any(isinstance(client, _RemoteClient) for client in self.clients.values()):
            clients = list(self.clients.values())
            self._threads.append(
                start_thread(_keep_alive, clients, self._closed, name="paceline-alive", stop=self._closed.set)
            )

    def close(self) -> None:
        """Say goodbye to the servers, and serve until all callers have said goodbye or are lost."""
        self._closed.set()
        for client in self.clients.values():
            client.close()
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.link.close()

    def _open(self, group: Group, caller: int, server: int, name: str) -> None:
        if caller == server:
            assert self._service is not None
            self.clients[server] = _LocalClient(server, self._service)
            return
        link = group.link(server if group.rank == caller else caller, name)
        requests, replies = self._boxes.get((caller, server), (NOTHING, NOTHING))
        if group.rank == caller:
            self.clients[server] = _RemoteClient(server, RpcConnection(link, name, requests, replies), name)
            return
        assert self._service is not None
        if len(replies):
            self._service.set_reply_buffer(caller, replies)
        connection = RpcConnection(link, name, replies, requests)
        self._connections.append(connection)
        self._callers.append((caller, name))


def _share_boxes(
    group: Group, routes: Collection[Route], body_bytes: Mapping[int, tuple[int, int]]
) -> dict[Route, tuple[Tensor, Tensor]]:
    """Return the memory of requests and replies, by route between two ranks that share memory."""
    sizes = dict.fromkeys(group.host_ranks, 0)
    places: dict[Route, list[tuple[int, slice]]] = {}
    for route in sorted(routes):
        if route[0] != route[1] and route[1] in body_bytes and sizes.keys() >= set(route):
            for rank, length in zip(route, body_bytes[route[1]], strict=True):
                places.setdefault(route, []).append((rank, slice(sizes[rank], sizes[rank] + length)))
                sizes[rank] += round_to_pages(length)
    buffers = group.share(sizes) if places else {}
    if not buffers:
        return {}
    return {route: (buffers[a][mine], buffers[b][theirs]) for route, ((a, mine), (b, theirs)) in places.items()}


def _serve(service: RpcService, connection: RpcConnection, caller: int, connections: list[RpcConnection]) -> None:
    """Answer one caller until it leaves."""
    PROGRESS.serve()
    try:
        while True:
            header, body = connection.receive(NOTHING if len(connection.inbox) else service.request_buffer(caller))
            if header.kind == _GOODBYE:
                connection.wait_until_sent()
                service.drop_caller(caller, None)
                return
            if header.kind != _ALIVE:
                connection.send(*service.handle(caller, header, body)())
    except BaseException as error:
        _drop(service, caller, error, connection, connections)


def _drop(
    service: RpcService, caller: int, error: BaseException, connection: RpcConnection, connections: list[RpcConnection]
) -> None:
    """Drop a lost caller; if the service itself cannot go on, drop all callers."""
    try:
        if isinstance(error, CommunicationError):
            service.drop_caller(caller, error)
            connection.link.close(error)  # the caller may live, and wait for the reply of a failed service
            return
    except BaseException as other:  # other callers' requests were processed, and one of them failed
        error = other
    service.fail(error)
    for connection in connections:
        connection.link.close(error)


def _keep_alive(clients: list[RpcClient], closed: threading.Event) -> None:
    while not closed.wait(_ALIVE_INTERVAL_S):
        for client in clients:
            client.keep_alive()
