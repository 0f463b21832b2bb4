"""The workers of a host behind one of them that talks to the servers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.sync.parameter_server.blocks import PackedTensors, ParameterBlock, copy_all
from paceline.sync.parameter_server.settings import ServerSettings
from paceline.sync.parameter_server.worker import ServedWorker
from paceline.sync.synchroniser import LocalStep, Synchroniser, SyncResult, WorkerContext


class ServedHost(Synchroniser):
    """A worker whose host sums gradients first: the host's first worker talks to the servers for all.

    Args:
        rule: Settings of the rule.
        context: The worker's model, optimizer and group.
        hosts: Ranks of each host.
    """

    def __init__(self, rule: ServerSettings, context: WorkerContext, hosts: Sequence[Sequence[int]]) -> None:
        group = context.group
        here = next(list(ranks) for ranks in hosts if group.rank in ranks)
        self._leaders = sorted(ranks[0] for ranks in hosts)
        self._host_group = group.subgroup(here, f"{rule.name} host")
        self._leader: ServedWorker | None = None
        if group.rank in self._leaders:
            leaders = group.subgroup(self._leaders, f"{rule.name} leaders")
            self._leader = ServedWorker(rule, replace(context, group=leaders))
        self._parameters = list(context.parameters.values())
        blocks = [ParameterBlock(name, 0, 0, p.shape, p.dtype) for name, p in context.parameters.items()]
        self._packed = PackedTensors(
            blocks, body=torch.zeros(PackedTensors.size_of(blocks), dtype=torch.uint8, device=group.device)
        )

    def is_sync_step(self, number: int) -> bool:
        """Always true: all workers take part in every step."""
        return True

    def before_update(self, step: LocalStep) -> None:
        """Push the host's gradient, with the weight of all its workers."""
        weight = torch.tensor([step.weight], dtype=torch.float64, device=self._host_group.device)
        self._host_group.all_reduce(weight, name="weight of the host").wait()
        if self._leader is not None:
            self._leader.before_update(replace(step, weight=float(weight)))

    def after_update(self, step: LocalStep) -> SyncResult:
        """Copy the servers' parameters to this worker."""
        result = self._leader.after_update(step) if self._leader is not None else SyncResult()
        self._copy_to_host()
        if self._leader is None:
            return result
        num_bytes = (self._host_group.size - 1) * sum(parameter.nbytes for parameter in self._parameters)
        return replace(result, wire_bytes=result.wire_bytes + num_bytes)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """While active, parameters are the servers'."""
        if self._leader is not None:
            with self._leader.consensus():
                self._copy_to_host()
                yield
            return
        own = [parameter.detach().clone() for parameter in self._parameters]
        self._copy_to_host()
        try:
            yield
        finally:
            with torch.no_grad():
                copy_all(self._parameters, own)

    def shared_state(self) -> dict[str, Tensor]:
        """Return the servers' state, on the first worker."""
        return self._leader.shared_state() if self._leader is not None else {}

    def state(self) -> dict[str, Tensor]:
        """Return the codec's residuals of the host's pushes."""
        return self._leader.state() if self._leader is not None else {}

    def document(self) -> dict[str, Any]:
        """Return clocks, versions and units."""
        return self._leader.document() if self._leader is not None else {}

    def load_document(self, document: Mapping[str, Any]) -> None:
        """Load clocks, versions and units."""
        if self._leader is not None and document:
            self._leader.load_document(document)

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Load the servers, and copy the parameters of the host's first worker."""
        if self._leader is not None:
            is_same = len(saved) > self._leaders[-1]
            self._leader.load_state([saved[rank] for rank in self._leaders] if is_same else saved, shared)
        self._copy_to_host()

    def close(self) -> None:
        """Leave the servers."""
        if self._leader is not None:
            self._leader.close()

    def _copy_to_host(self) -> None:
        """Copy the parameters of the host's first worker to the others."""
        if self._leader is not None:
            copy_all(self._packed.tensors, [parameter.detach() for parameter in self._parameters])
        self._host_group.broadcast(self._packed.bytes, name="parameters of the host").wait()
        if self._leader is None:
            with torch.no_grad():
                copy_all(self._parameters, self._packed.tensors)
