"""The parts of a checkpoint, each with its path, size and digest, as JSON.

    step-00000123/
        tensors-00000-00000.safetensors   entries of one rank, <rank>-<part>
        shared-00000.safetensors          link to a file of an earlier checkpoint: see `incremental`
        state.json                        the document: everything that is not a tensor
        manifest.json                     `Manifest`
        COMMITTED                         written last: step, and the digest of manifest.json

Digests are BLAKE3. The marker holds the manifest's digest, the manifest holds those of every byte of all other
files, and the marker itself must match its step and digest exactly, so that no byte can change unnoticed.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.checkpoint.durable import MARKER_NAME, open_regular, write_file, write_marker
from paceline.errors import CheckpointError

FORMAT = 1
DOCUMENT_NAME = "state.json"
MANIFEST_NAME = "manifest.json"
SHARED_PREFIX = "shared-"
DIRECTORY_NAME = re.compile(r"step-(\d{8,})(?:-([2-9]|[1-9]\d+))?")
"""Name of a checkpoint's directory: its step, and which of that step it is, from the second on."""

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Dtypes that a checkpoint can hold, by their names in the safetensors format."""
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class DamagedError(CheckpointError):
    """A checkpoint is incomplete, or differs from what was written."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)  # as arguments, so that it can be pickled between ranks
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"checkpoint {self.path} must be whole, but {self.reason}; load another one"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Chunk(_Record):
    """A block of a tensor, stored as one entry of a file."""

    offsets: tuple[int, ...]
    """Index of the block's first element in the tensor, along each dim."""
    shape: tuple[int, ...]
    file: str
    start: int
    """Offset of its bytes in the file."""
    num_bytes: int
    digest: str


class StoredTensor(_Record):
    """A tensor and the blocks that tile it: its sharding over the ranks that saved it."""

    dtype: str
    """Key of `DTYPES`."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class TensorFile(_Record):
    """A safetensors file: a header, then the bytes of its chunks without a gap."""

    name: str
    num_bytes: int
    header_bytes: int
    """Number of bytes before the chunks."""
    header_digest: str


class Manifest(_Record):
    """All parts of one checkpoint."""

    format: int
    step: int
    document_bytes: int
    document_digest: str
    files: tuple[TensorFile, ...]
    tensors: dict[str, StoredTensor]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor files and the document."""
        return self.document_bytes + sum(file.num_bytes for file in self.files)

    @property
    def shared_bytes(self) -> int:
        """Size of those tensor files that were linked, not written."""
        return sum(file.num_bytes for file in self.files if file.name.startswith(SHARED_PREFIX))

    def keep_only(self, name: str) -> "Manifest":
        """Return a manifest of one of the tensors."""
        return self.model_copy(update={"tensors": {name: self.tensors[name]}})


def digest(content: bytes) -> str:
    """Return the BLAKE3 digest of `content`."""
    return blake3(content).hexdigest()


def commit(directory: Path, manifest: Manifest) -> None:
    """Write manifest and marker: from then on, the checkpoint in `directory` is committed."""
    content = manifest.model_dump_json().encode()
    write_file(directory / MANIFEST_NAME, content)
    write_marker(directory, _marker(manifest.step, digest(content)))


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a committed checkpoint.

    Raises:
        DamagedError: There is no marker (the save never finished), or marker, manifest and the directory's name do not
            match.
    """
    try:
        with open_regular(directory / MARKER_NAME) as file:
            marker = file.readall()
    except FileNotFoundError:
        raise DamagedError(directory, "it was never finished") from None
    except OSError as error:
        raise DamagedError(directory, f"{MARKER_NAME} cannot be read: {error.strerror}") from error
    try:
        claim = json.loads(marker)
        version, step = claim["format"], claim["step"]
    except (ValueError, KeyError, TypeError):
        raise DamagedError(directory, f"{MARKER_NAME} is damaged") from None
    if version != FORMAT:
        raise DamagedError(directory, f"{MARKER_NAME} says format {version!r}, and this version reads {FORMAT}")
    content = read_part(directory, MANIFEST_NAME)
    if marker != _marker(step, digest(content)):
        raise DamagedError(directory, f"{MANIFEST_NAME} does not match the digest in {MARKER_NAME}")
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        raise DamagedError(directory, f"{MANIFEST_NAME} cannot be parsed: {error}") from error
    if manifest.step != step:
        raise DamagedError(directory, f"{MARKER_NAME} says step {step!r} and {MANIFEST_NAME} {manifest.step}")
    named = DIRECTORY_NAME.fullmatch(directory.name)
    if named and int(named[1]) != step:
        raise DamagedError(directory, f"its name says step {int(named[1])} and {MANIFEST_NAME} {step}")
    _check_names(directory, manifest)
    return manifest


def _check_names(directory: Path, manifest: Manifest) -> None:
    """Refuse a manifest that leads out of its checkpoint: its digests tell nothing of who wrote it."""
    names = {file.name for file in manifest.files}
    foreign = {name for name in names if Path(name).name != name}
    foreign |= {chunk.file for tensor in manifest.tensors.values() for chunk in tensor.chunks} - names
    if foreign:
        raise DamagedError(directory, f"{MANIFEST_NAME} names {min(foreign)!r}, which is none of its files")


def read_part(directory: Path, name: str) -> bytes:
    """Return the content of a small file of a checkpoint."""
    try:
        with open_regular(directory / name) as file:
            return file.readall()
    except FileNotFoundError:
        raise DamagedError(directory, f"{name} is missing") from None
    except OSError as error:
        raise DamagedError(directory, f"{name} cannot be read: {error.strerror}") from error


def _marker(step: int, manifest_digest: str) -> bytes:
    return f"{json.dumps({'format': FORMAT, 'step': step, 'manifest': manifest_digest})}\n".encode()
