"""A storage whose blocks are compared with their digests when they are first touched."""

import threading
from collections.abc import Sequence

from blake3 import blake3

from paceline.data.formats.manifest import BLOCK_BYTES, DataManifest
from paceline.data.storage import FileInfo, Storage
from paceline.data.storage.base import Locate, Upcoming
from paceline.errors import DataError


class VerifiedStorage(Storage):
    """Files of another storage, compared with a manifest.

    A range touches whole blocks of 1 MiB. The first touch of a block by this process reads and compares all of it;
    later ones read what is asked for. Each process so reads the data once more, beside the training.

    Args:
        storage: Storage of the files.
        manifest: Digests of the files' blocks.
    """

    def __init__(self, storage: Storage, manifest: DataManifest) -> None:
        self._storage, self._manifest = storage, manifest
        self._sizes = {file.path: file.num_bytes for file in manifest.files}
        self._verified: dict[str, bytearray] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Path or URL of the root."""
        return self._storage.url

    def list_files(self, prefix: str = "") -> list[FileInfo]:
        """Return the files whose path begins with `prefix`."""
        return self._storage.list_files(prefix)

    def find(self, path: str) -> FileInfo | None:
        """Return a file; None if there is none."""
        return self._storage.find(path)

    def read(self, path: str, start: int = 0, num_bytes: int | None = None, *, version: str = "") -> bytes:
        """Return bytes of a file.

        Raises:
            DataError: A block does not have its digest.
        """
        stop = self._sizes.get(path, start) if num_bytes is None else start + num_bytes
        self._verify(path, start, stop)
        return self._storage.read(path, start, num_bytes, version=version)

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return several ranges of a file."""
        for start, num_bytes in ranges:
            self._verify(path, start, start + num_bytes)
        return self._storage.read_ranges(path, ranges)

    def write(self, path: str, content: bytes) -> None:
        """Write a file as a whole."""
        self._storage.write(path, content)

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files."""
        self._storage.remove(paths)

    def expect(self, upcoming: Upcoming, locate: Locate) -> None:
        """Take note of what will be read."""
        self._storage.expect(upcoming, locate)

    def close(self) -> None:
        """Let go of connections and threads."""
        self._storage.close()

    def _verify(self, path: str, start: int, stop: int) -> None:
        size = self._sizes.get(path, 0)
        with self._lock:
            verified = self._verified.setdefault(path, bytearray(-(-size // BLOCK_BYTES)))
        touched = range(start // BLOCK_BYTES, min(-(-stop // BLOCK_BYTES), len(verified)))
        if all(verified[number] for number in touched):
            return
        digests = self._manifest.digests(path)
        if digests is None:
            return
        for number in touched:
            if verified[number]:
                continue
            begin = number * BLOCK_BYTES
            block = self._storage.read(path, begin, min(BLOCK_BYTES, size - begin))
            if blake3(block).hexdigest() != digests[number]:
                raise DataError(
                    f"{self.url}/{path} must be as when it was indexed, but bytes {begin} to {begin + len(block)} have "
                    f"changed; restore the file, or index the data as it is now: paceline data index {self.url}"
                )
            verified[number] = 1
