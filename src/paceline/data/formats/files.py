"""Files of a storage as Python's files, read in ranges."""

import io

from paceline.data.storage import FileInfo, Storage


class StorageFile:
    """A file of a storage, of which small parts are read one after another.

    Args:
        storage: Storage of the file.
        file: File.
        buffer_bytes: Number of bytes to read at once.
    """

    def __init__(self, storage: Storage, file: FileInfo, buffer_bytes: int = 1 << 20) -> None:
        self._storage, self._file, self._buffer_bytes = storage, file, buffer_bytes
        self._start, self._buffer = 0, b""

    def __enter__(self) -> "StorageFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._buffer = b""

    def read_at(self, start: int, num_bytes: int) -> bytes:
        """Return bytes from `start` on; fewer at the file's end."""
        stop = min(start + num_bytes, self._file.num_bytes)
        if start < self._start or stop > self._start + len(self._buffer):
            wanted = min(max(num_bytes, self._buffer_bytes), self._file.num_bytes - start)
            self._start, self._buffer = start, self._storage.read(self._file.path, start, wanted) if wanted > 0 else b""
        return self._buffer[start - self._start : stop - self._start]


class RangeReader(io.RawIOBase):
    """A file of a storage as a Python file that can seek: for packages that want one.

    Args:
        storage: Storage of the file.
        path: Path of the file.
        num_bytes: Size of the file.
        known: Part of the file that is in memory: its first byte, and its bytes.
    """

    def __init__(self, storage: Storage | None, path: str, num_bytes: int, known: tuple[int, bytes] = (0, b"")) -> None:
        self._storage, self._path, self._num_bytes, self._known = storage, path, num_bytes, known
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position, and return it."""
        self._position = offset + (0, self._position, self._num_bytes)[whence]
        return self._position

    def read(self, num_bytes: int = -1) -> bytes:
        """Return bytes, fewer at the file's end."""
        left = self._num_bytes - self._position
        wanted = left if num_bytes < 0 else min(num_bytes, left)
        start, content = self._known
        begin = self._position - start
        self._position += max(wanted, 0)
        if wanted <= 0:
            return b""
        if begin >= 0 and begin + wanted <= len(content):
            return content[begin : begin + wanted]
        if self._storage is None:
            raise OSError(f"byte {start + begin} is outside of what was read")
        return self._storage.read(self._path, start + begin, wanted)

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        """Read into a buffer, and return the number of bytes."""
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)
