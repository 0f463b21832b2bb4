"""Transfer of tensors between the ranks that hold slices of them and rank 0, which writes and reads checkpoints.

All transfers go through host memory, a few tensors at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Size, Tensor
from torch.distributed.tensor import DTensor

from paceline.checkpoint import SavedState, TensorBlock
from paceline.comm.group import Group, Work
from paceline.compression.codec import ADDED, RESIDUALS, merge_states
from paceline.errors import CheckpointError, CommunicationError
from paceline.parallel.local import fused_parts, local, local_slice

FORMAT = 2
"""Version of the tensors' names and of the document; the files have a format version of their own."""
_UNDER_WAY_BYTES = 4 * 2**20
"""Bytes of a rank's messages beyond which it waits for those that are under way."""

Key = TypeVar("Key")


class Slice(NamedTuple):
    """One rank's block of a tensor, which is the whole tensor where ranks do not share it."""

    dtype: str
    shape: list[int]
    """Shape of the block."""
    whole: list[int]
    """Shape of the whole tensor."""
    begin: int = 0
    """Place of the block's first element in the whole tensor, row by row."""
    dim: int = 0
    """Dim of which the block has a slice of each of several equal parts, such as query, key and value."""
    num_parts: int = 1
    """Number of these parts."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Slice":
        """Return this rank's block of `tensor`."""
        if not isinstance(tensor, DTensor):
            return cls.of_whole(tensor.shape, tensor.dtype)
        block = local_slice(torch.empty(tensor.shape, device="meta"), tensor)  # a view, which knows where it begins
        begin, (dim, num_parts) = int(block.storage_offset()), fused_parts(tensor)
        shape = list(block.flatten(dim, dim + 1).shape if num_parts > 1 else block.shape)
        return cls(_name_dtype(tensor.dtype), shape, list(tensor.shape), begin, dim, num_parts)

    @classmethod
    def of_whole(cls, shape: Size, dtype: torch.dtype) -> "Slice":
        """Return the slice that is a whole tensor."""
        return cls(_name_dtype(dtype), list(shape), list(shape))

    @property
    def is_whole(self) -> bool:
        """Whether the block is the whole tensor."""
        return self.shape == self.whole

    def split(self, block: Tensor) -> list[tuple[Tensor, tuple[int, ...]]]:
        """Return the slices of each of the parts in a block, with the indices of their first elements in the whole."""
        first, rest = [], self.begin
        for stride in torch.empty(self.whole, device="meta").stride():
            first.append(rest // stride)
            rest %= stride
        if self.num_parts == 1:
            return [(block, tuple(first))]
        found = []
        for part in block.chunk(self.num_parts, self.dim):
            found.append((part, tuple(first)))
            first[self.dim] += self.whole[self.dim] // self.num_parts
        return found

    def cut(self, whole: Tensor) -> Tensor:
        """Return the block of the whole tensor: a view, with one more dim before `dim` if it has several parts."""
        if self.is_whole:
            return whole
        shape, strides, dim = list(self.shape), list(whole.stride()), self.dim
        if self.num_parts > 1:
            shape[dim : dim + 1] = [self.num_parts, shape[dim] // self.num_parts]
            strides.insert(dim, strides[dim] * (self.whole[dim] // self.num_parts))
        return whole.as_strided(shape, strides, whole.storage_offset() + self.begin)

    def make(self, *, whole: bool = False) -> Tensor:
        """Return memory for the block, or for the `whole` tensor."""
        return torch.empty(self.whole if whole else self.shape, dtype=getattr(torch, self.dtype))


def gather(mine: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Return, on rank 0, whole tensors, assembled from the slices of all ranks.

    Args:
        mine: This rank's tensors, by name: DTensors, of which it holds a slice, and others. If several ranks give the
            same slice, the lowest rank's counts.
        group: The ranks.
    """
    offers = _exchange({name: Slice.of(tensor) for name, tensor in mine.items()}, group, "slices of the state")
    group = group.on_cpu()
    gathered: dict[str, Tensor] = {}
    messages = _TensorMoves[tuple[str, Slice]](group)

    def assemble(arrived: Iterator[tuple[tuple[str, Slice], Tensor]]) -> None:
        for (name, held), moved in arrived:
            if held.is_whole:
                gathered[name] = moved
                continue
            if name not in gathered:
                gathered[name] = held.make(whole=True)
            (block := held.cut(gathered[name])).copy_(moved.reshape(block.shape))

    for name, slices in offers.items():
        owners = {(held.begin, *held.shape): rank for rank, held in reversed(slices.items())}
        for rank in sorted(owners.values()):
            tensor = local(mine[name]).detach() if rank == group.rank else None
            assemble(messages.move((name, slices[rank]), tensor, slices[rank], rank, 0))
    assemble(messages.finish())
    return gathered


def divide(mine: Mapping[str, Tensor], group: Group) -> dict[str, list[TensorBlock]]:
    """Return the blocks of whole tensors that this rank is to write, of which each is some rank's; nothing moves.

    Args:
        mine: This rank's tensors; see `gather`.
        group: The ranks.
    """
    offers = _exchange({name: Slice.of(tensor) for name, tensor in mine.items()}, group, "slices of the state")
    blocks: dict[str, list[TensorBlock]] = {}
    for name, slices in offers.items():
        owners = {(held.begin, *held.shape): rank for rank, held in reversed(slices.items())}
        if group.rank not in owners.values():
            continue
        held, tensor = slices[group.rank], local(mine[name]).detach()
        if tensor.numel() or not Size(held.whole).numel():
            blocks[name] = [TensorBlock(part, tuple(held.whole), offsets) for part, offsets in held.split(tensor)]
    return blocks


def scatter(
    wanted: Mapping[str, Slice], find: Callable[[str], Tensor] | None, group: Group
) -> Iterator[tuple[str, Tensor]]:
    """Yield the slices of rank 0's tensors that this rank wants, in host memory; every rank must take all of them.

    Args:
        wanted: Slices that this rank wants, by name.
        find: Function that returns a whole tensor; needed on rank 0 only.
        group: The ranks.
    """
    wishes = _exchange(wanted, group, "slices that are wanted")
    group = group.on_cpu()
    messages = _TensorMoves[str](group)
    for name, slices in wishes.items():
        whole = find(name) if find is not None and group.rank == 0 else None
        if len(slices) == group.size > 1 and all(needed.is_whole for needed in slices.values()):
            yield from messages.finish()
            held = slices[0].make() if whole is None else whole
            if held.numel():
                group.broadcast(_bytes_of(held), name=name).wait()
            yield name, held
            continue
        for rank, needed in slices.items():
            # A copy, otherwise a slice would keep the whole tensor's memory alive.
            tensor = None if whole is None else needed.cut(whole).clone().reshape(needed.shape)
            yield from messages.move(name, tensor, needed, 0, rank)
    yield from messages.finish()


def trade(
    wanted: Mapping[str, Slice], held: Mapping[str, tuple[Slice, Tensor]], group: Group
) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the slices that this rank wants, each with a rank that holds the same one: itself, or the first that does.

    Every rank must take all of them; who wants what it holds is sent nothing.

    Args:
        wanted: Slices that this rank wants, by name.
        held: Slices that this rank holds, in host memory.
        group: The ranks.

    Raises:
        CommunicationError: Nobody holds a slice that a rank wants; all ranks find it before anything is sent.
    """
    wishes = _exchange(wanted, group, "slices that are wanted")
    offers = _exchange({name: one for name, (one, _) in held.items()}, group, "slices that are held")
    sources: dict[tuple[str, int], int] = {}
    for name, slices in wishes.items():
        for rank, needed in slices.items():
            same = [other for other, one in offers.get(name, {}).items() if one == needed]
            if not same:
                raise CommunicationError(f"a rank must hold {name} of rank {rank}, but none that is left does")
            sources[name, rank] = rank if rank in same else same[0]
    group = group.on_cpu()
    messages = _TensorMoves[tuple[str, int]](group)

    def unpack(arrived: Iterator[tuple[tuple[str, int], Tensor]]) -> Iterator[tuple[str, Tensor, int]]:
        return ((name, moved, source) for (name, source), moved in arrived)

    for (name, rank), source in sources.items():
        mine = held[name][1].reshape(held[name][0].shape) if group.rank == source else None
        yield from unpack(messages.move((name, source), mine, wishes[name][rank], source, rank))
    yield from unpack(messages.finish())


def read_header(checkpoint: SavedState | None, world: Group) -> tuple[dict[str, Any], dict[str, Slice]] | None:
    """Return, on every rank, the document and the whole tensors of rank 0's checkpoint; None without one.

    Raises:
        CheckpointError: The checkpoint is of another version of Paceline.
    """
    header = None
    if checkpoint is not None:
        tensors = {name: Slice.of_whole(*spec) for name, spec in checkpoint.list_tensors().items()}
        header = [str(checkpoint.path), checkpoint.read_document(), tensors]
    header = world.gather_documents(header, name="checkpoint")[0]
    if header is None:
        return None
    path, document, tensors = header
    if document.get("format") != FORMAT:
        raise CheckpointError(
            f"a checkpoint must be of format {FORMAT}, but {path} is of format {document.get('format', 1)}; go on from "
            "it with the version of Paceline that wrote it, or start a new run"
        )
    return document, {name: Slice(*whole) for name, whole in tensors.items()}


@dataclass(frozen=True)
class SavedReplica:
    """A replica in a checkpoint: its contents, known to every rank, and its tensors, which rank 0 reads.

    Args:
        checkpoint: Checkpoint on rank 0; None elsewhere.
        prefix: Prefix of the replica's names in the checkpoint.
        document: Document of the checkpoint.
        slices: Whole tensors of the replica, by name.
    """

    checkpoint: SavedState | None
    prefix: str
    document: dict[str, Any]
    slices: Mapping[str, Slice]

    @classmethod
    def open(cls, checkpoint: SavedState | None, world: Group, prefix: str) -> "SavedReplica | None":
        """Return the replica under a prefix of rank 0's checkpoint; None without a checkpoint. Every rank calls it.

        Raises:
            CheckpointError: The checkpoint is of another version of Paceline, or has no such replica.
        """
        header = read_header(checkpoint, world)
        if header is None:
            return None
        document, tensors = header
        if f"{prefix}replica" not in document:
            known = ", ".join(repr(name.removesuffix("replica")) for name in document if name.endswith("replica"))
            raise CheckpointError(
                f"a replica must have the prefix that it was saved under, but got {prefix!r} instead of {known}; give "
                "it one of these"
            )
        slices = {name.removeprefix(prefix): whole for name, whole in tensors.items() if name.startswith(prefix)}
        return cls(checkpoint, prefix, document, slices)

    @property
    def about(self) -> dict[str, Any]:
        """The replica's own document."""
        about: dict[str, Any] = self.document[f"{self.prefix}replica"]
        return about

    @cached_property
    def keys(self) -> Mapping[str, Sequence[str]]:
        """Last parts of names, by the parts before."""
        found: dict[str, list[str]] = {}
        for name in self.slices:
            stem, _, key = name.rpartition("/")
            found.setdefault(stem, []).append(key)
        return found

    def state_of(self, rank: int) -> dict[str, Any]:
        """Return a rank's saved document."""
        state: dict[str, Any] = self.about["states"][self.about["state_of"][rank]]
        return state

    def list_own(self, rank: int, kind: str) -> dict[str, Slice]:
        """Return a rank's own tensors of a kind, by whole names."""
        return {name: whole for name, whole in self.slices.items() if name.startswith(f"rank{rank}/{kind}/")}

    def holds_back(self, kind: str) -> bool:
        """Return whether the ranks' own tensors of a kind include residuals of codecs."""
        names = (name.split("/") for name in self.slices if name.startswith("rank"))
        return any(parts[1] == kind and parts[-1] in RESIDUALS for parts in names)

    def list_optimizer(self) -> dict[str, Slice]:
        """Return the optimizer's whole tensors: the saved ones, or the means over workers."""
        listed = {name: whole for name, whole in self.slices.items() if name.startswith("optimizer/")}
        for ranks, blocks in self._parts:
            for name, own in self.list_own(ranks[0], "optimizer").items():
                name = name.partition("/")[2]
                if all(f"rank{rank}/{name}" in self.slices for rank in ranks):
                    block = self._block(split_name(name)[1], blocks)
                    shape = block.whole if own.shape == block.shape else own.shape
                    listed[name] = Slice(own.dtype, shape, shape)
        return listed

    def list_averages(self) -> dict[str, Slice]:
        """Return the whole moving averages of parameters."""
        return {name: whole for name, whole in self.slices.items() if name.startswith("ema/")}

    def list_feedback(self) -> dict[str, Slice]:
        """Return the sums of all workers' residuals, as whole tensors of one worker."""
        listed: dict[str, Slice] = {}
        for stem, sites in self.keys.items():
            rank, kind, parameter = split_name(stem)
            if rank.startswith("rank") and kind == "feedback":
                whole = self.slices[f"model/{parameter}"]._replace(dtype="float32")
                merged = {"worker" if site in RESIDUALS else site for site in ADDED.intersection(sites)}
                listed |= {f"feedback/{parameter}/{site}": whole for site in merged}
        return listed

    def find(self, name: str) -> Tensor:
        """Return a whole tensor, on rank 0: as it was saved, or assembled from the ranks' own tensors."""
        if name in self.slices:
            return self._read(name)
        kind, parameter, key = split_name(name)
        whole: Tensor | None = None
        for ranks, blocks in self._parts:
            stems = [stem for rank in ranks if (stem := f"rank{rank}/{kind}/{parameter}") in self.keys]
            if not stems:
                continue
            block = self._block(parameter, blocks)
            if kind == "feedback":
                states = [{site: self._read(f"{stem}/{site}") for site in self.keys[stem]} for stem in stems]
                joined = merge_states(states, Size(block.shape))[key]
            else:
                tensors = [self._read(f"{stem}/{key}") for stem in stems]
                joined = torch.stack([tensor.double() for tensor in tensors]).mean(0).to(tensors[0].dtype)
            if list(joined.shape) != block.shape:
                return joined
            whole = torch.zeros(block.whole, dtype=joined.dtype) if whole is None else whole
            (view := block.cut(whole)).copy_(joined.reshape(view.shape))
        assert whole is not None, f"{name} must be in the checkpoint"
        return whole

    @property
    def _parts(self) -> list[tuple[list[int], dict[str, Any]]]:
        """Ranks that had each part of the model, by worker, and the blocks of parameters in that part."""
        return list(zip(self.about["parts"], self.about["blocks"], strict=True))

    def _block(self, parameter: str, blocks: Mapping[str, Any]) -> Slice:
        return Slice(*blocks[parameter]) if parameter in blocks else self.slices[f"model/{parameter}"]

    def _read(self, name: str) -> Tensor:
        assert self.checkpoint is not None, "rank 0 reads"
        return self.checkpoint.read(f"{self.prefix}{name}")


def split_name(name: str) -> tuple[str, str, str]:
    """Return the kind, the parameter and the key of ``<kind>/<parameter>/<key>``."""
    kind, _, rest = name.partition("/")
    parameter, _, key = rest.rpartition("/")
    return kind, parameter, key


def _exchange(mine: Mapping[str, Slice], group: Group, name: str) -> dict[str, dict[int, Slice]]:
    """Return the slices of all ranks, by name and rank, in the same order on all ranks."""
    everybody = group.gather_documents(dict(mine), name=name)
    names = sorted({name for slices in everybody for name in slices})
    return {
        name: {rank: Slice(*slices[name]) for rank, slices in enumerate(everybody) if name in slices} for name in names
    }


class _TensorMoves(Generic[Key]):
    """Tensors on their way between pairs of ranks; every rank moves the same ones in the same order.

    A message waits for nobody but its two ranks, and some are under way at once.

    Args:
        group: The ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._under_way: list[Work] = []
        self._sent: list[Tensor] = []
        self._arriving: list[tuple[Key, Tensor]] = []
        self._num_bytes = 0

    def move(
        self, key: Key, tensor: Tensor | None, held: Slice, source: int, target: int
    ) -> Iterator[tuple[Key, Tensor]]:
        """Move rank `source`'s tensor to rank `target`; yield those that have arrived here by now, with their keys."""
        rank, group, name = self._group.rank, self._group, "slice of the state"
        if rank == source and tensor is not None and rank != target:
            content = _bytes_of(tensor.cpu().contiguous())
            self._sent.append(content)
            self._num_bytes += content.nbytes
            if content.numel():
                self._under_way.append(group.send(content, target, tag=0, name=name))
        if rank == target:
            arriving = held.make() if rank != source else tensor
            assert arriving is not None
            self._arriving.append((key, arriving))
            self._num_bytes += arriving.nbytes
            if rank != source and arriving.numel():
                self._under_way.append(group.receive(_bytes_of(arriving), source, tag=0, name=name))
        if self._num_bytes >= _UNDER_WAY_BYTES:
            yield from self.finish()

    def finish(self) -> Iterator[tuple[Key, Tensor]]:
        """Wait for all that are under way, and yield those that arrive here."""
        self._group.wait_for(self._under_way)
        arrived = self._arriving
        self._under_way, self._sent, self._arriving, self._num_bytes = [], [], [], 0
        yield from arrived


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes, since no backend knows every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
