"""The centre of asynchronous EASGD: it runs in the first worker's process, and pulls one worker at a time."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.rpc import RpcEndpoint, RpcHeader, RpcReply, RpcService
from paceline.errors import CommunicationError, NonFiniteError
from paceline.sync.gossip import FlatParameters
from paceline.sync.sample_dispatcher import DispatcherClient
from paceline.sync.synchroniser import (
    Abandoned,
    HandedOver,
    LocalStep,
    SampleDispatcher,
    ServedProgress,
    Synchroniser,
    SyncResult,
    WorkerContext,
)
from paceline.sync.used import Ranges, subtract, unite

_SWAP, _READ = 0, 1
"""Kinds of requests: a pull, and a read of the centre."""


class CentreService(RpcService):
    """Service that keeps the centre.

    A worker sends its parameters x and gets c back; c + a * (x - c) is the new centre already, under a lock, so that
    the centre gains what the worker loses. It also sends the samples that its parameters have learnt since its last
    swap, and gets those that the centre has a part of.

    Args:
        centre: Value of the centre; changed in place.
        elasticity: Share a of the difference.
        stops_at_loss: Whether to stop when a worker is lost, so that the others go on from this centre.
    """

    def __init__(self, centre: Tensor, elasticity: float, *, stops_at_loss: bool = False) -> None:
        self.centre = centre
        self.num_swaps = 0
        self.used: Ranges = []
        """Positions of samples that workers had learnt when they swapped."""
        self.swaps: dict[int, tuple[int, Tensor, Ranges]] = {}
        """Number of each worker's last swap, the centre's gain, and the worker's samples."""
        self._elasticity, self._stops_at_loss = elasticity, stops_at_loss
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def handle(self, caller: int, header: RpcHeader, body: Tensor) -> Callable[[], RpcReply]:
        """Swap with the caller, or return the centre."""
        with self._lock:
            if self._failure is not None:
                raise CommunicationError(f"the centre has stopped: {self._failure}") from self._failure
            reply = self.centre.clone()
            if header.kind == _SWAP:
                values, told = split_message(body, self.centre)
                gain = values.sub(self.centre).mul_(self._elasticity)
                self.centre.add_(gain)
                self.used = unite(self.used, told)
                self.num_swaps += 1
                self.swaps[caller] = header.clock, gain, told
            answer = RpcHeader(header.kind, clock=self.num_swaps)
            message = make_message(reply, self.used)
        return lambda: (answer, message)

    def drop_caller(self, caller: int, error: BaseException | None) -> None:
        """Stop if a worker is lost, so that all others notice, and go on from what the centre is now."""
        if error is not None and self._stops_at_loss:
            self.stop(error)

    def stop(self, error: BaseException) -> None:
        """Let the centre be as it is."""
        with self._lock:
            self._failure = self._failure or error


def make_message(values: Tensor, ranges: Ranges) -> Tensor:
    """Return bytes of parameters, or of the centre, and of ranges of samples."""
    numbers = torch.tensor(ranges, dtype=torch.int64).flatten()
    return torch.cat([values.view(torch.uint8), numbers.view(torch.uint8)])


def split_message(message: Tensor, like: Tensor) -> tuple[Tensor, Ranges]:
    """Return what `make_message` was given; the first part shares memory with the message.

    Args:
        message: The message.
        like: Tensor of the shape and dtype of its first part.
    """
    ranges: Ranges = message[like.nbytes :].clone().view(torch.int64).view(-1, 2).tolist()
    return message[: like.nbytes].view(like.dtype), ranges


class AsynchronousElastic(Synchroniser):
    """A worker that the centre pulls once in a period of its own steps.

    Args:
        context: The worker's model, optimizer and group.
        period: Steps from one pull to the next.
        elasticity: Share of the difference that both move.
    """

    def __init__(self, context: WorkerContext, period: int, elasticity: float) -> None:
        self._context, self._period, self._elasticity = context, period, elasticity
        self._flat = FlatParameters(context.parameters)
        self._num_steps = self._num_swaps = 0
        group = context.group
        self._service = (
            CentreService(self._flat.read(), elasticity, stops_at_loss=group.is_supervised) if group.rank == 0 else None
        )
        routes = [(rank, 0) for rank in range(group.size)]
        self._endpoint = RpcEndpoint(group, routes, self._service, "easgd")
        self._client = self._endpoint.clients[0]
        self._sent = make_message(self._flat.read(), [])
        self._known = KnownCentre(self._flat.read())
        """The centre after this worker's last swap, from which others can go on."""
        self._used: Ranges = []
        """Samples that this worker has learnt since its last swap."""
        self._swapping: int | None = None
        """Number of the swap whose reply has not come."""
        self._has_left = False
        self._is_exact = False
        """Whether the known centre is the last one."""
        self._kept: Mapping[str, Any] = {}
        """Document of this worker's end among others; empty if it goes on from no such end."""
        self._progress: ServedProgress | None = None
        self._dispatcher = DispatcherClient(group)

    @property
    def dispatcher(self) -> SampleDispatcher | None:
        """Source of the workers' samples."""
        return self._dispatcher

    @property
    def progress(self) -> ServedProgress | None:
        """Samples that the centre had a part of when workers changed, or a worker that is left has learnt."""
        return self._progress

    def before_update(self, step: LocalStep) -> None:
        """Begin to swap, if this worker is due: with the parameters that the gradients belong to."""
        self._num_steps += 1
        if self._is_due:
            self._begin_swap()

    def after_update(self, step: LocalStep) -> SyncResult:
        """Move towards the centre by what it has taken."""
        told, self._used = self._used, unite(self._used, [self._dispatcher.present])
        result = self._end_swap(told) if self._is_due else SyncResult()
        if step.stop_requested:
            self._dispatcher.ask_to_stop()
        return result

    def _begin_swap(self) -> None:
        self._num_swaps += 1
        self._sent = make_message(self._flat.read(), self._used)
        self._client.begin(RpcHeader(_SWAP, clock=self._num_swaps), self._sent)
        self._swapping = self._num_swaps

    def _end_swap(self, told: Ranges) -> SyncResult:
        began_s = time.perf_counter()
        header, message = self._client.finish()
        waited_s, self._swapping = time.perf_counter() - began_s, None
        centre, used = split_message(message, self._known.values)
        sent, _ = split_message(self._sent, centre)
        pull = sent.sub_(centre).mul_(self._elasticity)
        self._flat.write(self._flat.read().sub_(pull))
        self._known = KnownCentre(centre.add_(pull), used, header.clock)
        self._used = subtract(self._used, told)
        return SyncResult(waited_s, len(self._sent) + len(message))

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """While active, parameters are the centre."""
        own, centre = self._flat.read(), self._read().values
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
        """Return the centre; nothing once workers have parted."""
        return {} if self._has_left else {"centre": self._read().values}

    def abandon(self) -> Abandoned:
        """Stop the centre, if it is here; a step whose swap is under way is whole, but for the pull."""
        if self._service is not None:
            self._service.stop(CommunicationError("workers change"))
            centre = self._service
            self._known = KnownCentre(centre.centre, centre.used, centre.num_swaps)
        self._has_left, self._is_exact = True, self._is_exact or self._service is not None
        return Abandoned.DONE

    def part(self) -> None:
        """Swap once more, so that the centre has a part of what each worker has learnt, and know it."""
        self._begin_swap()
        self._end_swap(self._used)
        self._known = self._read()
        self._has_left = self._is_exact = True

    def detached_state(self) -> dict[str, Tensor]:
        """Return, at this worker's end among these workers, the centre as it knows it, and gains that may be undone."""
        if not self._has_left:
            return {}
        gains = {f"gain {rank}": gain for rank, (_, gain, _) in self._last_swaps.items()}
        return {"known centre": self._known.values} | gains

    @property
    def _last_swaps(self) -> Mapping[int, tuple[int, Tensor, Ranges]]:
        return self._service.swaps if self._service is not None else {}

    def hand_over(self, alone: Group) -> HandedOver | None:
        """Leave; the first worker waits until all others have left, and then reads and saves the centre alone."""
        found = self._dispatcher.hand_over()
        self._context = replace(self._context, group=alone)
        return found

    def document(self) -> dict[str, Any]:
        """Return the number of steps that this worker has taken; at its end among these workers, also what it knows."""
        document: dict[str, Any] = {"num_steps": self._num_steps}
        if not self._has_left:
            return document
        swaps = {str(rank): [number, told] for rank, (number, _, told) in self._last_swaps.items()}
        end = {
            "epoch": self._context.group.epoch,
            "rank": self._context.group.rank,
            "num_swaps": self._known.num_swaps,
            "of_centre": self._known.used,
            "of_worker": self._used,
            "swapping": self._swapping,
            "is_exact": self._is_exact,
            "swaps": swaps,
        }
        return document | {"end": end}

    def load_document(self, document: Mapping[str, Any]) -> None:
        """Load it."""
        self._num_steps, self._kept = document["num_steps"], document.get("end", {})

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Continue from the saved centre; without one, from these parameters."""
        group = self._context.group
        ends = group.gather_documents(self._kept, name="ends with a centre")
        if any(ends):
            self._go_on(ends, saved[group.rank] if self._kept else {})
            return
        known = KnownCentre(shared.get("centre", self._flat.read()).clone())
        group.on_cpu().broadcast(known.values, source=0, name="centre").wait()
        self._set_centre(known)
        group.barrier(name="centre is loaded")

    def _go_on(self, ends: Sequence[Mapping[str, Any]], own: Mapping[str, Tensor]) -> None:
        """Go on with the centre that workers know; a swap whose reply has not come is undone there.

        Args:
            ends: Ends of all workers; empty for new ones.
            own: This worker's tensors at its end.
        """
        group, rank = self._context.group, self._context.group.rank
        holder = max(
            (place for place, end in enumerate(ends) if end),
            key=lambda place: (ends[place]["epoch"], ends[place]["is_exact"], ends[place]["num_swaps"], -place),
        )
        end, known = ends[holder], torch.empty_like(self._known.values)
        undone = {
            str(other["rank"]): swap[1]
            for other in ends
            if other
            and other["epoch"] == end["epoch"]
            and (swap := end["swaps"].get(str(other["rank"])))
            and swap[0] == other["swapping"]
        }
        used: Ranges = end["of_centre"]
        for told in undone.values():
            used = subtract(used, told)
        if rank == holder:
            known.copy_(own["known centre"])
            for place in undone:
                known.sub_(own[f"gain {place}"])
        group.on_cpu().broadcast(known, source=holder, name="centre").wait()
        self._set_centre(KnownCentre(known, used, end["num_swaps"]))
        self._used = self._kept.get("of_worker", [])
        everything = unite(used, *(other["of_worker"] for other in ends if other))
        lost = "" if end["is_exact"] else f"what the centre took after swap {end['num_swaps']}, the last one known"
        self._progress, self._kept = ServedProgress(everything, lost), {}
        group.barrier(name="centre goes on")

    def _set_centre(self, known: "KnownCentre") -> None:
        self._known = known
        if self._service is not None:
            self._service.centre.copy_(known.values)
            self._service.used, self._service.num_swaps = known.used, known.num_swaps

    def close(self) -> None:
        """Leave; the centre stays until all workers have left."""
        self._dispatcher.close()
        self._endpoint.close()

    @property
    def _is_due(self) -> bool:
        return self._num_steps % self._period == 0

    def _read(self) -> "KnownCentre":
        """Return the centre, once all workers have arrived and none pulls at it."""
        self._context.group.barrier(name="centre is at rest")
        header, message = self._client.call(RpcHeader(_READ))
        self._context.group.barrier(name="centre was read")
        values, used = split_message(message, self._known.values)
        return KnownCentre(values, used, header.clock)


@dataclass(frozen=True)
class KnownCentre:
    """The centre at one instant.

    Args:
        values: Parameters of the centre, flat.
        used: Positions of samples that it has a part of.
        num_swaps: Number of swaps so far.
    """

    values: Tensor
    used: Ranges = field(default_factory=list)
    num_swaps: int = 0
