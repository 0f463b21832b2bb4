"""What a worker with servers has at its end among some workers, from which it goes on among others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.sync.parameter_server.link import ServerLink
from paceline.sync.parameter_server.meeting import describe_held
from paceline.sync.parameter_server.server import Server

_HELD = "server "
"""Beginning of the names of servers' states; as all names here, unlike any of a parameter's codec state."""


@dataclass(frozen=True)
class Parting:
    """A worker's end among some workers.

    Args:
        held: States of servers, by number.
        pushes: Headers of pushes whose reply has not come, by the server's number.
        kept: Bodies of these pushes, and codec states after them, by name.
    """

    held: Mapping[int, Tensor]
    pushes: Mapping[int, Sequence[float]]
    kept: Mapping[str, Tensor]

    @classmethod
    def of(cls, servers: Mapping[int, Server], links: Sequence[ServerLink]) -> "Parting":
        """Stop the servers of this process, and return what it has; nobody is waited for."""
        held = {number: body for number, server in servers.items() if (body := server.hold()) is not None}
        pushes: dict[int, list[float]] = {}
        kept: dict[str, Tensor] = {}
        for number, link in enumerate(links):
            states, header, body = link.keep()
            kept |= states
            if header:
                pushes[number] = header
            if len(body):
                kept[f"push {number}"] = body
        return cls(held, pushes, kept)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        return {f"{_HELD}{number}": body for number, body in self.held.items()} | dict(self.kept)

    def document(self, num_servers: int) -> dict[str, Any]:
        """Return what tells others of it, as JSON."""
        held = {str(number): describe_held(body, num_servers) for number, body in self.held.items()}
        return {"held": held, "pushes": {str(number): list(header) for number, header in self.pushes.items()}}


def held_in(tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return the servers' states among a parting's tensors, by number."""
    return {int(name.removeprefix(_HELD)): tensor for name, tensor in tensors.items() if name.startswith(_HELD)}
