"""A server: it applies workers' pushes to its part of the parameters, and returns the new parameters."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from paceline.comm.rpc import NOTHING, RpcHeader, RpcReply, RpcService
from paceline.compression import Codec, NoCodec
from paceline.errors import CommunicationError
from paceline.sync.parameter_server.clocks import FollowedQuorum
from paceline.sync.parameter_server.shard import Push, ServerUpdate, Shard
from paceline.sync.parameter_server.state import pack_state, unpack_state
from paceline.sync.parameter_server.wire_format import States, WireFormat, make_wire_formats, without_residuals


class RequestKind(IntEnum):
    """Kind of a worker's request."""

    SWAP = 0
    """Apply a push, and return the parameters as soon as the worker may have them."""
    READ = 1
    """Return the present parameters, not encoded."""
    REPORT = 2
    """Receive the parameters that the worker has, and their version."""
    AWAY = 3
    """Do not wait for the worker any longer."""
    BACK = 4
    """Wait for the worker again, from the returned clock on."""
    SAVE = 5
    LOAD = 6
    COUNT = 7
    """Return the delays of pushes."""
    PUSH_AGAIN = 8
    """Apply a push that another server was sent, and wait for nobody."""


_READING = (RequestKind.READ, RequestKind.SAVE, RequestKind.COUNT)
"""Requests that change nothing."""


class Server(RpcService):
    """Serves a shard to workers.

    Args:
        shard: Parameters of the server.
        server_update: Update that applies pushes.
        workers: Ranks that take part from the beginning.
        codec: Codec of pushes.
        pull_codec: Codec of pulls, which then send differences from a worker's parameters instead of parameters.
        seed: Random seed of the codecs.
        stops_at_loss: Whether to stop when a worker is lost, so that the others go on from this state; else they are
            served on.
    """

    def __init__(
        self,
        shard: Shard,
        server_update: ServerUpdate,
        workers: Sequence[int],
        codec: Codec,
        pull_codec: Codec,
        seed: int,
        *,
        stops_at_loss: bool = False,
    ) -> None:
        self._shard = shard
        self._stops_at_loss = stops_at_loss
        self.server_update = server_update
        for worker in workers:
            server_update.clocks.join(worker)
        num_groups = len(shard.optimizer.param_groups)
        self._num_groups = num_groups
        self._push_format, pull_format = make_wire_formats(codec, pull_codec, shard.blocks, num_groups, seed)
        whole_format = WireFormat(NoCodec(), shard.blocks)
        self._mirrors = {worker: _Mirror(pull_format, whole_format, shard) for worker in workers}
        self._changed = threading.Condition()
        self._tickets: dict[int, _Ticket] = {}
        """Workers that wait for parameters."""
        self.copy: Callable[[int, RpcHeader, Tensor], None] | None = None
        """Function that sends a worker's request to the standby, if there is one; see `note_copied`."""
        self._num_to_copy = self._num_copied = 0
        self._failure: BaseException | None = None
        self._is_broken = False
        """Whether a request has failed half-way."""
        self.lost: dict[int, BaseException] = {}
        """Workers that left without saying goodbye."""
        self._bodies: dict[int, Tensor] = {}

    def request_buffer(self, caller: int) -> Tensor:
        """Return the worker's own buffer for pushes."""
        if caller not in self._bodies:
            self._bodies[caller] = self._push_format.new_body()
        return self._bodies[caller]

    def set_reply_buffer(self, caller: int, outbox: Tensor) -> None:
        """Place the worker's pulls in memory that it sees."""
        self._mirrors[caller].move(outbox)

    def handle(self, caller: int, header: RpcHeader, body: Tensor) -> Callable[[], RpcReply]:
        """Execute the request."""
        with self._changed:
            self._check()
            if self.copy is not None and header.kind not in _READING:
                self._num_to_copy += 1
                self.copy(caller, header, body)
            ticket = _Ticket(False)
            if header.kind == RequestKind.SWAP:
                ticket = self._swap(caller, header, body)
            else:
                ticket.reply, ticket.num_to_copy = self._answer(caller, header, body), self._num_to_copy
            return lambda: self._wait(ticket)

    def drop_caller(self, caller: int, error: BaseException | None) -> None:
        """Stop all waiting for a worker that is gone; a server that has stopped applies nothing more for it."""
        with self._changed:
            if error is not None:
                self.lost[caller] = error
                if self._stops_at_loss:
                    self._stop(error)
            if self._failure is not None:
                return
            if error is not None:
                self.server_update.lose(caller)
            self._tickets.pop(caller, None)
            self._leave(caller)

    def fail(self, error: BaseException) -> None:
        """End all waiting for this server."""
        with self._changed:
            self._is_broken |= not isinstance(error, CommunicationError)
            self._stop(error)

    def hold(self) -> Tensor | None:
        """Stop serving, and return the state, from which another server can go on; None if this one has failed."""
        with self._changed:
            self._stop(CommunicationError("workers change"))
            if self._is_broken:
                return None
            self.server_update.finish(self._shard)
            return self._save({"used": self._shard.used})

    def _stop(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.notify_all()

    def note_copied(self) -> None:
        """Record that the standby has applied another request."""
        with self._changed:
            self._num_copied += 1
            self._changed.notify_all()

    def follow(self, step: int, workers: Collection[int]) -> None:
        """Follow the first server: these workers count in a step."""
        with self._changed:
            self._check()
            clocks = self.server_update.clocks
            assert isinstance(clocks, FollowedQuorum)
            clocks.follow(step, workers)
            self._settle()

    def _swap(self, caller: int, header: RpcHeader, body: Tensor) -> "_Ticket":
        is_taken = self.server_update.push(self._shard, self._read_push(caller, header, body))
        self._shard.num_dropped += header.weight > 0 and not is_taken
        ticket = self._tickets[caller] = _Ticket(not is_taken)
        self.server_update.clocks.tick(caller)
        self._settle()
        return ticket

    def _wait(self, ticket: "_Ticket") -> RpcReply:
        """Return a ticket's reply, once it is there, and the standby has applied what it rests on."""
        with self._changed:
            while ticket.reply is None or self._num_copied < ticket.num_to_copy:
                self._check()
                self._changed.wait()
            return ticket.reply

    def _read_push(self, caller: int, header: RpcHeader, body: Tensor) -> Push:
        mirror = self._mirrors[caller]
        push = Push(caller, header.clock, header.version, header.weight, header.value, [], [], [])
        push.start, push.stop = header.start, header.stop
        if header.weight > 0:
            push.values, numbers = self._push_format.read(body, header.clock)
            push.rates, push.used = numbers[: self._num_groups], [flag > 0 for flag in numbers[self._num_groups :]]
            push.known = mirror.known.tensors
        return push

    def _settle(self) -> None:
        """Do what is due, and return parameters to all workers that may have them, before they change again."""
        self.server_update.settle(self._shard)
        for worker, ticket in list(self._tickets.items()):
            if self.server_update.clocks.may_read(worker):
                self.server_update.clocks.read(worker)
                clock, is_dropped = self.server_update.clocks.clocks[worker], float(ticket.is_dropped)
                header = RpcHeader(RequestKind.SWAP, clock, self._shard.version, value=is_dropped)
                ticket.num_to_copy = self._num_to_copy
                ticket.reply = header, self._mirrors[worker].pull(self._shard, clock)
                del self._tickets[worker]
        self._changed.notify_all()

    def _leave(self, worker: int) -> None:
        self.server_update.clocks.leave(worker)
        self._settle()

    def _answer(self, caller: int, header: RpcHeader, body: Tensor) -> RpcReply:
        clocks, shard = self.server_update.clocks, self._shard
        clock, reply = 0, NOTHING
        if header.kind == RequestKind.AWAY:
            self._leave(caller)
        elif header.kind == RequestKind.BACK:
            clock = clocks.join(caller, header.clock)
        elif header.kind == RequestKind.READ:
            reply = shard.values.bytes.clone()
        elif header.kind == RequestKind.REPORT:
            self._mirrors[caller].set_known(body)
        elif header.kind == RequestKind.SAVE:
            reply = self._save()
        elif header.kind == RequestKind.LOAD:
            self._load(body)
        elif header.kind == RequestKind.COUNT:
            reply = pack_state({}, self._counts())
        elif header.kind == RequestKind.PUSH_AGAIN:
            self.server_update.push(shard, self._read_push(caller, header, body))
        return RpcHeader(header.kind, clock, shard.version), reply

    def _save(self, more: Mapping[str, Any] | None = None) -> Tensor:
        tensors, scalars = self._shard.state()
        kept, numbers = self.server_update.state(self._shard)
        document = {"scalars": scalars, "version": self._shard.version, "server_update": numbers, **self._counts()}
        return pack_state(tensors | kept, document | dict(more or {}))

    def _counts(self) -> dict[str, Any]:
        return {"delays": sorted(self._shard.delays.items()), "num_dropped": self._shard.num_dropped}

    def _load(self, body: Tensor) -> None:
        tensors, document = unpack_state(body)
        self._shard.load_state(tensors, document.get("scalars", {}))
        self._shard.version = document.get("version", 0)
        self._shard.delays = Counter(dict(document.get("delays", ())))
        self._shard.num_dropped = document.get("num_dropped", 0)
        self._shard.used = document.get("used", [])
        self.server_update.load_state(self._shard, tensors, document.get("server_update", {}))

    def _check(self) -> None:
        if self._failure is not None:
            raise CommunicationError(f"a server of this process failed: {self._failure}") from self._failure


@dataclass
class _Ticket:
    """A worker that waits for parameters."""

    is_dropped: bool
    """Whether its push came too late."""
    reply: RpcReply | None = None
    num_to_copy: int = 0
    """Number of requests that the standby must have applied first."""


class _Mirror:
    """The parameters that one worker has, as the server knows them."""

    def __init__(self, wire_format: WireFormat, whole: WireFormat, shard: Shard) -> None:
        self._wire_format = wire_format
        self._whole = whole
        self._body = wire_format.new_body()
        self._states: States = {}
        # If pulls are not encoded, the worker has the last one.
        self.known = wire_format.view(self._body) if wire_format.is_exact else whole.view(whole.new_body())
        self.known.bytes.copy_(shard.values.bytes)

    def pull(self, shard: Shard, clock: int) -> Tensor:
        """Return the body of a pull at a worker's clock, and update the worker's known parameters."""
        if self._wire_format.is_exact:
            self.known.bytes.copy_(shard.values.bytes)
            return self._body
        differences = torch._foreach_sub(shard.values.tensors, self.known.tensors)
        self._states = without_residuals(self._wire_format.write(self._body, differences, (), self._states, clock))
        torch._foreach_add_(self.known.tensors, self._wire_format.read(self._body, clock)[0])
        return self._body

    def move(self, body: Tensor) -> None:
        """Place pulls in another body."""
        self._body = body
        if self._wire_format.is_exact:
            body.copy_(self.known.bytes)
            self.known = self._wire_format.view(body)

    def set_known(self, body: Tensor) -> None:
        """Set the worker's known parameters."""
        self.known.bytes.copy_(body)
