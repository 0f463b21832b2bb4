"""With backup workers on several servers: the first server tells the others whose gradients a step takes."""

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from paceline.comm.exchange import NOTHING, Exchange, Header, Port, Reply, Service
from paceline.comm.group import Group
from paceline.errors import CommunicationError
from paceline.sync.parameter_server.gathering import Together
from paceline.sync.parameter_server.server import Server

_Said = SimpleQueue[tuple[int, Collection[int]] | None]
"""Steps and the workers that count in them; None at the end."""


class Verdicts:
    """The first server's word to the others, in the order of steps. Every rank of the group makes it.

    Args:
        group: Whose ranks the servers are on.
        servers: Their ranks.
        server: That of this rank, if there is one.
    """

    def __init__(self, group: Group, servers: Sequence[int], server: Server | None) -> None:
        first, *others = servers
        follower = _Follower(server) if server is not None and group.rank in others else None
        self._exchange = Exchange(group, [(first, other) for other in others], follower, "verdicts")
        said: _Said = SimpleQueue()
        self._thread: threading.Thread | None = None
        # The thread knows no more than it needs, so that what is forgotten ends it.
        self._end = weakref.finalize(self, said.put, None)
        self._end.atexit = False
        if server is not None and group.rank == first:
            assert isinstance(server.landing, Together)
            server.landing.announce = lambda step, workers: said.put((step, workers))
            arguments = said, list(self._exchange.ports.values()), server
            self._thread = threading.Thread(target=_tell, args=arguments, name="paceline-verdicts", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Tell what is left to tell, once no worker asks any more."""
        self._end()
        if self._thread is not None:
            self._thread.join()
        self._exchange.close()


def _tell(said: _Said, ports: Sequence[Port], server: Server) -> None:
    try:
        while (verdict := said.get()) is not None:
            step, workers = verdict
            body = torch.tensor(sorted(workers)).view(torch.uint8)
            for port in ports:
                port.begin(Header(0, clock=step), body)
            for port in ports:
                port.finish()
    except CommunicationError as error:
        server.fail(error)


class _Follower(Service):
    """Takes the first server's word in."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def take(self, caller: int, header: Header, body: Tensor) -> Callable[[], Reply]:
        """Hand it to this process's server."""
        self._server.hear(header.clock, body.view(torch.int64).tolist())
        return lambda: (header, NOTHING)

    def lose(self, caller: int, error: BaseException | None) -> None:
        """Without the first server no step can be done any more."""
        if error is not None:
            self._server.fail(error)

    def fail(self, error: BaseException) -> None:
        """A step that the verdict made due has failed."""
        self._server.fail(error)
