"""Stores that fsspec reaches: webhdfs, sftp, memory, and what else is installed."""

import posixpath
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from paceline.data.storage.base import FileInfo, Storage, changed
from paceline.errors import DataError, PacelineError, SettingsError, StorageError, missing_extra

T = TypeVar("T")

_MARKS = (
    *("ETag", "etag", "md5", "sha", "hex", "mtime", "LastModified", "last_modified"),
    *("modificationTime", "modified", "modify", "last_write_time", "created"),
)
"""Facts of a file that another content would not have; file systems name them differently."""


class FsspecStorage(Storage):
    """A folder of a file system of fsspec's.

    Args:
        url: URL of the folder.
        retry: Function that makes a request, again where it fails for a reason that may pass.

    Raises:
        SettingsError: No such file system is known.
        MissingExtraError: A package that the file system needs is not installed.
    """

    def __init__(self, url: str, retry: Callable[[Callable[[], Any]], Any]) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise missing_extra("fsspec", "stores", f"reading {url}") from error
        self._url = url.rstrip("/")
        self._retry = retry
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise SettingsError(f"{url} must be of a kind that is installed, but: {error}") from error
        except (ValueError, OSError) as error:
            raise SettingsError(
                f"{url} must be of a file system that fsspec knows, but: {error}; see fsspec.available_protocols()"
            ) from error
        self._root = str(root).rstrip("/")

    @property
    def url(self) -> str:
        """URL of the folder."""
        return self._url

    def list_files(self, prefix: str = "") -> list[FileInfo]:
        """Return the files below the folder."""
        found: dict[str, Any] = self._ask("", lambda: self._files.find(self._root, detail=True))
        files = [self._to_info(path, details) for path, details in found.items()]
        return sorted((file for file in files if file.path.startswith(prefix)), key=lambda file: file.path)

    def find(self, path: str) -> FileInfo | None:
        """Return a file; its version is the first mark of its content that the file system gives."""
        try:
            details = self._ask(path, lambda: self._files.info(self._at(path)))
        except _MissingError:
            return None
        return None if details.get("type") == "directory" else self._to_info(self._at(path), details)

    def read(self, path: str, start: int = 0, num_bytes: int | None = None, *, version: str = "") -> bytes:
        """Return bytes of a file."""
        if version and ((found := self.find(path)) is None or found.version != version):
            raise changed(f"{self._url}/{path}")
        end = None if num_bytes is None else start + num_bytes
        content = bytes(self._ask(path, lambda: self._files.cat_file(self._at(path), start=start, end=end)))
        if num_bytes is not None and len(content) < num_bytes:
            raise DataError(
                f"{self._url}/{path} must have {start + num_bytes} bytes, but has {start + len(content)}; it was cut, "
                "or changed since its index was made"
            )
        return content

    def write(self, path: str, content: bytes) -> None:
        """Write a file beside its place, then move it there."""
        target = self._at(path)
        part = f"{target}.part"

        def put() -> None:
            self._files.makedirs(posixpath.dirname(target), exist_ok=True)
            self._files.pipe_file(part, content)
            self._files.mv(part, target)

        self._ask(path, put)

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files; those that are not there are passed over."""
        for path in paths:
            try:
                self._ask(path, lambda path=path: self._files.rm_file(self._at(path)))  # type: ignore[misc]
            except _MissingError:
                continue

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _to_info(self, path: str, details: dict[str, Any]) -> FileInfo:
        mark = next((mark for name in _MARKS if (mark := details.get(name))), "")
        version = str(mark.timestamp() if isinstance(mark, datetime) else mark)  # lists tell it as a number
        return FileInfo(path.removeprefix(f"{self._root}/"), int(details["size"] or 0), version)

    def _ask(self, path: str, request: Callable[[], T]) -> T:
        url = f"{self._url}/{path}" if path else self._url
        try:
            answer: T = self._retry(request)
            return answer
        except FileNotFoundError:
            raise _MissingError(f"{url} must be readable, but there is no such file; check the path") from None
        except (PermissionError, IsADirectoryError) as error:
            raise DataError(f"{url} must be readable, but: {error}; check the rights and the path") from error
        except PacelineError:
            raise
        except Exception as error:  # each file system of fsspec's raises errors of its own library
            raise StorageError(
                f"{url} must answer, but: {type(error).__name__}: {error}; check the network and the URL"
            ) from error


class _MissingError(DataError):
    """There is no such file."""
