"""Ranks of a layout that run different operations, found by what each was doing when they failed.

That is a bug, which a new start would only meet again; a rank that is gone is not. Operations of torch's own groups
(FSDP, DTensor) have no names: torch records them.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch._C._distributed_c10d as c10d

from paceline.comm.heartbeat import describe_mismatch, run_within
from paceline.comm.torch_group import first_sentence
from paceline.errors import CommunicationError, MismatchError, PacelineError, PeerTimeoutError, SettingsError
from paceline.parallel.gather_watch import read_mismatch
from paceline.parallel.mesh import Mesh
from paceline.topology.layout import AXES

_NUM_COMPARED = 64
"""Number of the last operations along each axis that ranks tell each other."""
_WAIT_S = 3.0
"""Time in which other ranks must fail too to be heard, after a lost connection."""
_WAIT_SHARE = 0.1
"""The same time after a time-out, as a part of that."""
_ADVICE = "let every rank run the same modules: a branch on the rank, or blocks left out at random, does this"


@dataclass(frozen=True)
class _Report:
    """State of a rank that failed."""

    waited_in: str
    """Operation that failed."""
    has_timed_out: bool
    operations: Mapping[str, Mapping[str, str]]
    """Last operations of torch's groups, by axis and number."""
    said: str = ""
    """Error of a rank that failed by itself."""


def explain_failure(error: RuntimeError | CommunicationError, mesh: Mesh, what: str) -> PacelineError:
    """Return the error of a rank whose operation with others failed, after asking them for theirs.

    Args:
        error: Error of torch, or of a group of Paceline.
        mesh: Mesh of the layout.
        what: Name of what failed, and on which rank, for an error of torch.
    """
    if said := read_mismatch(mesh):
        return MismatchError(said)
    has_timed_out = isinstance(error, PeerTimeoutError) or "timed out" in str(error).lower()
    mine = _report(error, mesh, has_timed_out=has_timed_out)
    reports = _exchange(mine, mesh)
    names = mesh.world.names
    for rank, report in reports.items():
        kind, _, sentence = report.said.partition(": ")
        for known in (SettingsError, MismatchError):  # no rank is lost, and a new start would meet the same
            if kind == known.__name__:
                return known(f"{sentence} (said by rank {names[rank]})")
        if report.said:
            return CommunicationError(f"{what}: rank {names[rank]} failed with {report.said}")
    for axis in AXES:
        operations = {
            names[rank]: {int(number): run for number, run in report.operations[axis].items()}
            for rank, report in reports.items()
            if rank in mesh.ranks(axis) and axis in report.operations
        }
        if said := describe_mismatch(operations, f" along the axis {axis}"):
            return MismatchError(f"{said}; {_ADVICE}")
    if len(reports) == mesh.world.size and all(report.has_timed_out for report in reports.values()):
        # Nobody is gone, and nobody still computes.
        waits = "; ".join(f"rank {names[rank]} waits in {report.waited_in}" for rank, report in sorted(reports.items()))
        return MismatchError(f"ranks must wait for each other in the same operation, but {waits}; {_ADVICE}")
    if isinstance(error, CommunicationError):
        return error
    return CommunicationError(f"{what}, in {mine.waited_in}: {first_sentence(error)}")


def report_failure(error: BaseException, mesh: Mesh) -> None:
    """Tell other ranks, whose operations with this one will fail, what it says before it is gone."""
    if (store := mesh.world.store) is not None:
        text = f"{type(error).__name__}: {error}".strip()
        report = json.dumps(asdict(_Report("", False, {}, text)))
        run_within(_WAIT_S, lambda: store.set(f"report/{mesh.world.rank}", report))


def _report(error: RuntimeError | CommunicationError, mesh: Mesh, *, has_timed_out: bool) -> _Report:
    is_gloo = mesh.world.device.type == "cpu"
    dump: Any = c10d._dump_fr_trace_json if is_gloo else c10d._dump_nccl_trace_json  # type: ignore[attr-defined]
    recorded = json.loads(dump()).get("entries", [])  # without any there is no such key
    entries = [entry for entry in recorded if not entry["is_p2p"]]
    operations, waited_in, newest_ns = {}, "its first operation with others", 0
    for axis in AXES:
        if mesh.size(axis) == 1:
            continue
        name = mesh.process_group(axis).group_name
        mine = [entry for entry in entries if entry["process_group"][0] == name][-_NUM_COMPARED:]
        operations[str(axis)] = {str(entry["collective_seq_id"]): _describe(entry) for entry in mine}
        if mine and mine[-1]["time_created_ns"] > newest_ns:
            newest_ns = mine[-1]["time_created_ns"]
            waited_in = f"{_describe(mine[-1])} along the axis {axis}, or after it"
    if isinstance(error, CommunicationError):
        waited_in = str(error).partition(" must finish")[0]
    return _Report(waited_in, has_timed_out, operations)


def _describe(entry: dict[str, Any]) -> str:
    kind = entry["profiling_name"].partition(":")[2]
    return f"{kind} of {entry['input_sizes']} {', '.join(entry['input_dtypes'])} to {entry['output_sizes']}"


def _exchange(mine: _Report, mesh: Mesh) -> dict[int, _Report]:
    """Return the reports of this rank and of all that have failed too, by rank."""
    store, rank = mesh.world.store, mesh.world.rank
    known = {rank: mine}
    if store is None:
        return known
    run_within(_WAIT_S, lambda: store.set(f"report/{rank}", json.dumps(asdict(mine))))
    wait_s = max(_WAIT_S, _WAIT_SHARE * mesh.world.timeout_s) if mine.has_timed_out else _WAIT_S
    end_s = time.monotonic() + wait_s
    while len(known) < mesh.world.size and time.monotonic() < end_s:
        for other in set(range(mesh.world.size)) - known.keys():
            if found := run_within(_WAIT_S, partial(_read, store, f"report/{other}")):
                known[other] = _Report(**json.loads(found))
        time.sleep(0.05)
    return known


def _read(store: c10d.Store, key: str) -> bytes:
    return store.get(key) if store.check([key]) else b""
