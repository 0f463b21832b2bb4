"""Base class of storages: files by path, of which ranges of bytes are read."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FileInfo:
    """A file of a storage."""

    path: str
    """Path below the storage's root, with ``/`` between its parts."""
    num_bytes: int
    version: str = ""
    """Mark that another content of the file would not have, such as an etag; empty if the storage has none."""


class Storage(ABC):
    """A folder of files, on a disk or far away. Threads share it.

    Errors name the file: a file that is missing, unreadable or shorter than was asked for is a `DataError`, a storage
    that cannot be reached a `StorageError`.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Path or URL of the root, as a person would write it."""

    @abstractmethod
    def list_files(self, prefix: str = "") -> list[FileInfo]:
        """Return the files whose path begins with `prefix`, in the order of their paths."""

    @abstractmethod
    def find(self, path: str) -> FileInfo | None:
        """Return a file; None if there is none."""

    @abstractmethod
    def read(self, path: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Return bytes of a file, by default all that follow `start`."""

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return several ranges (start, number of bytes) of a file, in that order."""
        return [self.read(path, start, num_bytes) for start, num_bytes in ranges]

    @abstractmethod
    def write(self, path: str, content: bytes) -> None:
        """Write a file as a whole: nobody ever sees a part of it. Folders are made."""
