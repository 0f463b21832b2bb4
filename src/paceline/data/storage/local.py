"""Files of a folder of this machine."""

import os
from collections.abc import Sequence
from pathlib import Path

from paceline.data.storage.base import FileInfo, Storage, changed
from paceline.errors import DataError, storing


class LocalStorage(Storage):
    """A folder.

    Args:
        root: Path of the folder.
    """

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    @property
    def url(self) -> str:
        """Path of the folder."""
        return str(self._root)

    def list_files(self, prefix: str = "") -> list[FileInfo]:
        """Return the files below the folder, those of folders below it too."""
        found = []
        for folder, _, names in os.walk(self._root):
            below = Path(folder).relative_to(self._root)
            found += [(below / name).as_posix() for name in names]
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
        try:
            with open(self._root / path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                if version not in ("", f"{status.st_mtime_ns}"):
                    raise changed(str(self._root / path))
                size = status.st_size
                wanted = size - start if num_bytes is None else num_bytes
                content = os.pread(file.fileno(), wanted, start)
        except OSError as error:
            raise DataError(f"{self._root / path} must be readable, but: {error.strerror}") from error
        if len(content) < wanted:
            raise DataError(
                f"{self._root / path} must have {start + wanted} bytes, but has {size}; it was cut, or changed since "
                "its index was made"
            )
        return content

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
