"""Incremental checkpoints: what has not changed since the checkpoint before is shared with it, not written again.

Tensors are cut along their first dim into chunks of about `CHUNK_BYTES`, whose digests tell which have changed. An
unchanged chunk stays in the file that holds it, and the new checkpoint gets a hard link to that file,
``shared-00000.safetensors``. So every checkpoint is whole in its own directory: it is read and verified like any other,
it can be copied or moved, and removing another takes nothing from it. A linked file keeps its space as long as one
chunk in it is used, so that a full checkpoint from time to time bounds both the space and the checkpoints that one
damaged file spoils.
"""

import errno
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from paceline.checkpoint.durable import MARKER_NAME
from paceline.checkpoint.manifest import DTYPE_NAMES, MANIFEST_NAME, SHARED_PREFIX, Chunk, Manifest, TensorFile
from paceline.checkpoint.manifest import StoredTensor as Stored
from paceline.checkpoint.tensor_file import Entry, digest_tensor

CHUNK_BYTES = 2**18
"""Size of a chunk: finer ones find more that has not changed, in sparse embeddings, but lengthen the manifest."""
_UNLINKABLE = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.EACCES)
_PROBE = f"{SHARED_PREFIX}probe"


class Base:
    """The checkpoint before, with whose files a new one beside it may share chunks."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self._files = {file.name: file for file in manifest.files}
        self._chunks = {
            (name, stored.dtype, chunk.offsets, chunk.shape): chunk
            for name, stored in manifest.tensors.items()
            for chunk in stored.chunks
        }

    def sort_out(self, entries: Iterable[Entry]) -> tuple[list[Entry], list[tuple[Entry, Chunk]]]:
        """Return the entries that have changed; and the others, each with its chunk here: ``<directory>/<file>``."""
        changed, unchanged = [], []
        for entry in entries:
            chunk = self._chunks.get((entry.name, DTYPE_NAMES[entry.dtype], entry.offsets, entry.shape))
            found = digest_tensor(entry.resolve()) if chunk is not None else ""
            if chunk is not None and chunk.digest == found:
                unchanged.append((entry, chunk.model_copy(update={"file": f"{self.directory.name}/{chunk.file}"})))
            else:
                changed.append(replace(entry, digest=found))
        return changed, unchanged

    def link(self, directory: Path, tensors: Mapping[str, Stored]) -> tuple[list[TensorFile], dict[str, Stored]]:
        """Link the files whose chunks are shared into `directory`; return their records, and the tensors with them.

        Raises:
            OSError: A file is gone, or another failure of the file system.
        """
        mark = f"{self.directory.name}/"
        used = {chunk.file for stored in tensors.values() for chunk in stored.chunks if chunk.file.startswith(mark)}
        names = {file: f"{SHARED_PREFIX}{number:05d}.safetensors" for number, file in enumerate(sorted(used))}
        for file, name in names.items():
            os.link(directory.parent / file, directory / name)
        records = [self._files[file.removeprefix(mark)].model_copy(update={"name": names[file]}) for file in names]
        return records, {name: _rename(stored, names) for name, stored in tensors.items()}


def can_share(base: Path, directory: Path) -> bool:
    """Return whether a new checkpoint can share files with `base`; warn where the file system has no hard links."""
    try:
        os.link(base / MANIFEST_NAME, directory / _PROBE)
        os.unlink(directory / _PROBE)
    except FileNotFoundError:
        return False  # someone has removed it
    except OSError as error:
        if error.errno not in _UNLINKABLE:
            raise
        warnings.warn(
            f"{directory.parent} has no hard links ({error.strerror}), so that each checkpoint there is written in "
            "full; leave incremental checkpoints out to silence this",
            stacklevel=2,
        )
        return False
    return (base / MARKER_NAME).exists()


def cut(entries: Iterable[Entry], chunk_bytes: int = CHUNK_BYTES) -> Iterator[Entry]:
    """Yield the chunks of entries: rows of about `chunk_bytes`, or one row that is larger."""
    for entry in entries:
        num_rows = entry.shape[0] if entry.shape else 1
        rows = max(1, chunk_bytes * num_rows // max(1, entry.num_bytes))
        if rows >= num_rows:
            yield entry
            continue
        for first in range(0, num_rows, rows):
            yield _cut_rows(entry, first, min(rows, num_rows - first))


def find_independent(newest: Path, others: Sequence[Path]) -> Path | None:
    """Return the first of `others` that shares no file with `newest`; None if all do."""
    mine = _inodes(newest)
    return next((path for path in others if not mine & _inodes(path)), None)


def _inodes(directory: Path) -> set[int]:
    return {file.stat().st_ino for file in directory.glob("*.safetensors")}


def _cut_rows(entry: Entry, first: int, count: int) -> Entry:
    def resolve() -> Tensor:
        return entry.resolve()[first : first + count]

    offsets = (entry.offsets[0] + first, *entry.offsets[1:])
    return replace(entry, offsets=offsets, shape=(count, *entry.shape[1:]), is_whole=False, resolve=resolve)


def _rename(stored: Stored, names: Mapping[str, str]) -> Stored:
    chunks = tuple(
        chunk.model_copy(update={"file": names[chunk.file]}) if chunk.file in names else chunk
        for chunk in stored.chunks
    )
    return stored.model_copy(update={"chunks": chunks})
