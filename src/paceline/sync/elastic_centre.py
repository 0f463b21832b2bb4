"""The centre of asynchronous EASGD: it runs in the first worker's process, and pulls one worker at a time."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.rpc import RpcEndpoint, RpcHeader, RpcReply, RpcService
from paceline.errors import NonFiniteError
from paceline.sync.gossip import FlatParameters
from paceline.sync.sample_dispatcher import DispatcherClient
from paceline.sync.synchroniser import HandedOver, LocalStep, SampleDispatcher, Synchroniser, SyncResult, WorkerContext

_SWAP, _READ = 0, 1
"""Kinds of requests: a pull, and a read of the centre."""


class CentreService(RpcService):
    """Service that keeps the centre.

    A worker sends its parameters x and gets a * (x - c) back, which has already been added to c, under a lock, so that
    the centre gains what the worker loses.

    Args:
        centre: Value of the centre; changed in place.
        elasticity: Share a of the difference.
    """

    def __init__(self, centre: Tensor, elasticity: float) -> None:
        self.centre = centre
        self._elasticity = elasticity
        self._lock = threading.Lock()
        self._received: dict[int, Tensor] = {}

    def request_buffer(self, caller: int) -> Tensor:
        """Return the caller's own buffer."""
        if caller not in self._received:
            self._received[caller] = torch.empty_like(self.centre)
        return self._received[caller].view(torch.uint8)

    def handle(self, caller: int, header: RpcHeader, body: Tensor) -> Callable[[], RpcReply]:
        """Pull the caller, or return the centre."""
        with self._lock:
            if header.kind == _READ:
                reply = self.centre.clone()
            else:
                reply = body.view(self.centre.dtype).sub(self.centre).mul_(self._elasticity)
                self.centre.add_(reply)
        return lambda: (RpcHeader(header.kind), reply.view(torch.uint8))


class AsynchronousElastic(Synchroniser):
    """A worker that the centre pulls once in a period of its own steps.

    Args:
        context: The worker's model, optimizer and group.
        period: Steps from one pull to the next.
        elasticity: Share of the difference that both move.
    """

    def __init__(self, context: WorkerContext, period: int, elasticity: float) -> None:
        self._context, self._period = context, period
        self._flat = FlatParameters(context.parameters)
        self._num_steps = 0
        self._service = CentreService(self._flat.read(), elasticity) if context.group.rank == 0 else None
        routes = [(rank, 0) for rank in range(context.group.size)]
        self._endpoint = RpcEndpoint(context.group, routes, self._service, "easgd")
        self._client = self._endpoint.clients[0]
        self._sent, self._pull = self._flat.read(), self._flat.read()
        self._dispatcher = DispatcherClient(context.group)

    @property
    def dispatcher(self) -> SampleDispatcher | None:
        """Source of the workers' samples."""
        return self._dispatcher

    def before_update(self, step: LocalStep) -> None:
        """Begin to swap, if this worker is due: with the parameters that the gradients belong to."""
        self._num_steps += 1
        if self._is_due:
            self._client.begin(RpcHeader(_SWAP), self._flat.read(self._sent).view(torch.uint8))

    def after_update(self, step: LocalStep) -> SyncResult:
        """Move towards the centre by what it has taken."""
        result = SyncResult()
        if self._is_due:
            began_s = time.perf_counter()
            self._client.finish(self._pull.view(torch.uint8))
            result = SyncResult(time.perf_counter() - began_s, self._sent.nbytes + self._pull.nbytes)
            self._flat.write(self._flat.read().sub_(self._pull))
        if step.stop_requested:
            self._dispatcher.ask_to_stop()
        return result

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """While active, parameters are the centre."""
        own, centre = self._flat.read(), self._read()
        if not bool(centre.isfinite().all()):
            raise NonFiniteError(
                "the centre must be finite, but it is not; lower the learning rate or clip gradients, and resume from "
                "a checkpoint"
            )
        self._flat.write(centre)
        try:
            yield
        finally:
            self._flat.write(own)

    def shared_state(self) -> dict[str, Tensor]:
        """Return the centre."""
        return {"centre": self._read()}

    def hand_over(self, alone: Group) -> HandedOver | None:
        """Leave; the first worker waits until all others have left, and then reads and saves the centre alone."""
        found = self._dispatcher.hand_over()
        self._context = replace(self._context, group=alone)
        return found

    def document(self) -> dict[str, int]:
        """Return the number of steps that this worker has taken."""
        return {"num_steps": self._num_steps}

    def load_document(self, document: Mapping[str, int]) -> None:
        """Load it."""
        self._num_steps = document["num_steps"]

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Continue from the saved centre; without one, from these parameters."""
        if self._service is not None:
            self._service.centre.copy_(shared.get("centre", self._flat.read()))
        self._context.group.barrier(name="centre is loaded")

    def close(self) -> None:
        """Leave; the centre stays until all workers have left."""
        self._dispatcher.close()
        self._endpoint.close()

    @property
    def _is_due(self) -> bool:
        return self._num_steps % self._period == 0

    def _read(self) -> Tensor:
        """Return the centre, once all workers have arrived and none pulls at it."""
        self._context.group.barrier(name="centre is at rest")
        self._client.call(RpcHeader(_READ), into=self._pull.view(torch.uint8))
        self._context.group.barrier(name="centre was read")
        return self._pull.clone()
