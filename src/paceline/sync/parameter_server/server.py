"""A server: it takes what workers push to its part of the parameters, and gives them what has become of it."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from paceline.comm.exchange import NOTHING, Header, Reply, Service
from paceline.compression import Codec, NoCodec
from paceline.errors import CommunicationError
from paceline.sync.parameter_server.clocks import FollowedQuorum
from paceline.sync.parameter_server.shard import Landing, Push, Shard
from paceline.sync.parameter_server.state import pack_state, unpack_state
from paceline.sync.parameter_server.wire import States, Wire, make_wires, without_residuals


class Kind(IntEnum):
    """What a worker asks for."""

    SWAP = 0
    """Take a push, and give the parameters as soon as the worker may have them."""
    READ = 1
    """Give the parameters as they are now, not encoded."""
    TELL = 2
    """Learn the parameters that the worker has, and their version."""
    AWAY = 3
    """Wait for the worker no longer."""
    BACK = 4
    """Wait for the worker again, from the clock that is replied."""
    SAVE = 5
    LOAD = 6
    COUNT = 7
    """Tell how stale pushes were."""


class Server(Service):
    """Serves a shard to workers.

    Args:
        shard: Its parameters.
        landing: What becomes of pushes; an attribute too.
        workers: Ranks that take part from the beginning.
        codec: Of pushes.
        pull_codec: Of the differences to what a worker has, which are then pulled in place of parameters.
        seed: Of what codecs draw.
    """

    def __init__(
        self, shard: Shard, landing: Landing, workers: Sequence[int], codec: Codec, pull_codec: Codec, seed: int
    ) -> None:
        self._shard = shard
        self.landing = landing
        for worker in workers:
            landing.clocks.join(worker)
        num_groups = len(shard.optimizer.param_groups)
        self._num_groups = num_groups
        self._push_wire, pull_wire = make_wires(codec, pull_codec, shard.pieces, num_groups, seed)
        whole_wire = Wire(NoCodec(), shard.pieces)
        self._mirrors = {worker: _Mirror(pull_wire, whole_wire, shard) for worker in workers}
        self._changed = threading.Condition()
        self._tickets: dict[int, _Ticket] = {}
        """Workers that wait for parameters."""
        self._failure: BaseException | None = None
        self.lost: dict[int, BaseException] = {}
        """Workers that did not say goodbye."""
        self._bodies: dict[int, Tensor] = {}

    def buffer(self, caller: int) -> Tensor:
        """Return the worker's own buffer for pushes."""
        if caller not in self._bodies:
            self._bodies[caller] = self._push_wire.new_body()
        return self._bodies[caller]

    def lend(self, caller: int, outbox: Tensor) -> None:
        """Let what the worker pulls lie where it sees it."""
        self._mirrors[caller].move(outbox)

    def take(self, caller: int, header: Header, body: Tensor) -> Callable[[], Reply]:
        """Do what is asked for."""
        with self._changed:
            self._check()
            if header.kind == Kind.SWAP:
                return self._swap(caller, header, body)
            reply = self._answer(caller, header, body)
            return lambda: reply

    def lose(self, caller: int, error: BaseException | None) -> None:
        """Let nobody wait for a worker that is gone."""
        with self._changed:
            if error is not None:
                self.lost[caller] = error
            self._tickets.pop(caller, None)
            self._leave(caller)

    def fail(self, error: BaseException) -> None:
        """Let nobody wait for this server."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def hear(self, step: int, workers: Collection[int]) -> None:
        """Follow the first server: these workers count in a step."""
        with self._changed:
            self._check()
            clocks = self.landing.clocks
            assert isinstance(clocks, FollowedQuorum)
            clocks.hear(step, workers)
            self._settle()

    def _swap(self, caller: int, header: Header, body: Tensor) -> Callable[[], Reply]:
        is_taken = self.landing.push(self._shard, self._read_push(caller, header, body))
        self._shard.num_dropped += header.mass > 0 and not is_taken
        ticket = self._tickets[caller] = _Ticket(not is_taken)
        self.landing.clocks.tick(caller)
        self._settle()

        def wait() -> Reply:
            with self._changed:
                while ticket.reply is None:
                    self._check()
                    self._changed.wait()
                return ticket.reply

        return wait

    def _read_push(self, caller: int, header: Header, body: Tensor) -> Push:
        mirror = self._mirrors[caller]
        push = Push(caller, header.clock, header.version, header.mass, header.value, [], [], [])
        if header.mass > 0:
            push.values, numbers = self._push_wire.read(body, header.clock)
            push.rates, push.used = numbers[: self._num_groups], [flag > 0 for flag in numbers[self._num_groups :]]
            push.known = mirror.known.tensors
        return push

    def _settle(self) -> None:
        """Do what is due, and give parameters to all who may have them, before anybody can change them again."""
        self.landing.settle(self._shard)
        for worker, ticket in list(self._tickets.items()):
            if self.landing.clocks.may_read(worker):
                self.landing.clocks.read(worker)
                clock, is_dropped = self.landing.clocks.clocks[worker], float(ticket.is_dropped)
                header = Header(Kind.SWAP, clock, self._shard.version, value=is_dropped)
                ticket.reply = header, self._mirrors[worker].pull(self._shard, clock)
                del self._tickets[worker]
        self._changed.notify_all()

    def _leave(self, worker: int) -> None:
        self.landing.clocks.leave(worker)
        self._settle()

    def _answer(self, caller: int, header: Header, body: Tensor) -> Reply:
        clocks, shard = self.landing.clocks, self._shard
        clock, reply = 0, NOTHING
        if header.kind == Kind.AWAY:
            self._leave(caller)
        elif header.kind == Kind.BACK:
            clock = clocks.join(caller, header.clock)
        elif header.kind == Kind.READ:
            reply = shard.values.bytes.clone()
        elif header.kind == Kind.TELL:
            self._mirrors[caller].learn(body)
        elif header.kind == Kind.SAVE:
            reply = self._save()
        elif header.kind == Kind.LOAD:
            self._load(body)
        elif header.kind == Kind.COUNT:
            reply = pack_state({}, self._counts())
        return Header(header.kind, clock, shard.version), reply

    def _save(self) -> Tensor:
        tensors, scalars = self._shard.state()
        kept, numbers = self.landing.state(self._shard)
        document = {"scalars": scalars, "version": self._shard.version, "landing": numbers, **self._counts()}
        return pack_state(tensors | kept, document)

    def _counts(self) -> dict[str, Any]:
        return {"delays": sorted(self._shard.delays.items()), "num_dropped": self._shard.num_dropped}

    def _load(self, body: Tensor) -> None:
        tensors, document = unpack_state(body)
        self._shard.load_state(tensors, document.get("scalars", {}))
        self._shard.version = document.get("version", 0)
        self._shard.delays = Counter(dict(document.get("delays", ())))
        self._shard.num_dropped = document.get("num_dropped", 0)
        self.landing.load_state(self._shard, tensors, document.get("landing", {}))

    def _check(self) -> None:
        if self._failure is not None:
            raise CommunicationError(f"a server of this process failed: {self._failure}") from self._failure


@dataclass
class _Ticket:
    """A worker that waits for parameters."""

    is_dropped: bool
    """Whether what it pushed came too late."""
    reply: Reply | None = None


class _Mirror:
    """What a server knows of one worker: the parameters that it has."""

    def __init__(self, wire: Wire, whole: Wire, shard: Shard) -> None:
        self._wire = wire
        self._whole = whole
        self._body = wire.new_body()
        self._states: States = {}
        # Where pulls are not encoded, the last one is what the worker has.
        self.known = wire.view(self._body) if wire.is_exact else whole.view(whole.new_body())
        self.known.bytes.copy_(shard.values.bytes)

    def pull(self, shard: Shard, clock: int) -> Tensor:
        """Return the body of a pull at a worker's clock, and note what the worker makes of it."""
        if self._wire.is_exact:
            self.known.bytes.copy_(shard.values.bytes)
            return self._body
        differences = torch._foreach_sub(shard.values.tensors, self.known.tensors)
        self._states = without_residuals(self._wire.write(self._body, differences, (), self._states, clock))
        torch._foreach_add_(self.known.tensors, self._wire.read(self._body, clock)[0])
        return self._body

    def move(self, body: Tensor) -> None:
        """Let pulls lie in another body."""
        self._body = body
        if self._wire.is_exact:
            body.copy_(self.known.bytes)
            self.known = self._wire.view(body)

    def learn(self, body: Tensor) -> None:
        """Note that the worker has these."""
        self.known.bytes.copy_(body)
