"""Checkpoints in a store beside those on disk: what a machine that is lost cannot take with it.

files/DIGEST                the content of a tensor file, once, however many checkpoints share it
step-00000123/state.json    the other files of a checkpoint, as on disk
step-00000123/files.json    digest and size of each tensor file, by its name
step-00000123/COMMITTED     written last
"""

import json
import os
import warnings
from pathlib import Path
from typing import Any

from blake3 import blake3

from paceline.checkpoint.durable import MARKER_NAME, remove_checkpoint, write_marker
from paceline.checkpoint.manifest import DIRECTORY_NAME, DOCUMENT_NAME, MANIFEST_NAME, DamagedError
from paceline.data.storage import StoreSettings, open_store
from paceline.errors import CheckpointError, DataError, StorageError, storing

FILES_NAME = "files.json"
_PIECE_BYTES = 8 * 2**20


class MirrorWarning(UserWarning):
    """A checkpoint is on disk, but could not be written to its store."""


class CheckpointMirror:
    """Copies of a run's checkpoints at a path or URL.

    Args:
        url: Folder of a store, for this run alone.
        settings: Time limits of the store.
    """

    def __init__(self, url: str, settings: StoreSettings | None = None) -> None:
        self.url = url
        self._storage = open_store(url, settings)
        self._digests: dict[tuple[int, int, int], str] = {}
        """Digest of each tensor file, by device, inode and time of change: links to one file have all in common."""

    def upload(self, directory: Path, keep: int | None) -> None:
        """Copy a committed checkpoint, then remove those beyond `keep`; a failure is a warning: the disk has it.

        Args:
            directory: Directory of the checkpoint.
            keep: Number of newest checkpoints to keep; None for all.
        """
        try:
            self._upload(directory)
            if keep is not None:
                self._prune(keep)
        except (StorageError, DataError) as error:
            warnings.warn(
                f"checkpoint {directory} is not in {self.url}: {error}; the next save tries again",
                MirrorWarning,
                stacklevel=3,
            )

    def list_names(self) -> list[str]:
        """Return the names of all complete checkpoints, the newest first.

        Raises:
            StorageError: The store cannot be reached.
        """
        found = []
        for file in self._storage.list_files("step-"):
            name, _, rest = file.path.partition("/")
            if rest == MARKER_NAME and (match := DIRECTORY_NAME.fullmatch(name)):
                found.append((int(match[1]), int(match[2] or 1), name))
        return [name for *_, name in sorted(found, reverse=True)]

    def read_marker(self, name: str) -> bytes:
        """Return the commit marker of a checkpoint, which holds the digest of its other files.

        Raises:
            DataError: The marker is missing.
            StorageError: The store cannot be reached.
        """
        return self._storage.read(f"{name}/{MARKER_NAME}")

    def download(self, name: str, folder: Path) -> Path:
        """Copy a checkpoint into a folder of this machine, and return its directory there.

        Raises:
            DamagedError: A file is missing, or is not what was written.
            StorageError: The store cannot be reached, or the disk is full.
        """
        directory = folder / name
        try:
            with storing(directory):
                if directory.exists():
                    remove_checkpoint(directory)
                directory.mkdir(parents=True, exist_ok=True)
                for file, record in json.loads(self._storage.read(f"{name}/{FILES_NAME}")).items():
                    self._download_file(directory / Path(file).name, record["digest"], record["num_bytes"])
                for part in (DOCUMENT_NAME, MANIFEST_NAME):
                    (directory / part).write_bytes(self._storage.read(f"{name}/{part}"))
                write_marker(directory, self._storage.read(f"{name}/{MARKER_NAME}"))
        except (DataError, ValueError, KeyError) as error:
            raise DamagedError(directory, f"its copy in {self.url} cannot be read: {error}") from error
        return directory

    def _upload(self, directory: Path) -> None:
        known = {file.path for file in self._storage.list_files("files/")}
        records: dict[str, Any] = {}
        for file in sorted(directory.glob("*.safetensors")):
            digest = self._digest(file)
            records[file.name] = {"digest": digest, "num_bytes": file.stat().st_size}
            if f"files/{digest}" not in known:
                self._storage.write_from(f"files/{digest}", file)
        for part in (DOCUMENT_NAME, MANIFEST_NAME):
            self._storage.write_from(f"{directory.name}/{part}", directory / part)
        self._storage.write(f"{directory.name}/{FILES_NAME}", json.dumps(records).encode())
        self._storage.write_from(f"{directory.name}/{MARKER_NAME}", directory / MARKER_NAME)

    def _prune(self, keep: int) -> None:
        """Remove the oldest checkpoints, their markers first, and the tensor files that no other one has."""
        names = self.list_names()
        if len(names) <= keep:
            return
        self._storage.remove([f"{name}/{MARKER_NAME}" for name in names[keep:]])
        used = {
            f"files/{record['digest']}"
            for name in names[:keep]
            for record in json.loads(self._storage.read(f"{name}/{FILES_NAME}")).values()
        }
        for name in names[keep:]:
            self._storage.remove([f"{name}/{part}" for part in (FILES_NAME, MANIFEST_NAME, DOCUMENT_NAME)])
        self._storage.remove([file.path for file in self._storage.list_files("files/") if file.path not in used])

    def _digest(self, file: Path) -> str:
        status = file.stat()
        identity = status.st_dev, status.st_ino, status.st_mtime_ns
        if identity not in self._digests:
            digest = blake3()
            with file.open("rb") as opened:
                while piece := opened.read(_PIECE_BYTES):
                    digest.update(piece)
            self._digests[identity] = digest.hexdigest()
        return self._digests[identity]

    def _download_file(self, target: Path, wanted: str, num_bytes: int) -> None:
        digest = blake3()
        with target.open("wb") as file:
            for start in range(0, num_bytes, _PIECE_BYTES):
                piece = self._storage.read(f"files/{wanted}", start, min(_PIECE_BYTES, num_bytes - start))
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != wanted:
            raise DataError(f"{self.url}/files/{wanted} has another digest")


def fetch_newest(mirror: CheckpointMirror, folder: Path, newest_here: Path | None) -> None:
    """Bring the newest whole checkpoint of a store to this machine, if there is a newer one than here.

    Raises:
        CheckpointError: The store cannot be reached: nobody knows whether it has a newer one.
    """
    here = _age(newest_here.name) if newest_here is not None else (-1, 0)
    try:
        for name in mirror.list_names():
            if _age(name) <= here:
                return
            try:
                mirror.download(name, folder)
                return
            except DamagedError as error:
                warnings.warn(f"{error}", MirrorWarning, stacklevel=3)
    except (StorageError, DataError) as error:
        raise CheckpointError(
            f"checkpoints in {mirror.url} must be reachable when a run starts, but: {error}; or leave it out"
        ) from error


def _age(name: str) -> tuple[int, int]:
    match = DIRECTORY_NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)
