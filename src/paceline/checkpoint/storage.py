"""Storage for the planners of torch.distributed.checkpoint, which know how to shard and reshard.

A checkpoint written by any number of ranks is loaded by any other number, into tensors or DTensors. Torch 2.13's
own storage is not used: it does not notice changed bits, unpickles its metadata and overwrites in
place.
"""

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from paceline.checkpoint.durable import open_regular, write_file
from paceline.checkpoint.incremental import Base, cut
from paceline.checkpoint.manifest import (
    DOCUMENT_NAME,
    DTYPE_NAMES,
    DTYPES,
    FORMAT,
    Chunk,
    DamagedError,
    Manifest,
    StoredTensor,
    TensorFile,
    commit,
    digest,
    read_manifest,
)
from paceline.checkpoint.tensor_file import Entry, digest_range, split_entries, write_tensor_file
from paceline.errors import CheckpointError

_PathOrStr = str | os.PathLike[str] | None


class SafetensorsWriter(StorageWriter):
    """Writes one checkpoint into an empty directory; the coordinator commits it when every rank has written.

    Memory beside the tensors: a buffer of 16 MiB, or a copy of the one tensor being written if it is not
    contiguous.
    """

    def __init__(
        self,
        directory: Path,
        document: bytes,
        step: int,
        max_file_bytes: int = 2**30,
        chunk_bytes: int | None = None,
        base: Base | None = None,
    ) -> None:
        """Make a writer.

        Args:
            directory: Empty directory of the checkpoint.
            document: Encoded document.
            step: Step after which it is saved.
            max_file_bytes: Size of a file, unless one tensor is larger.
            chunk_bytes: Size of the chunks that tensors are cut into; None for one chunk per tensor and rank.
            base: Checkpoint that unchanged chunks are shared with; see `incremental`.
        """
        self.directory = directory
        self.max_file_bytes = max_file_bytes
        self.chunk_bytes = chunk_bytes
        self._base = base
        self._document = document
        self._step = step
        self._rank = 0

    def reset(self, checkpoint_id: _PathOrStr = None) -> None:
        """Do nothing: a writer writes only the checkpoint it was made for."""
        assert checkpoint_id is None, "the directory is given to the constructor"

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set this process's rank, which is part of its file names."""
        self._rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse tensors that cannot be stored, before anything is written."""
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} must be a tensor"
            properties = item.tensor_data.properties
            if properties.layout is not torch.strided or properties.dtype not in DTYPE_NAMES:
                raise CheckpointError(
                    f"tensor {item.index.fqn!r} must be dense and of a dtype that safetensors knows, but got "
                    f"{properties.dtype} ({properties.layout}); convert it"
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans: ranks write to separate files, so there is nothing to agree on."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, durably."""
        entries = [_to_entry(item, planner) for item in plan.items]
        files, chunks = _write_entries(
            self.directory, self._rank, entries, self.max_file_bytes, self.chunk_bytes, self._base
        )
        results = [WriteResult(MetadataIndex(file.name), file.num_bytes, file) for file in files]
        for entry, chunk in chunks:
            results.append(WriteResult(MetadataIndex(entry.name, entry.offsets), chunk.num_bytes, chunk))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write document, manifest and commit marker, in this order."""
        chunks = defaultdict(list)
        files = []
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result.storage_data, TensorFile):
                files.append(result.storage_data)
            else:
                chunks[result.index.fqn].append(result.storage_data)
        tensors = {}
        for name, tensor in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(tensor, TensorStorageMetadata)
            tensors[name] = _join(name, tensor.size, tensor.properties.dtype, chunks[name])
        finish(self.directory, self._document, self._step, files, tensors, self._base)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` could be a directory to write to: never, see `reset`."""
        return False


class TensorBlock(NamedTuple):
    """A block of a tensor of which other processes may save the rest."""

    tensor: Tensor
    """Values of the block."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Index of the block's first element in the whole tensor."""


class WrittenBlocks(NamedTuple):
    """The files of one process, and its blocks in them."""

    files: list[TensorFile]
    chunks: list[tuple[str, tuple[int, ...], torch.dtype, Chunk]]
    """Name, whole shape, dtype and record of each block."""


def _write_entries(
    directory: Path,
    rank: int,
    entries: Sequence[Entry],
    max_file_bytes: int,
    chunk_bytes: int | None,
    base: Base | None,
) -> tuple[list[TensorFile], list[tuple[Entry, Chunk]]]:
    """Write a rank's entries into its own files; return their records, and all chunks, shared ones among them."""
    if chunk_bytes is not None:
        entries = list(cut(entries, chunk_bytes))
    changed, found = base.sort_out(entries) if base is not None else (entries, [])
    files = []
    for part, some in enumerate(split_entries(changed, max_file_bytes)):
        file, chunks = write_tensor_file(directory / f"tensors-{rank:05d}-{part:05d}.safetensors", some)
        files.append(file)
        found.extend(zip(some, chunks, strict=True))
    return files, found


def write_blocks(
    directory: Path,
    rank: int,
    blocks: Mapping[str, Sequence[TensorBlock]],
    max_file_bytes: int = 2**30,
    chunk_bytes: int | None = None,
    base: Base | None = None,
) -> WrittenBlocks:
    """Write a process's blocks of tensors into its own files in a directory that the processes share, durably.

    Raises:
        OSError: The disk is full, or another failure of the file system.
        CheckpointError: A tensor is of a dtype that cannot be stored.
    """
    entries = [_check_dtype(_block_entry(name, block)) for name, parts in blocks.items() for block in parts]
    wholes = {name: parts[0].whole for name, parts in blocks.items() if parts}
    files, chunks = _write_entries(directory, rank, entries, max_file_bytes, chunk_bytes, base)
    return WrittenBlocks(files, [(entry.name, wholes[entry.name], entry.dtype, chunk) for entry, chunk in chunks])


def finish_blocks(
    directory: Path, document: bytes, step: int, written: Sequence[WrittenBlocks], base: Base | None = None
) -> None:
    """Commit a checkpoint whose blocks all processes have written.

    Raises:
        CheckpointError: A tensor is not complete.
    """
    found: defaultdict[str, list[Chunk]] = defaultdict(list)
    specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, whole, dtype, chunk in (record for one in written for record in one.chunks):
        found[name].append(chunk)
        specs[name] = whole, dtype
    tensors = {name: _join(name, torch.Size(specs[name][0]), specs[name][1], found[name]) for name in sorted(found)}
    finish(directory, document, step, [file for one in written for file in one.files], tensors, base)


def finish(
    directory: Path,
    document: bytes,
    step: int,
    files: Sequence[TensorFile],
    tensors: Mapping[str, StoredTensor],
    base: Base | None = None,
) -> None:
    """Link shared files, then write document, manifest and commit marker, in this order."""
    if base is not None:
        shared, tensors = base.link(directory, tensors)
        files = [*files, *shared]
    write_file(directory / DOCUMENT_NAME, document)
    manifest = Manifest(
        format=FORMAT,
        step=step,
        document_bytes=len(document),
        document_digest=digest(document),
        files=tuple(files),
        tensors=dict(tensors),
    )
    commit(directory, manifest)


class SafetensorsReader(StorageReader):
    """Reads a checkpoint, checking each chunk against its digest before any of it reaches a tensor.

    A rank that needs a part of a chunk reads all of it. Memory: the largest chunk.
    """

    def __init__(self, directory: Path, manifest: Manifest | None = None) -> None:
        self.directory = directory
        self._manifest = manifest

    @property
    def manifest(self) -> Manifest:
        """Parts of the checkpoint; read on first use."""
        if self._manifest is None:
            self._manifest = read_manifest(self.directory)
        return self._manifest

    def reset(self, checkpoint_id: _PathOrStr = None) -> None:
        """Do nothing: a reader reads only the checkpoint it was made for."""
        assert checkpoint_id is None, "the directory is given to the constructor"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest as the planners' metadata."""
        tensors = {name: _to_metadata(tensor) for name, tensor in self.manifest.tensors.items()}
        return Metadata(dict(tensors))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: every rank reads for itself."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and check every chunk that the plan needs once, and copy the requested parts from it.

        Raises:
            DamagedError: A chunk differs from what was written.
        """
        requests: defaultdict[tuple[str, tuple[int, ...]], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR
            assert item.storage_index.offset is not None
            requests[item.storage_index.fqn, tuple(item.storage_index.offset)].append(item)
        wanted = [
            (name, tensor.dtype, chunk)
            for name, tensor in self.manifest.tensors.items()
            for chunk in tensor.chunks
            if (name, chunk.offsets) in requests
        ]
        buffer = torch.empty(max((chunk.num_bytes for *_, chunk in wanted), default=0), dtype=torch.uint8)
        for name, dtype, chunk in wanted:
            content = buffer[: chunk.num_bytes]
            self._read(name, chunk, content)
            _copy(content.view(DTYPES[dtype]).view(chunk.shape), requests[name, chunk.offsets], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, name: str, chunk: Chunk, content: Tensor) -> None:
        try:
            with open_regular(self.directory / chunk.file) as file:
                found = digest_range(file, chunk.start, chunk.num_bytes, content.numpy().data)
        except OSError as error:
            raise DamagedError(self.directory, f"{chunk.file} cannot be read: {error.strerror}") from error
        if found != chunk.digest:
            raise DamagedError(self.directory, f"tensor {name!r} in {chunk.file} does not match its digest")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` could be a directory to read from: never, see `reset`."""
        return False


def save_tensors(tensors: Mapping[str, Tensor], writer: StorageWriter, process_group: ProcessGroup | None) -> None:
    """Save through `writer`: together with the other ranks of `process_group`, or as one process alone.

    For one process, the planner's steps are called here one by one: `torch.distributed.checkpoint.save` warns every
    time that there is no process group, and wraps a full disk into an exception that `except Exception` does
    not catch.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    if process_group is not None:
        save(dict(tensors), storage_writer=writer, planner=planner, process_group=process_group)
        return
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


def load_tensors(tensors: Mapping[str, Tensor], reader: StorageReader) -> None:
    """Load into `tensors`, in place. Each rank reads independently, so there is no process group to name."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    (plan,) = reader.prepare_global_plan(plans)
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _to_entry(item: WriteItem, planner: SavePlanner) -> Entry:
    data = item.tensor_data
    assert data is not None

    def resolve() -> Tensor:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        return tensor

    return Entry(
        name=item.index.fqn,
        dtype=data.properties.dtype,
        offsets=tuple(data.chunk.offsets),
        shape=tuple(data.chunk.sizes),
        is_whole=data.chunk.sizes == data.size,
        resolve=resolve,
    )


def _block_entry(name: str, block: TensorBlock) -> Entry:
    shape = tuple(block.tensor.shape)
    return Entry(name, block.tensor.dtype, block.offsets, shape, shape == block.whole, resolve=lambda: block.tensor)


def _check_dtype(entry: Entry) -> Entry:
    if entry.dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"tensor {entry.name!r} must be of a dtype that safetensors knows, but got {entry.dtype}; convert it"
        )
    return entry


def _join(name: str, size: torch.Size, dtype: torch.dtype, chunks: Sequence[Chunk]) -> StoredTensor:
    num_elements = sum(math.prod(chunk.shape) for chunk in chunks)
    if num_elements != size.numel():
        raise CheckpointError(
            f"tensor {name!r} must be saved whole, but got {num_elements} of {size.numel()} elements; "
            "save from all ranks that hold a shard of it, with their process group"
        )
    return StoredTensor(dtype=DTYPE_NAMES[dtype], shape=tuple(size), chunks=tuple(chunks))


def _to_metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in tensor.chunks]
    return TensorStorageMetadata(TensorProperties(DTYPES[tensor.dtype]), torch.Size(tensor.shape), chunks)


def _copy(content: Tensor, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    for item in items:
        source = content
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dim, offset, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(source)
        planner.commit_tensor(item, target)
