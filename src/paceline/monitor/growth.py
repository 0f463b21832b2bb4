"""Files that grow, and that somebody may remove or move while they do."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path


def lies_there(path: str | os.PathLike[str], descriptor: int) -> bool:
    """Return whether the file at `path` is the open one."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


class GrowingFile:
    """Whole lines that are appended to a file from now on.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        """Descriptor of the file, which is kept open: else its number could be that of a later one."""
        self._close: Callable[[], object] = lambda: None
        self._read_bytes = 0
        self._open()
        if self._descriptor is not None:
            self._read_bytes = os.fstat(self._descriptor).st_size

    def read(self, num_bytes: int = 1 << 20) -> Iterator[bytes]:
        """Yield what was appended since, in pieces of whole lines; a piece counts as read once the next is asked for.

        A file that lies there in place of the one before is read from its beginning.

        Args:
            num_bytes: Length of a piece, unless one line is longer.
        """
        yield from self._read_on(num_bytes)
        if self._descriptor is None or not lies_there(self._path, self._descriptor):
            self._open()
            yield from self._read_on(num_bytes)

    def _open(self) -> None:
        """Open the file that lies there, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(self._path, os.O_RDONLY)
            self._close()
            self._descriptor, self._read_bytes = descriptor, 0
            self._close = weakref.finalize(self, os.close, descriptor)

    def _read_on(self, num_bytes: int) -> Iterator[bytes]:
        while self._descriptor is not None:
            if os.fstat(self._descriptor).st_size < self._read_bytes:  # it was cut
                self._read_bytes = 0
            lines = os.pread(self._descriptor, num_bytes, self._read_bytes)
            while not (end := lines.rfind(b"\n") + 1):
                if not (more := os.pread(self._descriptor, num_bytes, self._read_bytes + len(lines))):
                    return
                lines += more
            yield lines[:end]
            self._read_bytes += end
