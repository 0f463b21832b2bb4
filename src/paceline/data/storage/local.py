"""Files of a folder of this machine."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.data.storage.base import FileInfo, Storage, changed
from paceline.errors import DataError, storing

_NUM_OPEN = 64
"""Number of files that stay open."""


class _OpenFile:
    """A file that is closed when nobody reads it any more."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when the interpreter ends
        if hasattr(self, "descriptor"):
            close(self.descriptor)


class LocalStorage(Storage):
    """A folder.

    Args:
        root: Path of the folder.
    """

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)
        self._files: OrderedDict[str, tuple[_OpenFile, tuple[int, ...]]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Path of the folder."""
        return str(self._root)

    def list_files(self, prefix: str = "") -> list[FileInfo]:
        """Return the files below the folder, those of folders below it too, also where these are links."""
        found, above = [], {str(self._root): frozenset[str]()}
        for folder, folders, names in os.walk(self._root, followlinks=True):
            below = Path(folder).relative_to(self._root)
            found += [(below / name).as_posix() for name in names]
            known = above.pop(folder) | {os.path.realpath(folder)}
            folders[:] = [name for name in folders if os.path.realpath(os.path.join(folder, name)) not in known]
            above.update((os.path.join(folder, name), known) for name in folders)
        files = [self.find(path) for path in sorted(found) if path.startswith(prefix)]
        return [file for file in files if file is not None]

    def find(self, path: str) -> FileInfo | None:
        """Return a file; its version is the time of its last change."""
        try:
            status = os.stat(self._root / path)
        except FileNotFoundError:
            return None
        return FileInfo(path, status.st_size, f"{status.st_mtime_ns}")

    def read(self, path: str, start: int = 0, num_bytes: int | None = None, *, version: str = "") -> bytes:
        """Return bytes of a file."""
        return self._read_from(path, [(start, num_bytes)], version)[0]

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return several ranges of a file, all of one content even if the file is replaced meanwhile."""
        return self._read_from(path, ranges)

    def _read_from(self, path: str, ranges: Sequence[tuple[int, int | None]], version: str = "") -> list[bytes]:
        try:
            file, size, changed_ns = self._open(path)
            if version not in ("", f"{changed_ns}"):
                raise changed(str(self._root / path))
            contents = []
            for start, num_bytes in ranges:
                wanted = size - start if num_bytes is None else num_bytes
                content = os.pread(file.descriptor, wanted, start)
                if len(content) < wanted:
                    raise DataError(
                        f"{self._root / path} must have {start + wanted} bytes, but has {size}; it was cut, or changed "
                        "since its index was made"
                    )
                contents.append(content)
        except OSError as error:
            raise DataError(f"{self._root / path} must be readable, but: {error.strerror}") from error
        return contents

    def _open(self, path: str) -> tuple[_OpenFile, int, int]:
        """Return a file, its size and the time of its last change; the newest stay open while they are the same."""
        name = f"{self._root}/{path}"
        status = os.stat(name)
        identity = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
        with self._lock:
            kept = self._files.get(path)
            if kept is None or kept[1] != identity:
                kept = self._files[path] = _OpenFile(name), identity
                while len(self._files) > _NUM_OPEN:
                    self._files.popitem(last=False)
            self._files.move_to_end(path)
        return kept[0], status.st_size, status.st_mtime_ns

    def write(self, path: str, content: bytes) -> None:
        """Write a file beside its place, then move it there."""
        target = self._root / path
        with storing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f".{target.name}.{os.getpid()}.part")
            with open(part, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files; those that are not there are passed over."""
        for path in paths:
            with storing(self._root / path):
                (self._root / path).unlink(missing_ok=True)
