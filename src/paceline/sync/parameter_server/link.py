"""What one worker has to do with one server."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.exchange import NOTHING, Header, Port
from paceline.sync.parameter_server.pieces import Pack, Piece, copy_all
from paceline.sync.parameter_server.server import Kind
from paceline.sync.parameter_server.settings import ServerSettings
from paceline.sync.parameter_server.state import cut_pieces, pack_state, unpack_state
from paceline.sync.parameter_server.wire import States, make_wires
from paceline.sync.synchroniser import Delays, Site


class ServerLink:
    """A worker's pushes to one server, and its pulls from there.

    Args:
        port: The way there.
        pieces: The server's.
        rule: Settings.
        site: The worker.
    """

    def __init__(self, port: Port, pieces: Sequence[Piece], rule: ServerSettings, site: Site) -> None:
        self.port = port
        self.pieces = list(pieces)
        self.clock = 0
        self.version = 0
        self.states: States = {}
        """What the codec of pushes holds back."""
        self._pending: States = {}
        self._pushed_bytes = 0
        """Of the push under way, by its price."""
        self._sums_samples = rule.sums_samples
        self._optimizer = site.optimizer
        self._unit = 0.0
        self._parameters = [site.parameters[piece.parameter] for piece in pieces]
        num_groups = len(site.optimizer.param_groups)
        self._push_wire, self._pull_wire = make_wires(rule.codec, rule.pull_codec, pieces, num_groups, site.seed)
        self._pushed = port.outbox if len(port.outbox) else self._push_wire.new_body()
        self._pulled = port.inbox if len(port.inbox) else self._pull_wire.new_body()
        self.is_dropped = False
        """Whether the last push came too late to count."""
        if self._pull_wire.is_exact:
            self._move_in()
        self.views = [piece.of(parameter.data) for piece, parameter in zip(pieces, self._parameters, strict=True)]
        """The pieces' parts of this worker's parameters."""

    def _move_in(self) -> None:
        """Let whole parameters on the CPU live where pulls land, which saves a copy of each pull."""
        for piece, parameter, home in zip(
            self.pieces, self._parameters, self._pull_wire.view(self._pulled).tensors, strict=True
        ):
            if not piece.stop and parameter.is_contiguous() and parameter.device == home.device:
                parameter.data = home.copy_(parameter.data)

    def gradients(self) -> list[Tensor | None]:
        """Return the pieces' parts of this worker's gradients."""
        return [
            None if parameter.grad is None else piece.of(parameter.grad)
            for piece, parameter in zip(self.pieces, self._parameters, strict=True)
        ]

    def push(self, values: Sequence[Tensor | None], mass: float) -> None:
        """Begin to push; None where nothing was made. Without mass only the step is told of."""
        body, self._pushed_bytes = NOTHING, 0
        self._unit = self._unit or mass
        if mass > 0:
            body, self._pushed_bytes = self._pushed, self._push_wire.price
            factor = mass / self._unit if self._sums_samples else 1.0
            used = [float(value is not None) for value in values]
            rates = [float(group["lr"]) for group in self._optimizer.param_groups]
            given = [
                torch.zeros_like(view) if value is None else value * factor if factor != 1.0 else value
                for view, value in zip(self.views, values, strict=True)
            ]
            states = self._push_wire.write(body, given, [*rates, *used], self.states, self.clock)
            # What a parameter held back that nobody used was not sent: it stays.
            names = [piece.name for piece, is_used in zip(self.pieces, used, strict=True) if is_used]
            self._pending = self.states | {name: states[name] for name in names if name in states}
        self.port.begin(Header(Kind.SWAP, self.clock, self.version, mass=mass, value=self._unit), body)

    def pull(self) -> int:
        """Wait for parameters, and return the bytes of push and pull."""
        header, body = self.port.finish(self._pulled)
        self.states, self._pending = self._pending or self.states, {}
        tensors, _ = self._pull_wire.read(body, header.clock)
        if self._pull_wire.is_exact:
            apart = [(view, t) for view, t in zip(self.views, tensors, strict=True) if view.data_ptr() != t.data_ptr()]
            copy_all([view for view, _ in apart], [tensor for _, tensor in apart])
        elif self.views:
            torch._foreach_add_(self.views, [t.to(view.device) for view, t in zip(self.views, tensors, strict=True)])
        self.clock, self.version, self.is_dropped = header.clock, header.version, header.value > 0
        return self._pushed_bytes + self._pull_wire.price

    def read(self) -> int:
        """Make the parameters the server's, and return their version."""
        header, body = self.port.call(Header(Kind.READ))
        copy_all(self.views, Pack(self.pieces, 0, body).tensors)
        return header.version

    def tell(self) -> None:
        """Tell the server the parameters that this worker has."""
        pack = Pack(self.pieces)
        copy_all(pack.tensors, self.views)
        self.port.call(Header(Kind.TELL), pack.bytes)

    def come_back(self, clock: int) -> int:
        """Take part again from a clock that is at least `clock`, and return it."""
        self.clock = self.port.call(Header(Kind.BACK, clock))[0].clock
        return self.clock

    def count_delays(self) -> Delays:
        """Return how stale its pushes were, of all workers."""
        document = unpack_state(self.port.call(Header(Kind.COUNT))[1])[1]
        return Delays(dict(document["delays"]), document["num_dropped"])

    def load(self, shared: Mapping[str, Tensor], number: int | None) -> None:
        """Load the server: from what was saved, or from this worker's parameters."""
        document = unpack_state(shared[f"document/{number}"])[1] if number is not None else {}
        tensors = cut_pieces(shared, self.pieces)
        if not tensors:
            tensors = {f"parameter/{piece.name}": view for piece, view in zip(self.pieces, self.views, strict=True)}
        self.port.call(Header(Kind.LOAD), pack_state(tensors, document))

    def load_states(self, saved: Mapping[str, Tensor]) -> None:
        """Take on what the codec of pushes held back."""
        for piece, view in zip(self.pieces, self.views, strict=True):
            prefix = f"{piece.name}/"
            state = {
                name.removeprefix(prefix): tensor.to(view.device, copy=True)
                for name, tensor in saved.items()
                if name.startswith(prefix)
            }
            if state:
                self.states[piece.name] = state

    def document(self) -> dict[str, Any]:
        """Return the scalars that it keeps, as JSON."""
        return {"clock": self.clock, "version": self.version, "unit": self._unit}

    def load_document(self, document: Mapping[str, Any]) -> None:
        """Take on the scalars."""
        self.clock, self.version, self._unit = document["clock"], document["version"], document["unit"]
