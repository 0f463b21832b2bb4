"""How workers with servers go on among others: what servers held is collected, and what was under way is settled."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.sync.parameter_server.state import pack_state, unpack_state
from paceline.sync.synchroniser import ServedProgress
from paceline.sync.used import Ranges, covers, find_gaps, unite

Held = Mapping[str, Any]
"""Facts on the state of a server that a worker holds: version, used ranges, bytes, and the number of servers."""


def describe_held(body: Tensor, num_servers: int) -> dict[str, Any]:
    """Return what tells of a server's state which `Server.hold` returned."""
    document = unpack_state(body)[1]
    return {
        "version": document["version"],
        "used": document["used"],
        "bytes": len(body),
        "num_servers": num_servers,
    }


def choose_holders(held: Sequence[Mapping[str, Held]]) -> dict[int, int]:
    """Return the place of whoever holds the newest state of each server, by the server's number.

    Args:
        held: Facts on the states that each worker holds, by the server's number.
    """
    numbers = sorted({int(number) for mine in held for number in mine})
    return {
        number: max(
            (place for place, mine in enumerate(held) if str(number) in mine),
            key=lambda place: (held[place][str(number)]["version"], -place),
        )
        for number in numbers
    }


def find_missing(held: Sequence[Mapping[str, Held]], *, steps_together: bool) -> str:
    """Return why servers cannot go on from what workers hold; empty if they can.

    Args:
        held: Facts on the states that each worker holds, by the server's number.
        steps_together: Whether all servers must have done the same steps.
    """
    chosen = {number: held[place][str(number)] for number, place in choose_holders(held).items()}
    if not chosen:
        return "all servers are lost with the workers beside which they ran"
    num_servers = next(iter(chosen.values()))["num_servers"]
    if lost := [str(number) for number in range(num_servers) if number not in chosen]:
        return f"the parameters of server {', '.join(lost)} are lost with the worker beside which it ran"
    ends = {used[-1][1] for state in chosen.values() if (used := state["used"])}
    if steps_together and len(ends) > 1:
        return "a worker was lost while some servers had done a step, and others not"
    return ""


def share_held(group: Group, held: Mapping[int, Tensor], num_servers: int) -> dict[int, Tensor]:
    """Return the states of all servers on each worker; all call it.

    Args:
        group: Group of the workers.
        held: States that this worker holds, by the server's number.
        num_servers: Number of servers.
    """
    mine = {str(number): describe_held(body, num_servers) for number, body in held.items()}
    everybody, shared = group.gather_documents(mine, name="states of servers"), {}
    for number, holder in choose_holders(everybody).items():
        is_mine = group.rank == holder
        body = held[number] if is_mine else torch.empty(everybody[holder][str(number)]["bytes"], dtype=torch.uint8)
        group.on_cpu().broadcast(body, source=holder, name=f"state of server {number}").wait()
        shared[number] = body
    return shared


class Meeting:
    """What the workers of a new group know of the servers that they had before.

    Args:
        group: Group of the workers.
        documents: Documents of all workers, after they had stopped; empty for a new one.
        num_servers: Number of servers now.
        repeats: Whether living workers make a push again that servers have not applied, if these are as many as before.
    """

    def __init__(
        self, group: Group, documents: Sequence[Mapping[str, Any]], *, num_servers: int, repeats: bool
    ) -> None:
        self._group, self._documents = group, documents
        self._held = [document.get("held", {}) for document in documents]
        self._holders = choose_holders(self._held)
        links = [link for document in documents for link in document.get("links", ())]
        self.clock = max((link["clock"] for link in links), default=0)
        """Highest clock of any worker."""
        self.is_same = num_servers == self.num_servers
        """Whether the number of servers is the same as before."""
        self.repeats = repeats and self.is_same
        """Whether living workers make a push again that servers have not applied."""

    @property
    def num_servers(self) -> int:
        """Number of servers before."""
        return len(self._holders)

    def is_applied(self, number: int, push: Sequence[float]) -> bool:
        """Return whether a former server had applied a worker's push."""
        return covers(self._used(number), int(push[3]), int(push[4]))

    @property
    def progress(self) -> ServedProgress:
        """What servers have applied, once pushes have been made again."""
        known = [self._used(number) for number in self._holders]
        living = [[push[3:5]] for document in self._documents for push in document.get("pushes", {}).values()]
        again: Ranges = unite(*living) if self.repeats else []
        known = [unite(used, again) for used in known]
        everything = unite(*known)
        lost = []
        for number, used in zip(self._holders, known, strict=True):
            for start, stop in everything:
                inside = [[a, b] for a, b in used if a < stop and start < b]
                lacking = find_gaps([[start, start], *inside, [stop, stop]])
                lost += [f"what server {number} would have learnt of samples {a} to {b}" for a, b in lacking if a < b]
        return ServedProgress([[int(start), int(stop)] for start, stop in everything], "; ".join(lost))

    def collect(self, mine: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the servers' states on the first worker, and nothing on others; all call it.

        Args:
            mine: States that this worker holds, by the server's number.
        """
        group, bodies = self._group.on_cpu(), {}
        for number, holder in self._holders.items():
            if group.rank not in (0, holder):
                continue
            body = mine[number] if group.rank == holder else None
            if holder:
                name = f"state of server {number}"
                if body is None:
                    body = torch.empty(self._held[holder][str(number)]["bytes"], dtype=torch.uint8)
                    group.receive(body, holder, tag=0, name=name).wait()
                else:
                    group.send(body, 0, tag=0, name=name).wait()
            if group.rank == 0 and body is not None:
                bodies[number] = body
        return bodies

    def documents_for(self, num_servers: int) -> dict[str, Tensor]:
        """Return documents of servers that were not there before: they have used what the first one has."""
        first = self._held[self._holders[0]]["0"]
        started = pack_state({}, {"version": first["version"], "used": first["used"]})
        return {f"document/{number}": started for number in range(self.num_servers, num_servers)}

    def _used(self, number: int) -> Ranges:
        used: Ranges = self._held[self._holders[number]][str(number)]["used"]
        return used
