"""A server: its part of the parameters, and what it does with what workers push."""

import copy
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor, nn

from paceline.comm.exchange import NOTHING, Header, Reply, Service
from paceline.compression import Codec, NoCodec
from paceline.errors import CommunicationError
from paceline.sync.parameter_server.clocks import Clocks
from paceline.sync.parameter_server.pieces import Pack, Piece, copy_all
from paceline.sync.parameter_server.state import pack_state, unpack_state
from paceline.sync.parameter_server.wire import States, Wire, without_residuals


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


@dataclass
class Push:
    """What a worker pushed.

    Args:
        worker: Who.
        clock: Its steps before.
        version: Of the parameters that it was made from.
        mass: Of its samples; 0 if there were none, and then there are no values.
        unit: What values are counted in: they are a sum over samples, divided by it.
        rates: Learning rates, by parameter group.
        used: Whether each piece had a gradient.
        values: By piece.
        known: The parameters that it was made from, by piece, where the landing needs them.
    """

    worker: int
    clock: int
    version: int
    mass: float
    unit: float
    rates: Sequence[float]
    used: Sequence[bool]
    values: Sequence[Tensor]
    known: Sequence[Tensor] = ()


class Landing(ABC):
    """What becomes of pushes on one server; called by one thread at a time.

    Attributes:
        clocks: Who waits for whom.
        needs_known: Whether pushes must tell the parameters that they were made from.
    """

    needs_known: bool = False

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks

    @abstractmethod
    def push(self, shard: "Shard", push: Push) -> None:
        """Take in a push of a worker that takes part."""

    def settle(self, shard: "Shard") -> None:
        """Do what has become due since a worker left."""

    def state(self) -> dict[str, float]:
        """Return what it keeps, as numbers."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """Take on what was kept."""


class Shard:
    """A server's parameters, and an optimizer of them with the settings of the workers' own.

    Args:
        pieces: What of the parameters it holds.
        parameters: All of them, by name.
        optimizer: A worker's; it is left as it is.
    """

    def __init__(
        self, pieces: Sequence[Piece], parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        self.pieces = list(pieces)
        self.values = Pack(pieces)
        self.version = 0
        """Updates that were made."""
        self.delays: Counter[int] = Counter()
        """Pushes by how many updates of others came between their pull and them."""
        self.num_dropped = 0
        """Pushes that came too late for their step."""
        with torch.no_grad():
            copy_all(self.values.tensors, [piece.of(parameters[piece.parameter]) for piece in pieces])
        self.parameters = [nn.Parameter(tensor) for tensor in self.values.tensors]
        by_original: dict[int, list[nn.Parameter]] = {}
        for piece, parameter in zip(pieces, self.parameters, strict=True):
            by_original.setdefault(id(parameters[piece.parameter]), []).append(parameter)
        originals = [p for group in optimizer.param_groups for p in group["params"]]
        # The parameters stand for themselves in the copy, so that they are not copied with it.
        self.optimizer = copy.deepcopy(optimizer, {id(p): p for p in originals})
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = [mine for p in group["params"] for mine in by_original.get(id(p), [])]

    def step(self, gradients: Sequence[Tensor], used: Sequence[bool], rates: Sequence[float]) -> None:
        """Let the optimizer take a step."""
        for parameter, gradient, is_used in zip(self.parameters, gradients, used, strict=True):
            parameter.grad = gradient if is_used else None
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.version += 1

    def state(self) -> tuple[dict[str, Tensor], dict[str, dict[str, object]]]:
        """Return the tensors by ``parameter/<piece>`` and ``optimizer/<piece>/<key>``; and other state by piece."""
        tensors, scalars = {}, {}
        for piece, parameter in zip(self.pieces, self.parameters, strict=True):
            tensors[f"parameter/{piece.name}"] = parameter.detach()
            for key, kept in self.optimizer.state.get(parameter, {}).items():
                if isinstance(kept, Tensor):
                    tensors[f"optimizer/{piece.name}/{key}"] = kept
                else:
                    scalars.setdefault(piece.name, {})[key] = kept
        return tensors, scalars

    def load_state(self, tensors: dict[str, Tensor], scalars: dict[str, dict[str, object]]) -> None:
        """Take on a state: that of a piece may be missing from the optimizer's."""
        self.optimizer.state.clear()
        for piece, parameter in zip(self.pieces, self.parameters, strict=True):
            with torch.no_grad():
                parameter.copy_(tensors[f"parameter/{piece.name}"])
            prefix = f"optimizer/{piece.name}/"
            kept = {name.removeprefix(prefix): t.clone() for name, t in tensors.items() if name.startswith(prefix)}
            if kept or piece.name in scalars:
                self.optimizer.state[parameter] = {**kept, **scalars.get(piece.name, {})}


class Server(Service):
    """Serves a shard to workers.

    Args:
        shard: Its parameters.
        landing: What becomes of pushes.
        workers: Ranks that take part from the beginning.
        codec: Of pushes.
        pull_codec: Of the differences to what a worker has, which are then pulled in place of parameters.
        seed: Of what codecs draw.
    """

    def __init__(
        self, shard: Shard, landing: Landing, workers: Sequence[int], codec: Codec, pull_codec: Codec, seed: int
    ) -> None:
        self._shard = shard
        self._landing = landing
        for worker in workers:
            landing.clocks.join(worker)
        num_groups = len(shard.optimizer.param_groups)
        self._num_groups = num_groups
        self._push_wire = Wire(codec, shard.pieces, num_groups + len(shard.pieces) + 1, seed)
        self._pull_wire = Wire(pull_codec, shard.pieces, 0, seed)
        self._whole_wire = Wire(NoCodec(), shard.pieces)
        self._mirrors = {worker: _Mirror(self._pull_wire, self._whole_wire, shard) for worker in workers}
        self._changed = threading.Condition()
        self._tickets: dict[int, _Ticket] = {}
        """Workers that wait for parameters."""
        self._failure: BaseException | None = None
        self._bodies = {worker: self._push_wire.new_body() for worker in workers}

    def buffer(self, caller: int, header: Header, num_bytes: int) -> Tensor:
        """Return the worker's own buffer for pushes, another for anything else."""
        body = self._bodies[caller]
        return body if num_bytes == len(body) else torch.empty(num_bytes, dtype=torch.uint8)

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
            self._tickets.pop(caller, None)
            self._leave(caller)

    def fail(self, error: BaseException) -> None:
        """Let nobody wait for this server."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _swap(self, caller: int, header: Header, body: Tensor) -> Callable[[], Reply]:
        ticket = self._tickets[caller] = _Ticket()
        self._landing.push(self._shard, self._read_push(caller, header, body))
        self._landing.clocks.tick(caller)
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
            push.rates, push.used = numbers[: self._num_groups], [flag > 0 for flag in numbers[self._num_groups : -1]]
            push.known = mirror.known.tensors
        return push

    def _settle(self) -> None:
        """Do what is due, and give parameters to all who may have them, before anybody can change them again."""
        self._landing.settle(self._shard)
        for worker, ticket in list(self._tickets.items()):
            if self._landing.clocks.may_read(worker):
                self._landing.clocks.read(worker)
                header = Header(Kind.SWAP, self._landing.clocks.clocks[worker], self._shard.version)
                ticket.reply = header, self._mirrors[worker].pull(self._shard)
                del self._tickets[worker]
        self._changed.notify_all()

    def _leave(self, worker: int) -> None:
        self._landing.clocks.leave(worker)
        self._settle()

    def _answer(self, caller: int, header: Header, body: Tensor) -> Reply:
        clocks, shard = self._landing.clocks, self._shard
        clock, reply = 0, NOTHING
        if header.kind == Kind.AWAY:
            self._leave(caller)
        elif header.kind == Kind.BACK:
            clock = clocks.join(caller, header.clock)
        elif header.kind == Kind.READ:
            reply = self._mirrors[caller].refresh(shard)
        elif header.kind == Kind.TELL:
            self._mirrors[caller].learn(body)
        elif header.kind == Kind.SAVE:
            reply = self._save()
        elif header.kind == Kind.LOAD:
            self._load(body)
        return Header(header.kind, clock, shard.version), reply

    def _save(self) -> Tensor:
        tensors, scalars = self._shard.state()
        document = {
            "scalars": scalars,
            "version": self._shard.version,
            "delays": sorted(self._shard.delays.items()),
            "num_dropped": self._shard.num_dropped,
            "landing": self._landing.state(),
        }
        return pack_state(tensors, document)

    def _load(self, body: Tensor) -> None:
        tensors, document = unpack_state(body)
        self._shard.load_state(tensors, document.get("scalars", {}))
        self._shard.version = document.get("version", 0)
        self._shard.delays = Counter(dict(document.get("delays", ())))
        self._shard.num_dropped = document.get("num_dropped", 0)
        self._landing.load_state(document.get("landing", {}))

    def _check(self) -> None:
        if self._failure is not None:
            raise CommunicationError(f"a server of this process failed: {self._failure}") from self._failure


@dataclass
class _Ticket:
    """A worker that waits for parameters."""

    reply: Reply | None = None


class _Mirror:
    """What a server knows of one worker: the parameters that it has."""

    def __init__(self, wire: Wire, whole: Wire, shard: Shard) -> None:
        self._wire = wire
        self._whole = whole
        self._body = wire.new_body()
        self._states: States = {}
        self._num_pulls = 0
        # Where pulls are not encoded, the last one is what the worker has.
        self.known = wire.view(self._body) if wire.is_exact else whole.view(whole.new_body())
        self.known.bytes.copy_(shard.values.bytes)

    def pull(self, shard: Shard) -> Tensor:
        """Return the body of a pull, and note what the worker makes of it."""
        if self._wire.is_exact:
            self.known.bytes.copy_(shard.values.bytes)
            return self._body
        differences = torch._foreach_sub(shard.values.tensors, self.known.tensors)
        self._num_pulls += 1
        step = shard.version
        self._states = without_residuals(self._wire.write(self._body, differences, (), self._states, step))
        torch._foreach_add_(self.known.tensors, self._wire.read(self._body, step)[0])
        return self._body

    def refresh(self, shard: Shard) -> Tensor:
        """Return the parameters as they are."""
        self.known.bytes.copy_(shard.values.bytes)
        return self.known.bytes

    def learn(self, body: Tensor) -> None:
        """Note that the worker has these."""
        self.known.bytes.copy_(body)
