"""Copies of the state in the memory of other ranks' hosts: parity blocks that restore the parts of lost ranks.

Each rank keeps its own part of the state, and parity of other ranks' parts (`stripes`, `erasure`), in files of a folder
that is memory (``/dev/shm``): they outlive the processes, so that workers that are started again go on from there, also
if a host is lost with all that it held. Nothing is written to a disk. Two copies take turns, so that there is a whole
one at every instant; a copy counts once every rank has finished it.

    rank-00002/slot-0/part      the rank's part, see `part`
    rank-00002/slot-0/parity    its parity blocks
    rank-00002/slot-0/index.json

Memory on a rank: two copies of its part, and of num_parity / num_data of a part. On the wire: each rank sends and
receives num_parity times its part.
"""

import json
import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from paceline.checkpoint.galois import Bytes, combine, compile_kernels
from paceline.checkpoint.part import StatePart
from paceline.checkpoint.storage import TensorBlock
from paceline.checkpoint.stripes import Stripes, make_teams
from paceline.comm.group import Group
from paceline.errors import storing

SEGMENT_BYTES = 2**20
"""Bytes of a block that travel at once."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class PeerCopy:
    """A finished copy, as this rank sees it."""

    step: int
    part_bytes: int
    """Size of this rank's part."""
    memory_bytes: int
    """Memory that all copies of this rank take."""


class PeerMemory:
    """This rank's part of the copies in the memory of peers. Every rank of a world makes one.

    The kernel of parity is compiled here, not in the first copy, which holds up a step of all ranks.

    Args:
        folder: Folder in memory; each of the host's ranks has its own folder there.
        num_data: Least number of data blocks of a stripe: with 1 and `num_parity` 1, a copy of each part is on another
            rank.
        num_parity: Number of ranks of a team that may be lost.
    """

    def __init__(self, folder: Path, num_data: int, num_parity: int) -> None:
        self.folder = folder
        self.num_data = num_data
        self.num_parity = num_parity
        self._slots: dict[Path, Bytes] = {}
        self._next_slot: int | None = None
        compile_kernels()

    def keep(
        self, blocks: Mapping[str, Sequence[TensorBlock]], document: Mapping[str, Any], step: int, world: Group
    ) -> PeerCopy:
        """Copy the present state; every rank of `world` calls it, after the same step.

        Args:
            blocks: Blocks of tensors of which this rank keeps the copy; all together make each tensor once.
            document: Document; rank 0's counts.
            step: Step after which it is copied.
            world: All ranks.

        Raises:
            SettingsError: There are too few ranks.
            StorageError: The memory is full.
            CommunicationError: A rank was lost; the copy before stays.
        """
        team = next(one for one in make_teams(world.size, self.num_data, self.num_parity) if world.rank in one)
        stripes = Stripes(len(team), self.num_parity)
        world = world.on_cpu()
        part = StatePart(blocks, document if world.rank == 0 else {}, step)
        # Whoever is here has finished the copy before, so that the one before that may go.
        lengths = world.gather_documents(part.num_bytes, name="sizes of the state")
        num_blocks = stripes.size - self.num_parity
        block_bytes = size_blocks(lengths, team, num_blocks)
        own = self.folder / folder_of(world.rank)
        if self._next_slot is None:
            self._next_slot = _find_older_slot(own)
        slot = own / f"slot-{self._next_slot}"
        with storing(slot):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            slot.mkdir(parents=True, exist_ok=True)
            (slot / "index.json").unlink(missing_ok=True)
            data_KN = self._map(slot / "part", num_blocks * block_bytes).reshape(num_blocks, block_bytes)
            parity_MN = self._map(slot / "parity", self.num_parity * block_bytes).reshape(-1, block_bytes)
        part.write(data_KN.reshape(-1))
        _exchange(world, team, stripes, data_KN, parity_MN)
        digests = world.gather_documents(digest_bytes(data_KN.reshape(-1)[: part.num_bytes]), name="digests")
        index = {
            "step": step,
            "rank": world.rank,
            "num_ranks": world.size,
            "num_data": self.num_data,
            "num_parity": self.num_parity,
            "lengths": lengths,
            "digests": digests,
            "parity": [digest_bytes(block) for block in parity_MN],
        }
        with storing(slot):
            (slot / "index.part").write_text(encode_index(index))
            (slot / "index.part").rename(slot / "index.json")
        self._next_slot = 1 - self._next_slot
        return PeerCopy(step, part.num_bytes, sum(memory.nbytes for memory in self._slots.values()))

    def forget(self) -> None:
        """Free the memory of all copies of this host, when no rank needs them any more."""
        self._slots = {}
        shutil.rmtree(self.folder, ignore_errors=True)  # other ranks of the host do the same

    def _map(self, path: Path, num_bytes: int) -> Bytes:
        """Return the memory of a file, which is made or changed to have that size."""
        memory = self._slots.get(path)
        if memory is None or memory.nbytes != num_bytes:
            self._slots.pop(path, None)
            path.unlink(missing_ok=True)
            memory = self._slots[path] = _map_file(path, num_bytes)
        return memory


def folder_of(rank: int) -> str:
    """Return the name of a rank's folder."""
    return f"rank-{rank:05d}"


def size_blocks(lengths: Sequence[int], team: Sequence[int], num_blocks: int) -> int:
    """Return the size of the blocks of a team, by the sizes of all ranks' parts."""
    return -(-max(lengths[rank] for rank in team) // (num_blocks * _ALIGNMENT)) * _ALIGNMENT


def encode_index(index: Mapping[str, Any]) -> str:
    """Return the content of an index's file: its digest, and in the next line itself."""
    text = json.dumps(index, sort_keys=True)
    return f"{blake3(text.encode()).hexdigest()}\n{text}"


def decode_index(content: str) -> dict[str, Any]:
    """Return the index of a file.

    Raises:
        ValueError: The file is damaged.
    """
    digest, _, text = content.partition("\n")
    if blake3(text.encode()).hexdigest() != digest:
        raise ValueError("the index does not match its digest")
    index = json.loads(text)
    assert isinstance(index, dict)
    return index


def digest_bytes(content: Bytes) -> str:
    """Return the BLAKE3 digest of bytes."""
    return blake3(content.data, max_threads=1).hexdigest()


def _find_older_slot(own: Path) -> int:
    """Return the slot of the older copy that a process before this one has left, or of none."""
    steps = []
    for number in (0, 1):
        try:
            steps.append(decode_index((own / f"slot-{number}" / "index.json").read_text())["step"])
        except (OSError, ValueError):
            steps.append(-1)
    return steps.index(min(steps))


def _map_file(path: Path, num_bytes: int) -> Bytes:
    """Return the memory of a new file. It is reserved, or a full file system would end the process as it is written."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
    finally:
        os.close(descriptor)


def _exchange(world: Group, team: Sequence[int], stripes: Stripes, data_KN: Bytes, parity_MN: Bytes) -> None:
    """Send this rank's blocks to those that hold their parity, and make the parity of others' blocks."""
    me, num_blocks, block_bytes = team.index(world.rank), *data_KN.shape
    for start in range(0, block_bytes, SEGMENT_BYTES):
        stop = min(start + SEGMENT_BYTES, block_bytes)
        received = np.empty((stripes.num_parity, num_blocks, stop - start), np.uint8)
        works = []
        for number, segments_KN in enumerate(received):
            stripe = stripes.stripe_of_parity(me, number)
            for segment, source in zip(segments_KN, stripes.data_ranks(stripe), strict=True):
                works.append(world.receive(torch.from_numpy(segment), team[source], tag=stripe, name="peers' state"))
        for block in range(num_blocks):
            stripe = stripes.stripe_of_data(me, block)
            segment = torch.from_numpy(data_KN[block, start:stop])
            for target in stripes.parity_ranks(stripe):
                works.append(world.send(segment, team[target], tag=stripe, name="state to peers"))
        world.wait_for(works)
        for number, segments_KN in enumerate(received):
            combine(
                stripes.code.parity_matrix[number : number + 1], segments_KN, parity_MN[number : number + 1, start:stop]
            )
