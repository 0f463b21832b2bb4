"""One checkpoint: verified, described, and loaded into existing tensors."""

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.durable import open_regular
from paceline.checkpoint.manifest import (
    DOCUMENT_NAME,
    DTYPES,
    Chunk,
    DamagedError,
    Manifest,
    TensorFile,
    digest,
    read_manifest,
    read_part,
)
from paceline.checkpoint.storage import SafetensorsReader, load_tensors
from paceline.checkpoint.tensor_file import BUFFER_BYTES, digest_range
from paceline.errors import CheckpointError


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor in a checkpoint."""

    shape: torch.Size
    dtype: torch.dtype


class SavedState(Protocol):
    """What a state is restored from: a checkpoint on disk or in memory."""

    @property
    def path(self) -> Path:
        """Place that messages name."""

    @property
    def step(self) -> int:
        """Step after which it was saved."""

    def read_document(self) -> dict[str, Any]:
        """Return the document that was saved with the tensors."""

    def list_tensors(self) -> dict[str, TensorSpec]:
        """Return shape and dtype of every full tensor, by name."""

    def read(self, name: str) -> Tensor:
        """Return one full tensor, in host memory."""


class Checkpoint:
    """A committed checkpoint. All data read from it are checked against the digests computed at the save."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        """Record of all its parts."""

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Open the checkpoint in directory `path`. Only its manifest is read.

        Raises:
            CheckpointError: There is no checkpoint, it was never finished, or its manifest is damaged.
        """
        if not path.is_dir():
            raise CheckpointError(f"a checkpoint must be a directory, but got {path}; check the path")
        return cls(path, read_manifest(path))

    @property
    def step(self) -> int:
        """Step after which it was saved."""
        return self.manifest.step

    @property
    def num_bytes(self) -> int:
        """Size on disk, without the manifest."""
        return self.manifest.num_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of these that were not written for it, but are shared with earlier checkpoints."""
        return self.manifest.shared_bytes

    def verify(self) -> None:
        """Read all that it needs and compare it with its digests: at the disk's speed, or about 4 GB/s from memory.

        Raises:
            DamagedError: A part is missing, too short, or differs from what was written.
        """
        self._read_document_bytes()
        chunks: defaultdict[str, list[tuple[str, Chunk]]] = defaultdict(list)
        for name, tensor in self.manifest.tensors.items():
            for chunk in tensor.chunks:
                chunks[chunk.file].append((name, chunk))
        buffer = memoryview(bytearray(BUFFER_BYTES))
        for file in self.manifest.files:
            try:
                self._verify_file(file, chunks[file.name], buffer)
            except FileNotFoundError:
                raise DamagedError(self.path, f"{file.name} is missing") from None
            except OSError as error:
                raise DamagedError(self.path, f"{file.name} cannot be read: {error.strerror}") from error

    def _verify_file(self, file: TensorFile, chunks: list[tuple[str, Chunk]], buffer: memoryview) -> None:
        with open_regular(self.path / file.name) as handle:
            num_bytes = os.fstat(handle.fileno()).st_size
            if num_bytes != file.num_bytes:
                raise DamagedError(self.path, f"{file.name} has {num_bytes} bytes instead of {file.num_bytes}")
            if digest_range(handle, 0, file.header_bytes, buffer) != file.header_digest:
                raise DamagedError(self.path, f"the header of {file.name} does not match its digest")
            for name, chunk in sorted(chunks, key=lambda pair: pair[1].start):
                if digest_range(handle, chunk.start, chunk.num_bytes, buffer) != chunk.digest:
                    raise DamagedError(self.path, f"tensor {name!r} in {file.name} does not match its digest")

    def read_document(self) -> dict[str, Any]:
        """Return the document that was saved with the tensors.

        Raises:
            DamagedError: The document is missing, or differs from what was written.
        """
        document = json.loads(self._read_document_bytes())
        assert isinstance(document, dict)
        return document

    def _read_document_bytes(self) -> bytes:
        content = read_part(self.path, DOCUMENT_NAME)
        if digest(content) != self.manifest.document_digest:
            raise DamagedError(self.path, f"{DOCUMENT_NAME} does not match its digest")
        return content

    def list_tensors(self) -> dict[str, TensorSpec]:
        """Return shape and dtype of every tensor, by name; for sharded tensors those of the full tensor."""
        return {
            name: TensorSpec(torch.Size(tensor.shape), DTYPES[tensor.dtype])
            for name, tensor in self.manifest.tensors.items()
        }

    def digests(self, name: str) -> dict[tuple[tuple[int, ...], tuple[int, ...]], str]:
        """Return the digests of a tensor's chunks, by offsets and shape."""
        return {(chunk.offsets, chunk.shape): chunk.digest for chunk in self.manifest.tensors[name].chunks}

    def read(self, name: str) -> Tensor:
        """Return one full tensor, in host memory.

        Raises:
            DamagedError: The data differ from what was written.
        """
        stored = self.manifest.tensors[name]
        tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        load_tensors({name: tensor}, SafetensorsReader(self.path, self.manifest.keep_only(name)))
        return tensor

    def load(self, into: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Copy the saved values into the given tensors, in place, whatever their device.

        The tensors may be sharded differently from the saved ones (DTensor): each rank then loads its
        part, and need not wait for others. Every chunk is checked before it is copied; after an error some
        tensors may have been loaded and others not.

        Args:
            into: Tensors to load, by the names they were saved under.
            strict: Whether the checkpoint must hold no other tensors. All tensors of `into` must be in it in any case.

        Raises:
            CheckpointError: Tensors differ in name, shape or dtype; nothing was loaded.
            DamagedError: A chunk differs from what was written.
        """
        problems = self._compare(into, strict)
        if problems:
            shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            raise CheckpointError(
                f"checkpoint {self.path} must fit the tensors it is loaded into, but {shown}; "
                "load it into the model and optimizer that it was saved from"
            )
        load_tensors(into, SafetensorsReader(self.path, self.manifest))

    def _compare(self, into: Mapping[str, Tensor], strict: bool) -> list[str]:
        specs = self.list_tensors()
        problems = [f"{name!r} is not in it" for name in into if name not in specs]
        if strict:
            problems += [f"{name!r} is in it but not here" for name in specs if name not in into]
        for name, tensor in into.items():
            if name not in specs:
                continue
            assert not tensor.is_meta, f"{name} has no memory to load into"
            shape, dtype = specs[name]
            if tensor.shape != shape:
                problems.append(f"{name!r} has shape {tuple(shape)} in it and {tuple(tensor.shape)} here")
            if tensor.dtype != dtype:
                problems.append(f"{name!r} is {dtype} in it and {tensor.dtype} here")
        return problems
