"""AD-PSGD: decentralised SGD at each worker's own pace; pairs of workers average their parameters, atomically."""

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Size, Tensor

from paceline.comm.group import Group
from paceline.comm.rpc import NOTHING, RpcClient, RpcEndpoint, RpcHeader, RpcReply, RpcService
from paceline.errors import CommunicationError
from paceline.registry import register
from paceline.sync.averages_end import AveragesEnd, find_unanswered
from paceline.sync.farewells import Farewells, read_lost
from paceline.sync.gossip import FlatParameters, GossipRule
from paceline.sync.rule import Traffic
from paceline.sync.synchroniser import (
    Abandoned,
    Delays,
    HandedOver,
    LocalStep,
    Synchroniser,
    SyncResult,
    WorkerContext,
)
from paceline.topology.graphs import Edges, Graph

_AVERAGE, _ASK, _LEAVE, _TELL = 0, 1, 2, 3
"""Kinds of requests: an average of parameters, the question whether all workers stop, and, since another is lost, a
worker's last parameters, and before them the steps of others that are in them."""
_ASK_STEPS = 10
_ASK_INTERVAL_S = 0.5
"""Time after which a worker asks again, so that it soon hears of one that is lost."""


@register("ad_psgd")
class ADPSGD(GossipRule):
    """Asynchronous decentralised parallel SGD (Lian et al. 2018, arXiv:1710.06952).

    Workers are active or passive. After each step an active one averages its parameters with those of a random passive
    neighbour, whose own thread answers at any time: x_i, x_j <- (x_i + x_j) / 2, under a lock, so that the mean over
    workers is preserved. Active workers wait for passive ones only, and passive ones for none, so there is no deadlock.
    No worker waits for a slow one, except for evaluation and checkpoints, which come after the same number of steps of
    all. With two workers at the same pace it is dpsgd except for when gradients are applied.

    On the wire is one message of the parameters each way for each step of an active worker; it travels while the next
    gradients are computed. Gradients are those of the parameters before the averages that arrive meanwhile. Clipping
    bounds each worker's own gradient. The mean of the workers' models is evaluated and saved. It differs from the paper
    in that passive workers answer requests in the order of arrival, with the difference, and in that any connected
    graph works: edges between two active or two passive workers are left out.
    """

    @property
    def is_asynchronous(self) -> bool:
        """Always true."""
        return True

    @property
    def survives_loss(self) -> bool:
        """Always true: each worker keeps its own model, and an average that only one of two has is undone."""
        return True

    def start_mixing(self, context: WorkerContext) -> Synchroniser:
        """Return the synchroniser that averages.

        Raises:
            SettingsError: The graph does not exist for that number of workers.
        """
        return ADPSGDSynchroniser(context, pair_up(self.graph, context.group.size))

    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """Both messages of a pair for each active worker, if all take the same number of steps."""
        num_bytes = self.message_bytes(shapes)
        num_messages = 2 * len({active for active, _ in pair_up(self.graph, num_workers)})
        wire_bytes = round(num_messages * num_bytes / num_workers)
        return (Traffic("send", num_bytes, wire_bytes, peers="neighbours", overlap=1.0),)


def pair_up(graph: Graph, num_workers: int) -> Edges:
    """Return the pairs (active, passive) that may average.

    Workers are divided by whether their rank is odd, or by whether their distance from rank 0 is: by the one that keeps
    more edges, if they still connect all.
    """
    num_phases = graph.num_phases(num_workers)
    edges = {edge for step in range(num_phases or 1) for edge in graph.find_edges(num_workers, step)}
    edges |= {(b, a) for a, b in edges}
    if num_phases is None:
        edges = {(a, b) for a in range(num_workers) for b in range(num_workers) if a != b}
    by_distance = _measure_distances(edges, num_workers)
    candidates = []
    for number in (range(num_workers), by_distance):
        pairs = {(a, b) for a, b in edges if number[a] % 2 == 0 and number[b] % 2 == 1}
        both_ways = pairs | {(b, a) for a, b in pairs}
        if max(_measure_distances(both_ways, num_workers)) < num_workers:
            candidates.append(pairs)
    return max(candidates, key=len)


def _measure_distances(edges: Edges, num_workers: int) -> list[int]:
    """Return the distance of each rank from rank 0, in edges; the number of ranks for unreachable ones."""
    distances = [0] + [num_workers] * (num_workers - 1)
    for _ in range(num_workers):
        for a, b in edges:
            distances[b] = min(distances[b], distances[a] + 1)
    return distances


class ADPSGDSynchroniser(Synchroniser):
    """Averages a worker's parameters with its neighbours', as an active or a passive one.

    Args:
        context: The worker's model, optimizer and group.
        pairs: Pairs of workers that average, as (active, passive).
    """

    def __init__(self, context: WorkerContext, pairs: Edges) -> None:
        self._context = context
        rank, size = context.group.rank, context.group.size
        self._flat = FlatParameters(context.parameters)
        self._model = _Model(self._flat.read())
        self._neighbours = sorted(passive for active, passive in pairs if active == rank)
        self._delta = torch.empty_like(self._model.values)
        """Difference that an active worker adds to its parameters."""
        self._client: RpcClient | None = None
        """Client of the request under way."""
        self._partner = 0
        """Rank that it is to."""
        self._num_requests = 0
        self._unanswered: tuple[int, int] | None = None
        """Rank and number of the request whose answer has not come."""
        self._end: AveragesEnd | None = None
        """This worker's end among these workers; None before it."""
        self._kept: Mapping[str, Any] = {}
        """Document of this worker's end among others; empty if it goes on from no such end."""
        self._answers: Mapping[str, Tensor] = {}
        """The last answers that it gave there, by name."""
        callers = [active for active, passive in pairs if passive == rank]
        self._service = _Passive(self._model, _Stop(), rank, callers, Farewells(size))
        routes = sorted(pairs | {(other, 0) for other in range(size)})
        self._endpoint = RpcEndpoint(context.group, routes, self._service, "ad_psgd")
        self._stop_at: int | None = None
        self._has_begun = self._has_asked = False
        self._asked_s = 0.0
        self._settled_step: int | None = None
        """Number of steps of all workers when they last came together; None before the first step."""
        self._num_averages = 0
        """Averages in the parameters that the next gradients are of."""
        self._delays: Counter[int] = Counter()
        """Delays since this worker has last reported them."""
        self._wire_bytes = 0
        self._waited_s = 0.0

    def before_update(self, step: LocalStep) -> None:
        """Use the averages made meanwhile; the gradients are those of the parameters before them."""
        self._begin()
        if self._settled_step is None:
            self._settled_step = step.number
        self._service.check()
        self._finish()
        self._delays[self._model.num_averages - self._num_averages] += 1
        self._base = self._model.read()
        self._flat.write(self._base)

    def after_update(self, step: LocalStep) -> SyncResult:
        """Add the optimizer's change, and if active request the next average."""
        num_steps = step.number + 1
        self._model.add(self._flat.read() - self._base, num_steps)
        self._num_averages = self._model.num_averages  # first: one that comes meanwhile counts as unseen
        self._flat.write(self._model.read())
        is_late = time.monotonic() - self._asked_s > _ASK_INTERVAL_S
        if num_steps % _ASK_STEPS == 0 or not self._has_asked or is_late:
            self._ask(num_steps, step.stop_requested)
        stop = num_steps == self._stop_at
        if self._neighbours and not stop:
            self._request(step.number)
        wire_bytes, self._wire_bytes = self._wire_bytes + self._service.take_bytes(), 0
        waited_s, self._waited_s = self._waited_s, 0.0
        return SyncResult(waited_s, wire_bytes, stop)

    def count_delays(self) -> Delays:
        """Return the delays of gradients so far that workers have reported to this one, the first."""
        with self._model.lock:
            return Delays(dict(self._service.delays), 0)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """While active, parameters are the mean over workers."""
        self._settle()
        with self._flat.averaged(self._context.group, self._flat.read()):
            yield

    def abandon(self) -> Abandoned:
        """Answer nobody from now on; an average whose answer has not come is undone where it was made."""
        self._service.stop(CommunicationError("ad_psgd: workers change"))
        if self._has_begun:
            self._flat.write(self._model.read())
        self._leave()
        return Abandoned.DONE

    def part(self) -> None:
        """Finish all averages."""
        self._settle()
        self._leave()

    def _leave(self) -> None:
        group = self._context.group
        self._end = AveragesEnd(group.epoch, group.rank, self._unanswered, dict(self._service.answers))

    def repair(self, *, is_new: bool) -> str:
        """Undo averages whose answers were lost, which conserves the mean; let new workers begin at the mean."""
        group = self._context.group
        ends = [end for end in group.gather_documents(self._kept, name="ends of averages") if end]
        undone = find_unanswered(ends)
        for active, passive in undone:
            if self._kept and [self._kept["epoch"], self._kept["rank"]] == [passive["epoch"], passive["rank"]]:
                self._flat.write(self._flat.read().add_(self._answers[f"answer {active['rank']}"]))
        self._kept, self._answers = {}, {}
        words = self._flat.begin_at_mean(group, self._flat.read(), is_new=is_new)
        self._has_begun = False  # averages begin with these parameters
        about = f"averages of which only one worker knew were undone: {len(undone)}" if undone else ""
        return "; ".join(filter(None, (about, words)))

    def last_mixed(self) -> Mapping[int, int]:
        """Return the number of updates of each other worker that are in the parameters, by rank."""
        return {rank: num_steps for rank, num_steps in self._service.met_steps.items() if num_steps}

    def state(self) -> dict[str, Tensor]:
        """Return nothing, once no average is under way: parameters are the whole state."""
        if self._end is None:
            self._settle()
        return {}

    def detached_state(self) -> dict[str, Tensor]:
        """Return this worker's last answers, at its end among these workers."""
        return self._end.tensors if self._end is not None else {}

    def document(self) -> dict[str, Any]:
        """Return nothing; at this worker's end among these workers, which averages it has made, or asked for."""
        return {"end": self._end.document()} if self._end is not None else {}

    def load_document(self, document: Mapping[str, Any]) -> None:
        """Load the end among others."""
        self._kept = document.get("end", {})

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Restart from the parameters that were loaded."""
        self._finish()
        self._answers = saved[self._context.group.rank] if self._kept else {}
        self._context.group.barrier(name="averages")
        self._has_begun = self._has_asked = False
        self._stop_at = self._settled_step = None

    def hand_over(self, alone: Group) -> HandedOver | None:
        """Send the parameters to the first worker, which takes on the mean of all that live."""
        with contextlib.suppress(CommunicationError):  # the other end of an average may be what is lost
            self._finish()
        if self._context.group.rank:
            told = torch.tensor(list(self._service.met_steps.items()), dtype=torch.int64)
            self._endpoint.clients[0].call(RpcHeader(_TELL), told.view(torch.uint8).flatten())
            header = RpcHeader(_LEAVE, clock=self._model.num_steps)
            self._endpoint.clients[0].call(header, self._model.read().view(torch.uint8))
            return None
        lost_ranks = self._service.farewells.wait()
        mean, num_steps = self._service.join_last(self._model.read())
        for rank in lost_ranks:
            num_steps[rank] = max(self._service.met_steps.get(rank, 0), self._settled_step or 0)
        self._model.write(mean)
        self._flat.write(mean)
        self._context = replace(self._context, group=alone)
        return HandedOver(lost_ranks, num_steps | {0: self._model.num_steps})

    def close(self) -> None:
        """Answer as a passive worker until all have closed."""
        if self._end is None:
            self._finish()
        self._endpoint.close()

    def _begin(self) -> None:
        """Copy the present parameters; no worker requests an average before all have done so."""
        if not self._has_begun:
            self._has_begun = True
            self._model.write(self._flat.read())
            self._context.group.barrier(name="parameters")

    def _request(self, number: int) -> None:
        """Send the parameters to a passive neighbour; they change only when its answer has come."""
        draw = random.Random(f"{self._context.seed} {self._context.group.rank} {number}")
        self._partner = draw.choice(self._neighbours)
        client = self._endpoint.clients[self._partner]
        body = self._model.values.view(torch.uint8)
        self._wire_bytes += len(body)
        self._num_requests += 1
        client.begin(RpcHeader(_AVERAGE, clock=self._model.num_steps, version=self._num_requests), body)
        self._unanswered = self._partner, self._num_requests
        self._client = client  # not if the neighbour is lost: nothing is under way then

    def _finish(self) -> None:
        """Wait for the answer under way, if any, and apply it."""
        if self._client is None:
            return
        began_s = time.perf_counter()
        client, self._client = self._client, None
        answer, _ = client.finish(self._delta.view(torch.uint8))
        self._unanswered = None  # not if the answer is lost: then the average is undone
        self._waited_s += time.perf_counter() - began_s
        self._model.add(self._delta)
        self._model.num_averages += 1
        self._service.meet(self._partner, answer.clock)

    def _ask(self, num_steps: int, stop_requested: bool) -> None:
        """Ask rank 0 whether, and after which step, all stop; report the delays since the last time."""
        self._has_asked, self._asked_s = True, time.monotonic()
        header = RpcHeader(_ASK, clock=num_steps, value=float(stop_requested))
        body = torch.tensor(list(self._delays.items())).view(torch.uint8).flatten()
        answer, _ = self._endpoint.clients[0].call(header, body)
        self._delays.clear()
        self._stop_at = answer.clock or None
        if (lost := read_lost(answer.value, self._context.group.names)) is not None:
            raise lost

    def _settle(self) -> None:
        """Finish all averages of all workers, and use them."""
        self._begin()
        self._finish()
        self._context.group.barrier(name="averages")
        self._service.check()
        self._settled_step = self._model.num_steps
        self._flat.write(self._model.read())


class _Model:
    """One worker's parameters, which several threads change."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.lock = threading.Lock()
        self.num_averages = 0
        """Number of averages with other workers so far."""
        self.num_steps = 0
        """Number of this worker's steps that are in the parameters; 0 before its first here."""

    def read(self) -> Tensor:
        with self.lock:
            return self.values.clone()

    def write(self, values: Tensor) -> None:
        with self.lock:
            self.values.copy_(values)

    def add(self, difference: Tensor, num_steps: int | None = None) -> None:
        with self.lock:
            self.values.add_(difference)
            self.num_steps = num_steps or self.num_steps


@dataclass
class _Stop:
    """Rank 0's record of all workers' steps, and the step after which all stop.

    Workers ask every `_ASK_STEPS` steps. So none is further than that beyond the furthest known step, and a worker
    that asks later learns of the stop in time.
    """

    furthest: int = 0
    at: int = 0

    def ask(self, num_steps: int, stop_requested: bool) -> int:
        """Record that a worker has done `num_steps`; return the step after which all stop, 0 if none was requested."""
        self.furthest = max(self.furthest, num_steps)
        if stop_requested and not self.at:
            self.at = self.furthest + _ASK_STEPS
        return self.at


class _Passive(RpcService):
    """Service that answers active workers, and on rank 0 whether to stop."""

    def __init__(self, model: _Model, stop: _Stop, rank: int, callers: Iterable[int], farewells: Farewells) -> None:
        self._model, self._stop, self._rank = model, stop, rank
        self.farewells = farewells
        self.delays: Counter[int] = Counter()
        """Delays that workers have reported, on rank 0."""
        self.met_steps: dict[int, int] = {}
        """Number of steps of each other worker that are in the parameters of this one, or of one that has told it."""
        self._last_sum = torch.zeros(0, dtype=model.values.dtype)
        self._last_steps: dict[int, int] = {}
        self._received = {caller: torch.empty_like(model.values) for caller in callers}
        self._deltas = {caller: [torch.empty_like(model.values) for _ in range(2)] for caller in callers}
        """Answers to callers, in turns: the one before may still be under way."""
        self.answers: dict[int, tuple[int, Tensor]] = {}
        """Number of each caller's last request, and the difference that it was sent."""
        self._has_stopped = False
        self._error: BaseException | None = None
        self._wire_bytes = 0

    def request_buffer(self, caller: int) -> Tensor:
        """Return the buffer for a caller's parameters."""
        return self._received[caller].view(torch.uint8) if caller in self._received else NOTHING

    def handle(self, caller: int, header: RpcHeader, body: Tensor) -> Callable[[], RpcReply]:
        """Average with the caller: subtract a difference here, which the caller adds."""
        if header.kind == _ASK:
            with self._model.lock:
                self.delays.update(dict(body.view(torch.int64).view(-1, 2).tolist()))
                stop_at = self._stop.ask(header.clock, bool(header.value))
            answer = RpcHeader(_ASK, clock=stop_at, value=self.farewells.tell())
            return lambda: (answer, NOTHING)
        if header.kind == _TELL:
            for rank, num_steps in body.view(torch.int64).view(-1, 2).tolist():
                self.meet(rank, num_steps)
            return lambda: (header, NOTHING)
        if header.kind == _LEAVE:
            with self._model.lock:
                values = body.view(self._model.values.dtype)
                self._last_sum = values.clone() if not self._last_steps else self._last_sum.add_(values)
                self._last_steps[caller] = header.clock
            self.farewells.leave(caller)
            return lambda: (header, NOTHING)
        self._deltas[caller].reverse()
        delta = self._deltas[caller][0]
        with self._model.lock:
            if self._has_stopped:
                raise CommunicationError(f"ad_psgd: rank {self._rank} makes no average any more")
            torch.sub(self._model.values, body.view(delta.dtype), out=delta)
            delta.mul_(0.5)
            self._model.values.sub_(delta)
            self.answers[caller] = header.version, delta
            self._model.num_averages += 1
            self._wire_bytes += delta.nbytes
            answer = RpcHeader(_AVERAGE, clock=self._model.num_steps)
        self.meet(caller, header.clock)
        return lambda: (answer, delta.view(torch.uint8))

    def meet(self, rank: int, num_steps: int) -> None:
        """Record that so many steps of another worker are in the parameters."""
        with self._model.lock:
            self.met_steps[rank] = max(num_steps, self.met_steps.get(rank, 0))

    def drop_caller(self, caller: int, error: BaseException | None) -> None:
        """Record the error, which the worker itself raises, unless the caller has left."""
        if error is not None and self.farewells.lose(caller, error):
            lost = CommunicationError(f"ad_psgd: rank {caller} is lost to rank {self._rank}: {error}")
            self._error = self._error or lost

    def fail(self, error: BaseException) -> None:
        """Record the error."""
        self._error = self._error or error

    def stop(self, error: BaseException) -> None:
        """Change the parameters no more."""
        with self._model.lock:
            self._has_stopped = True
        self.fail(error)

    def check(self) -> None:
        """Raise an error of the threads that answer."""
        if self._error is not None:
            raise self._error

    def join_last(self, mine: Tensor) -> tuple[Tensor, dict[int, int]]:
        """Return the mean of `mine` and of the parameters of those that have left, and the steps of each of these."""
        with self._model.lock:
            self._error = None  # it has been told of, and no average comes any more
            if not self._last_steps:
                return mine, {}
            return (mine + self._last_sum).div_(1 + len(self._last_steps)), dict(self._last_steps)

    def take_bytes(self) -> int:
        """Return the number of bytes of answers since the last call."""
        with self._model.lock:
            wire_bytes, self._wire_bytes = self._wire_bytes, 0
        return wire_bytes
