"""One file of tensors, in the safetensors format, written and read one buffer at a time.

The format: the length of the header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, offsets),
then the bytes of the tensors one after the other. The safetensors library reads these files. It is not used
to write them, because it needs all tensors of a file in CPU memory at once and a second pass for the digests;
nor to read them, because it maps them into memory, where a disk error ends the process (SIGBUS) instead of
raising.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Size, Tensor

from paceline.checkpoint.manifest import DTYPE_NAMES, DTYPES, Chunk, TensorFile, digest
from paceline.errors import CheckpointError

BUFFER_BYTES = 2**24  # large, so that hashing and writing seldom ask for the interpreter's lock while training runs


@dataclass(frozen=True)
class Entry:
    """A block of a tensor to write."""

    name: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    is_whole: bool
    """Whether the block is the whole tensor."""
    resolve: Callable[[], Tensor]
    """Function that returns the data; called only when they are written, since it may need memory."""
    digest: str = ""
    """Digest of the data, if it is known already."""

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def split_entries(entries: Sequence[Entry], max_file_bytes: int) -> Iterator[list[Entry]]:
    """Yield the entries of one file after another; one beyond `max_file_bytes` has its own file."""
    part: list[Entry] = []
    part_bytes = 0
    # Wide elements first keeps every tensor of a file aligned, as readers that map files into memory expect.
    for entry in sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name, entry.offsets)):
        if part and part_bytes + entry.num_bytes > max_file_bytes:
            yield part
            part, part_bytes = [], 0
        part.append(entry)
        part_bytes += entry.num_bytes
    if part:
        yield part


def write_tensor_file(
    path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None
) -> tuple[TensorFile, list[Chunk]]:
    """Write a new file durably; return its record and those of its chunks, in the order of `entries`.

    Args:
        path: Path of the new file.
        entries: Tensors to write.
        metadata: Additional texts in the header.

    Raises:
        OSError: The disk is full, or another failure of the file system.
    """
    header = _header(entries, metadata or {})
    chunks = []
    with open(path, "xb") as file:
        file.write(header)
        for entry in entries:
            start = file.tell()
            hasher = None if entry.digest else blake3(max_threads=1)
            for part in byte_slices(entry.resolve()):
                if hasher is not None:
                    hasher.update(part)
                file.write(part)
            assert file.tell() - start == entry.num_bytes, f"{entry.name} changed while it was saved"
            chunks.append(
                Chunk(
                    offsets=entry.offsets,
                    shape=entry.shape,
                    file=path.name,
                    start=start,
                    num_bytes=entry.num_bytes,
                    digest=hasher.hexdigest() if hasher is not None else entry.digest,
                )
            )
        num_bytes = file.tell()
        file.flush()
        os.fsync(file.fileno())
    record = TensorFile(name=path.name, num_bytes=num_bytes, header_bytes=len(header), header_digest=digest(header))
    return record, chunks


def digest_tensor(tensor: Tensor) -> str:
    """Return the digest of a tensor's data, as a chunk of it has in a file."""
    hasher = blake3(max_threads=1)
    for part in byte_slices(tensor):
        hasher.update(part)
    return hasher.hexdigest()


def digest_range(file: FileIO, start: int, num_bytes: int, buffer: memoryview) -> str:
    """Return the digest of part of a file, read through `buffer`.

    A buffer of `num_bytes` holds the part afterwards; a shorter one is reused. If the file is
    too short, the digest is that of the bytes that exist.
    """
    file.seek(start)
    hasher = blake3(max_threads=1)
    done = 0
    while done < num_bytes:
        position = done % len(buffer)
        part = buffer[position : position + min(BUFFER_BYTES, num_bytes - done)]
        count = file.readinto(part)
        if not count:
            break
        hasher.update(part[:count])
        done += count
    return hasher.hexdigest()


class StoredBlock(NamedTuple):
    """Where a tensor is in a file, and what it looks like."""

    shape: Size
    dtype: torch.dtype
    start: int
    """Offset of its first byte in the file."""


def read_header(path: Path) -> dict[str, StoredBlock]:
    """Return the tensors of a file that anything may have written, by name.

    Raises:
        CheckpointError: The file cannot be read, or is in another format.
    """
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            fields = json.loads(file.read(length))
        fields.pop("__metadata__", None)
        blocks = {
            name: StoredBlock(Size(field["shape"]), DTYPES[field["dtype"]], 8 + length + field["data_offsets"][0])
            for name, field in fields.items()
        }
        ends = [block.start + block.shape.numel() * block.dtype.itemsize for block in blocks.values()]
        is_whole = max(ends, default=8 + length) <= path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} must be readable, but: {error.strerror}; check the path") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"{path} must be a file of safetensors, but its header cannot be read ({error})"
        ) from error
    if not is_whole:
        raise CheckpointError(f"{path} must hold the tensors that its header lists, but it is cut short; copy it again")
    return blocks


def read_block(path: Path, block: StoredBlock) -> Tensor:
    """Return a tensor of a file, in host memory."""
    tensor = torch.empty(block.shape, dtype=block.dtype)
    if tensor.numel():
        with open(path, "rb") as file:
            file.seek(block.start)
            num_read = file.readinto(tensor.view(-1).view(torch.uint8).numpy().data)
        if num_read < tensor.nbytes:
            raise CheckpointError(f"{path} must stay as it is while it is read, but it has become shorter")
    return tensor


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for entry in entries:
        key = entry.name if entry.is_whole else f"{entry.name}@{','.join(map(str, entry.offsets))}"
        while key in fields or key == "__metadata__":  # a reserved name of the format
            key += "'"
        fields[key] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (position, position + entry.num_bytes),
        }
        position += entry.num_bytes
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def byte_slices(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's data as bytes in host memory, in slices of `BUFFER_BYTES`."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    slice_length = BUFFER_BYTES // flat.element_size()
    for start in range(0, len(flat), slice_length):
        yield flat[start : start + slice_length].cpu().view(torch.uint8).numpy().data
