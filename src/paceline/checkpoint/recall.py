"""The newest state that the memory of peers holds or restores: see `peer_memory`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.checkpoint.durable import open_regular
from paceline.checkpoint.galois import Bytes
from paceline.checkpoint.part import MemoryCheckpoint
from paceline.checkpoint.peer_memory import decode_index, digest_bytes, folder_of, size_blocks
from paceline.checkpoint.stripes import Stripes, make_teams
from paceline.comm.group import Group
from paceline.comm.hosts import find_hosts
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class _HeldPart:
    """What is left of one rank's files of one copy, and the rank of now that reads them."""

    reader: int
    slot: str
    has_part: bool
    parity: Sequence[bool]
    """Whether each of its parity blocks is whole."""
    index: Mapping[str, Any]


def recall(
    folder: Path, group: Group, *, newer_than: int, on_damaged: Callable[[Path, str], None]
) -> MemoryCheckpoint | None:
    """Return, on rank 0, the newest state in the memory of all hosts that is whole or can be restored; else None.

    Every rank calls it. The ranks may be others than those that made the copies, of another number, on other hosts.
    Memory: rank 0 then holds the whole state.

    Args:
        folder: Folder of the copies, on each host.
        group: All ranks of now.
        newer_than: Step after which the state must have been copied; rank 0's counts.
        on_damaged: Function that rank 0 calls with path and reason for damaged files.
    """
    least = group.gather_documents(newer_than, name="step of the checkpoint")[0]
    mine = [list(found) for found in _look(folder, group, least)]
    everybody = group.gather_documents(mine, name="state in memory")
    copies: dict[str, dict[int, _HeldPart]] = {}
    for reader, found in enumerate(everybody):
        for slot, has_part, parity, index in found:
            held = _HeldPart(reader, slot, has_part, parity, index)
            if group.rank == 0 and not (has_part and all(parity)):
                on_damaged(folder / slot, "it does not match its digest")
            key = json.dumps([index["step"], index["num_ranks"], index["digests"]])
            copies.setdefault(key, {}).setdefault(index["rank"], held)
    for key in sorted(copies, key=lambda key: json.loads(key)[0], reverse=True):
        copy = copies[key]
        try:
            parts = _collect(folder, copy, group.on_cpu())
        except CheckpointError:  # too little is left, which all ranks find
            continue
        about = next(iter(copy.values())).index
        is_whole = [digest_bytes(part) for part in parts] == about["digests"]
        if group.gather_documents(is_whole, name="digests of the state")[0]:
            return MemoryCheckpoint(folder / f"step-{about['step']:08d}", parts) if group.rank == 0 else None
        if group.rank == 0:
            on_damaged(folder, f"the state of step {about['step']} does not match its digests")
    return None


def _look(folder: Path, group: Group, newer_than: int) -> Iterator[tuple[str, bool, list[bool], dict[str, Any]]]:
    """Yield what this rank finds: ranks of one host share the reading. What is damaged is marked so."""
    host = next(ranks for ranks in find_hosts(group) if group.rank in ranks)
    for number, owner in enumerate(sorted(folder.glob("rank-*"))):
        if host[number % len(host)] != group.rank:
            continue
        for path in sorted(owner.glob("slot-*/index.json")):
            try:
                index = decode_index(path.read_text())
            except (OSError, ValueError):  # never finished, or damaged
                continue
            if index["step"] > newer_than and owner.name == folder_of(index["rank"]):
                part, *parity = _check(path.parent, index)
                yield f"{owner.name}/{path.parent.name}", part, parity, index


def _check(slot: Path, index: Mapping[str, Any]) -> Iterator[bool]:
    """Yield whether the part is what the index says, and whether each parity block is."""
    rank, lengths = index["rank"], index["lengths"]
    teams = make_teams(index["num_ranks"], index["num_data"], index["num_parity"])
    team = next(team for team in teams if rank in team)
    size = size_blocks(lengths, team, len(team) - index["num_parity"])
    pieces = [("part", 0, lengths[rank], index["digests"][rank])]
    pieces += [("parity", number * size, size, known) for number, known in enumerate(index["parity"])]
    for name, start, num_bytes, known in pieces:
        try:
            yield digest_bytes(_read(slot / name, start, num_bytes)) == known
        except OSError:  # cut short, or missing
            yield False


def _read(path: Path, start: int, num_bytes: int) -> Bytes:
    content = np.empty(num_bytes, np.uint8)
    with open_regular(path) as file:
        file.seek(start)
        count = file.readinto(content.data)
    if count < num_bytes:
        raise OSError(f"{path} is cut short")
    return content


def _collect(folder: Path, copy: Mapping[int, _HeldPart], group: Group) -> list[Bytes]:
    """Return, on rank 0, the parts of all ranks of a copy; nothing elsewhere. Every rank calls it.

    Raises:
        CheckpointError: Too much is lost; nothing was sent.
    """
    about = next(iter(copy.values())).index
    teams = make_teams(about["num_ranks"], about["num_data"], about["num_parity"])
    wanted = [_choose(copy, team, Stripes(len(team), about["num_parity"])) for team in teams]
    parts: dict[int, Bytes] = {}
    for team, numbers in zip(teams, wanted, strict=True):
        stripes = Stripes(len(team), about["num_parity"])
        num_blocks = stripes.code.num_data
        size = size_blocks(about["lengths"], team, num_blocks)
        for rank in (rank for rank in team if rank in copy and copy[rank].has_part):
            part = _move(folder, copy[rank], "part", 0, about["lengths"][rank], group)
            if part is not None:
                parts[rank] = np.pad(part, (0, num_blocks * size - len(part)))
        parity = {}
        for stripe, number in numbers:
            held = copy[team[stripes.parity_ranks(stripe)[number]]]
            parity[stripe, number] = _move(folder, held, "parity", number * size, size, group)
        if group.rank == 0:
            _restore(parts, team, stripes, parity, size)
    return [parts[rank][:length] for rank, length in enumerate(about["lengths"])] if group.rank == 0 else []


def _choose(copy: Mapping[int, _HeldPart], team: Sequence[int], stripes: Stripes) -> list[tuple[int, int]]:
    """Return the parity blocks, by stripe and number, that restore what a team has lost.

    Raises:
        CheckpointError: Fewer are left than needed.
    """
    chosen: list[tuple[int, int]] = []
    for stripe in range(stripes.size):
        data = [team[place] for place in stripes.data_ranks(stripe)]
        num_lost = sum(rank not in copy or not copy[rank].has_part for rank in data)
        left = [
            (stripe, number)
            for number, place in enumerate(stripes.parity_ranks(stripe))
            if team[place] in copy and copy[team[place]].parity[number]
        ]
        if len(left) < num_lost:
            raise CheckpointError(
                f"{num_lost} parity blocks must be left to restore as many ranks, but got {len(left)}; load an older "
                "checkpoint"
            )
        chosen += left[:num_lost]
    return chosen


def _restore(
    parts: dict[int, Bytes],
    team: Sequence[int],
    stripes: Stripes,
    parity: Mapping[tuple[int, int], Bytes | None],
    block_bytes: int,
) -> None:
    """Add the parts of the lost ranks of a team to `parts`."""
    lost = [rank for rank in team if rank not in parts]
    num_data = stripes.code.num_data
    for rank in lost:
        parts[rank] = np.empty(num_data * block_bytes, np.uint8)
    for stripe in range(stripes.size) if lost else ():
        data = [team[place] for place in stripes.data_ranks(stripe)]
        blocks = {
            block: parts[rank].reshape(num_data, block_bytes)[block]
            for block, rank in enumerate(data)
            if rank not in lost
        }
        blocks |= {
            num_data + number: found for (of, number), found in parity.items() if of == stripe and found is not None
        }
        for block, content in stripes.code.decode(blocks).items():
            parts[data[block]].reshape(num_data, block_bytes)[block] = content


def _move(folder: Path, held: _HeldPart, name: str, start: int, num_bytes: int, group: Group) -> Bytes | None:
    """Return bytes of a file on rank 0, and None elsewhere."""
    content = _read(folder / held.slot / name, start, num_bytes) if group.rank == held.reader else None
    if group.rank not in (0, held.reader) or held.reader == 0:
        return content if group.rank == 0 else None
    if content is not None:
        group.send(torch.from_numpy(content), 0, tag=0, name="state from memory").wait()
        return None
    content = np.empty(num_bytes, np.uint8)
    group.receive(torch.from_numpy(content), held.reader, tag=0, name="state from memory").wait()
    return content
