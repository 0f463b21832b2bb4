"""One worker's connection to one server."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from paceline.comm.rpc import NOTHING, RpcClient, RpcHeader
from paceline.sync.parameter_server.blocks import PackedTensors, ParameterBlock, copy_all
from paceline.sync.parameter_server.server import RequestKind
from paceline.sync.parameter_server.settings import ServerSettings
from paceline.sync.parameter_server.state import cut_blocks, pack_state, unpack_state
from paceline.sync.parameter_server.wire_format import States, make_wire_formats
from paceline.sync.synchroniser import Delays, WorkerContext

_PENDING = "pending "
"""Beginning of the names of codec states after a push whose reply has not come."""


class ServerLink:
    """A worker's pushes to one server, and its pulls from it.

    Args:
        client: RPC client of the server.
        blocks: Blocks of the server.
        rule: Settings of the rule.
        context: The worker's model, optimizer and group.
    """

    def __init__(
        self, client: RpcClient, blocks: Sequence[ParameterBlock], rule: ServerSettings, context: WorkerContext
    ) -> None:
        self.client = client
        self.blocks = list(blocks)
        self.clock = 0
        self.version = 0
        self.states: States = {}
        """Codec states of the pushes."""
        self._pending: States = {}
        self._under_way: RpcHeader | None = None
        """Header of the push whose reply has not come."""
        self._pushed_bytes = 0
        """Stated bytes of the push under way."""
        self._sums_samples = rule.sums_samples
        self._optimizer = context.optimizer
        self._unit = 0.0
        self._parameters = [context.parameters[block.parameter] for block in blocks]
        num_groups = len(context.optimizer.param_groups)
        self._push_format, self._pull_format = make_wire_formats(
            rule.codec, rule.pull_codec, blocks, num_groups, context.seed
        )
        self._pushed = client.outbox if len(client.outbox) else self._push_format.new_body()
        self._pulled = client.inbox if len(client.inbox) else self._pull_format.new_body()
        self.is_dropped = False
        """Whether the last push came too late to count."""
        if self._pull_format.is_exact:
            self._move_in()
        self.views = [block.of(parameter.data) for block, parameter in zip(blocks, self._parameters, strict=True)]
        """Blocks of this worker's parameters, as views."""

    def _move_in(self) -> None:
        """Place whole parameters on the CPU in the buffer of pulls, which saves a copy per pull."""
        for block, parameter, home in zip(
            self.blocks, self._parameters, self._pull_format.view(self._pulled).tensors, strict=True
        ):
            if not block.stop and parameter.is_contiguous() and parameter.device == home.device:
                parameter.data = home.copy_(parameter.data)

    def gradients(self) -> list[Tensor | None]:
        """Return this worker's gradients, by block."""
        return [
            None if parameter.grad is None else block.of(parameter.grad)
            for block, parameter in zip(self.blocks, self._parameters, strict=True)
        ]

    def push(self, values: Sequence[Tensor | None], weight: float, work: tuple[int, int] = (0, 0)) -> None:
        """Push: see `prepare` and `begin`."""
        self.prepare(values, weight, work)
        self.begin()

    def prepare(self, values: Sequence[Tensor | None], weight: float, work: tuple[int, int] = (0, 0)) -> None:
        """Prepare a push; None for blocks without values. With weight 0 the step is only reported.

        Args:
            values: Gradients or updates, by block.
            weight: Number of samples, or tokens.
            work: Range of the push; see `Shard.used`.
        """
        self._pushed_bytes = 0
        self._unit = self._unit or weight
        if weight > 0:
            body, self._pushed_bytes = self._pushed, self._push_format.price
            factor = weight / self._unit if self._sums_samples else 1.0
            used = [float(value is not None) for value in values]
            rates = [float(group["lr"]) for group in self._optimizer.param_groups]
            given = [
                torch.zeros_like(view) if value is None else value * factor if factor != 1.0 else value
                for view, value in zip(self.views, values, strict=True)
            ]
            states = self._push_format.write(body, given, [*rates, *used], self.states, self.clock)
            # The residual of a parameter without a gradient was not sent: it stays.
            names = [block.name for block, is_used in zip(self.blocks, used, strict=True) if is_used]
            self._pending = self.states | {name: states[name] for name in names if name in states}
        self._under_way = RpcHeader(RequestKind.SWAP, self.clock, self.version, *work, weight, self._unit)

    def begin(self) -> None:
        """Begin the prepared push."""
        assert self._under_way is not None
        self.client.begin(self._under_way, self._pushed if self._under_way.weight > 0 else NOTHING)

    def pull(self) -> int:
        """Wait for parameters, and return the bytes of push and pull."""
        header, body = self.client.finish(self._pulled)
        self._under_way = None
        self.states, self._pending = self._pending or self.states, {}
        tensors, _ = self._pull_format.read(body, header.clock)
        if self._pull_format.is_exact:
            apart = [(view, t) for view, t in zip(self.views, tensors, strict=True) if view.data_ptr() != t.data_ptr()]
            copy_all([view for view, _ in apart], [tensor for _, tensor in apart])
        elif self.views:
            torch._foreach_add_(self.views, [t.to(view.device) for view, t in zip(self.views, tensors, strict=True)])
        self.clock, self.version, self.is_dropped = header.clock, header.version, header.value > 0
        return self._pushed_bytes + self._pull_format.price

    def read(self) -> int:
        """Replace the parameters by the server's, and return their version."""
        header, body = self.client.call(RpcHeader(RequestKind.READ))
        copy_all(self.views, PackedTensors(self.blocks, 0, body).tensors)
        return header.version

    def report(self) -> None:
        """Tell the server this worker's parameters."""
        packed = PackedTensors(self.blocks)
        copy_all(packed.tensors, self.views)
        self.client.call(RpcHeader(RequestKind.REPORT), packed.bytes)

    def come_back(self, clock: int) -> int:
        """Take part again from a clock that is at least `clock`, and return it."""
        self.clock = self.client.call(RpcHeader(RequestKind.BACK, clock))[0].clock
        return self.clock

    def count_delays(self) -> Delays:
        """Return the delays of all workers' pushes."""
        document = unpack_state(self.client.call(RpcHeader(RequestKind.COUNT))[1])[1]
        return Delays(dict(document["delays"]), document["num_dropped"])

    def load(self, shared: Mapping[str, Tensor], number: int | None) -> None:
        """Load the server: from saved state, or from this worker's parameters."""
        document = unpack_state(shared[f"document/{number}"])[1] if number is not None else {}
        tensors = cut_blocks(shared, self.blocks)
        if not tensors:
            tensors = {f"parameter/{block.name}": view for block, view in zip(self.blocks, self.views, strict=True)}
        self.client.call(RpcHeader(RequestKind.LOAD), pack_state(tensors, document))

    def keep(self) -> tuple[dict[str, Tensor], list[float], Tensor]:
        """Return the push whose reply has not come, to be made again: codec states, header and body; empty if none is.

        Parameters move out of memory that is shared with the server.
        """
        for parameter in self._parameters:
            parameter.data = parameter.data.clone()
        if self._under_way is None:
            return {}, [], NOTHING
        states = {
            f"{_PENDING}{block}/{site}": kept for block, state in self._pending.items() for site, kept in state.items()
        }
        return states, list(astuple(self._under_way)), self._pushed.clone() if self._under_way.weight > 0 else NOTHING

    def go_on(self, document: Mapping[str, Any], saved: Mapping[str, Tensor], *, is_applied: bool) -> None:
        """Go on among other workers.

        Args:
            document: Former `document`.
            saved: This worker's tensors.
            is_applied: Whether the push whose reply had not come is applied, or will be made again.
        """
        self._unit = document["unit"]
        self.load_states(saved)
        if is_applied:
            self.load_states(saved, _PENDING)

    def push_again(self, header: Sequence[float], body: Tensor) -> None:
        """Push what this server has not applied, and wait for nothing else."""
        self.report()
        _, clock, version, start, stop, weight, value = header
        self.client.call(
            RpcHeader(RequestKind.PUSH_AGAIN, int(clock), int(version), int(start), int(stop), weight, value), body
        )

    def load_states(self, saved: Mapping[str, Tensor], prefix: str = "") -> None:
        """Load the codec states of the pushes."""
        for block, view in zip(self.blocks, self.views, strict=True):
            start = f"{prefix}{block.name}/"
            state = {
                name.removeprefix(start): tensor.to(view.device, copy=True)
                for name, tensor in saved.items()
                if name.startswith(start)
            }
            if state:
                self.states[block.name] = state

    def document(self) -> dict[str, Any]:
        """Return the scalar state, as JSON."""
        return {"clock": self.clock, "version": self.version, "unit": self._unit}

    def load_document(self, document: Mapping[str, Any]) -> None:
        """Load the scalar state."""
        self.clock, self.version, self._unit = document["clock"], document["version"], document["unit"]
