"""The worker's side of a parameter server: it pushes its gradients or updates, and pulls the new parameters."""

import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.rpc import NOTHING, RpcEndpoint, RpcHeader
from paceline.compression.codec import RESIDUALS, FeedbackDroppedWarning
from paceline.sync.parameter_server.blocks import copy_all
from paceline.sync.parameter_server.link import ServerLink
from paceline.sync.parameter_server.meeting import Meeting, share_held
from paceline.sync.parameter_server.parting import Parting, held_in
from paceline.sync.parameter_server.placement import ServerPlacement
from paceline.sync.parameter_server.server import RequestKind, Server
from paceline.sync.parameter_server.settings import ServerSettings
from paceline.sync.parameter_server.state import join_servers
from paceline.sync.sample_dispatcher import DispatcherClient
from paceline.sync.synchroniser import (
    Abandoned,
    Delays,
    HandedOver,
    LocalStep,
    SampleDispatcher,
    ServedProgress,
    Synchroniser,
    SyncResult,
    WorkerContext,
)


class ServedWorker(Synchroniser):
    """A worker whose parameters servers keep.

    It pushes gradients before its update and waits for parameters after it; if its own optimizer runs, it
    pushes the optimizer's change instead.

    Args:
        rule: Settings of the rule.
        context: The worker's model, optimizer and group.
    """

    def __init__(self, rule: ServerSettings, context: WorkerContext) -> None:
        self._rule = rule
        self._context = context
        self._parameters = dict(context.parameters)
        self._placement = placement = ServerPlacement(rule, context)
        self._servers: dict[int, Server] = {}
        """Servers in this process, and those for which it is the standby, by number."""
        server = None
        if (number := placement.number_of(placement.everybody.rank)) is not None:
            server = self._servers[number] = placement.make_server(number)
        self._announcements = placement.open_announcements(server)  # before pushes can come
        self._standbys = placement.open_standbys(server)
        if self._standbys is not None:
            self._servers |= self._standbys.servers
        self._endpoint = RpcEndpoint(placement.everybody, placement.routes, server, rule.name, placement.body_bytes)
        self._links = [
            ServerLink(self._endpoint.clients[place], blocks, rule, context)
            for place, blocks in zip(placement.servers, placement.blocks_by_server, strict=True)
        ]
        self._views = [view for link in self._links for view in link.views]
        self._before = [torch.empty_like(view) for view in self._views] if rule.runs_optimizer else None
        self._is_dropped = False
        """Whether the last push came too late to count."""
        self._is_away = False
        self._away = threading.Lock()
        """Held to leave and to come back: workers without samples leave in the thread that asks for samples."""
        self._loaded: list[dict[str, Any]] | None = None
        self._parting: Parting | None = None
        """This worker's end among these workers; None before it."""
        self._kept: Mapping[str, Any] = {}
        """Document of this worker's end among others; empty if it goes on from no such end."""
        self._progress: ServedProgress | None = None
        self._dispatcher = (
            DispatcherClient(context.group, self._go_away, lambda: not self._is_dropped)
            if rule.is_asynchronous
            else None
        )
        if rule.placement == "own":  # their processes have built their own model
            self.load_state([], {})

    @property
    def progress(self) -> ServedProgress | None:
        """What servers had applied when workers changed."""
        return self._progress

    @property
    def dispatcher(self) -> SampleDispatcher | None:
        """Source of the workers' samples, if they do not step together."""
        return self._dispatcher

    def count_delays(self) -> Delays:
        """Return the delays so far of pushes to the first server."""
        return self._links[0].count_delays()

    def is_sync_step(self, number: int) -> bool:
        """Return whether workers are in step: then all of them take part in every step."""
        return not self._rule.is_asynchronous

    def before_update(self, step: LocalStep) -> None:
        """Push gradients, or copy the parameters for comparison with those after the update."""
        self._come_back()
        if self._before is not None:
            copy_all(self._before, self._views)
            return
        for link in self._links:
            link.prepare(link.gradients(), step.weight, self._find_work(step))
        for link in self._links:
            link.begin()

    def after_update(self, step: LocalStep) -> SyncResult:
        """Push the change of the update, and wait for the servers' parameters."""
        if self._before is not None:
            self._push_updates(step)
        began_s = time.perf_counter()
        wire_bytes = sum(link.pull() for link in self._links)
        self._is_dropped = self._links[0].is_dropped
        if self._rule.follows_first:
            wire_bytes += self._catch_up()
        waited_s = time.perf_counter() - began_s
        if self._dispatcher is not None and step.stop_requested:
            self._dispatcher.ask_to_stop()
        return SyncResult(waited_s, wire_bytes)

    def _catch_up(self) -> int:
        """Pull again if a server replied at an earlier step than another; return the bytes."""
        wire_bytes = 0
        while behind := [link for link in self._links if link.clock < max(other.clock for other in self._links)]:
            for link in behind:
                link.push([], 0.0)
            wire_bytes += sum(link.pull() for link in behind)
        return wire_bytes

    def _find_work(self, step: LocalStep) -> tuple[int, int]:
        """Return the range of this step's push; see `Shard.used`."""
        return self._dispatcher.present if self._dispatcher is not None else (step.number, step.number + 1)

    def _push_updates(self, step: LocalStep) -> None:
        assert self._before is not None
        changes = torch._foreach_sub(self._views, self._before)
        with torch.no_grad():  # the pull brings differences from the parameters that servers know
            copy_all(self._views, self._before)
        for link in self._links:
            link.prepare(changes[: len(link.views)], step.weight, self._find_work(step))
            changes = changes[len(link.views) :]
        for link in self._links:
            link.begin()

    def _come_back(self) -> None:
        with self._away:
            if self._is_away:
                clock = max(link.clock for link in self._links)
                for link in self._links:
                    clock = link.come_back(clock)
                if self._rule.follows_first:
                    self._catch_up()
                self._is_away = False

    def _go_away(self) -> None:
        """Tell the servers not to wait for this worker until its next push."""
        with self._away:
            if not self._is_away:
                for link in self._links:
                    link.client.call(RpcHeader(RequestKind.AWAY))
                self._is_away = True

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """While active, parameters are the servers'."""
        self._synchronise("evaluation begins")
        own = [parameter.detach().clone() for parameter in self._parameters.values()]
        for link in self._links:
            link.read()
        self._context.group.barrier(name=f"{self._rule.name}: all have read")
        try:
            yield
        finally:
            with torch.no_grad():
                copy_all(list(self._parameters.values()), own)
        self._resume("judged")

    def shared_state(self) -> dict[str, Tensor]:
        """Return the servers' state, on the first worker; nothing once workers have parted."""
        if self._parting is not None:
            return {}
        self._synchronise("servers are saved")
        if self._context.group.rank:
            return {}
        saved = {n: link.client.call(RpcHeader(RequestKind.SAVE))[1] for n, link in enumerate(self._links)}
        return join_servers(saved, self._placement.blocks_by_server)

    def abandon(self) -> Abandoned:
        """Stop the servers of this process, and keep their state and this worker's push under way."""
        self._parting = Parting.of(self._servers, self._links)
        return Abandoned.OPEN

    def part(self) -> None:
        """Stop all servers, and give each worker the state of all."""
        self._synchronise("workers change")
        mine = Parting.of(self._servers, self._links)
        held = share_held(self._context.group, mine.held, len(self._links))
        self._parting = replace(mine, held=held)

    def hand_over(self, alone: Group) -> HandedOver | None:
        """Leave; the first worker waits until all others have left, and then reads and saves the servers alone."""
        assert self._dispatcher is not None
        self._go_away()
        found = self._dispatcher.hand_over()
        self._context = replace(self._context, group=alone)
        return found

    def state(self) -> dict[str, Tensor]:
        """Return the codec's residuals of pushes, as ``<block>/<site>``."""
        return {
            f"{block}/{site}": kept
            for link in self._links
            for block, state in link.states.items()
            for site, kept in state.items()
        }

    def detached_state(self) -> dict[str, Tensor]:
        """Return the codec's residuals of pushes, and what this worker has at its end among these workers."""
        return self.state() | (self._parting.tensors if self._parting is not None else {})

    def document(self) -> dict[str, Any]:
        """Return clocks, versions and units; at this worker's end among these workers, also what it has."""
        parting = self._parting.document(len(self._links)) if self._parting is not None else {}
        return {"links": [link.document() for link in self._links], **parting}

    def load_document(self, document: Mapping[str, Any]) -> None:
        """Load clocks, versions and units, if the number of servers is the same."""
        if "held" in document:
            self._kept = document
        elif len(document["links"]) == len(self._links):
            self._loaded = document["links"]

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Load the servers, each from the first worker, and tell them this worker's parameters."""
        documents = self._context.group.gather_documents(self._kept, name=f"{self._rule.name}: ends")
        if any(documents):
            own = saved[self._context.group.rank] if self._kept else {}
            self._go_on(documents, own)
            return
        for number, link in enumerate(self._links):
            if self._context.group.rank == 0:
                link.load(shared, number if f"document/{number}" in shared else None)
        self._synchronise("servers are loaded")
        is_same = len(saved) == self._context.group.size and self._loaded is not None
        for number, link in enumerate(self._links):
            if is_same and self._loaded is not None:
                link.load_document(self._loaded[number])
                link.load_states(saved[self._context.group.rank])
            else:
                link.version = link.read()
            link.report()
        if (
            not is_same
            and self._context.group.rank == 0
            and any(RESIDUALS & {n.split("/")[-1] for n in t} for t in saved)
        ):
            warnings.warn(
                f"residuals of the push codec of {len(saved)} workers are dropped, since "
                f"{self._context.group.size} push to {len(self._links)} servers here; resume with as many workers and "
                "servers to keep them",
                FeedbackDroppedWarning,
                stacklevel=2,
            )
        self._loaded = None
        self._resume("loaded")

    def _go_on(self, documents: Sequence[Mapping[str, Any]], own: Mapping[str, Tensor]) -> None:
        """Go on from what servers held when workers changed; see `Meeting`.

        Args:
            documents: Documents of all workers at their ends.
            own: This worker's tensors at its end.
        """
        group, name = self._context.group, self._rule.name
        meeting = Meeting(group, documents, num_servers=len(self._links), repeats=self._rule.applies_at_once)
        self._go_away()
        group.barrier(name=f"{name}: servers begin")
        bodies = meeting.collect(held_in(own))
        if group.rank == 0:
            shared = join_servers(bodies, self._placement.partition(meeting.num_servers))
            shared |= meeting.documents_for(len(self._links))
            for number, link in enumerate(self._links):
                link.load(shared, number)
        group.barrier(name=f"{name}: servers are loaded")
        for number, link in enumerate(self._links):
            link.clock = meeting.clock
            if self._kept and meeting.is_same:
                push = self._kept["pushes"].get(str(number))
                is_applied = push is not None and meeting.is_applied(number, push)
                link.go_on(self._kept["links"][number], own, is_applied=is_applied or meeting.repeats)
                if push is not None and not is_applied and meeting.repeats:
                    link.push_again(push, own.get(f"push {number}", NOTHING))
        group.barrier(name=f"{name}: pushes are made again")
        for link in self._links:
            link.version = link.read()
            link.report()
        self._progress, self._kept = meeting.progress, {}
        self._resume("went on")

    def close(self) -> None:
        """Leave; servers in this worker's process run until all workers have left."""
        if self._dispatcher is not None:
            self._dispatcher.close()
        self._endpoint.close()
        for following in (self._announcements, self._standbys):
            if following is not None:
                following.close()

    def _synchronise(self, what: str) -> None:
        """Wait until all workers have finished their pushes."""
        if self._rule.is_asynchronous:  # others may have steps to do before they arrive
            self._go_away()
        self._context.group.barrier(name=f"{self._rule.name}: {what}")

    def _resume(self, what: str) -> None:
        """Step again, once all can: otherwise the first would go ahead without the others."""
        self._come_back()
        self._context.group.barrier(name=f"{self._rule.name}: {what}")
