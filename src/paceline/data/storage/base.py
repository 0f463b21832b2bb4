"""Base class of storages: files by path, of which ranges of bytes are read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from paceline.data.orders import Indices
from paceline.errors import DataError


@dataclass(frozen=True)
class FileInfo:
    """A file of a storage."""

    path: str
    """Path below the storage's root, with ``/`` between its parts."""
    num_bytes: int
    version: str = ""
    """Mark that another content of the file would not have, such as an etag; empty if the storage has none."""


class Extent(NamedTuple):
    """Bytes of a file that are read together."""

    path: str
    start: int
    num_bytes: int


class Upcoming(Protocol):
    """Samples that will be read, in the order of all workers together; see `paceline.data.upcoming`."""

    @property
    def position(self) -> int:
        """Position before which nobody here reads any more."""

    @property
    def stop(self) -> int | None:
        """Position at which the data ends; None if it does not."""

    @property
    def epoch_samples(self) -> int:
        """Number of positions in an epoch."""

    def samples(self, start: int, stop: int) -> Indices:
        """Return the index of the sample at each position."""

    def step_at(self, position: int) -> tuple[int, Indices]:
        """Return the end of the step that begins at a position, and the positions in it that this worker reads."""


Locate = Callable[[Indices], Sequence[tuple[str, int, int]]]
"""Function that returns the extents (path, start, number of bytes) that reading samples touches."""


class NoListError(DataError):
    """A server gives files by their names alone, and lists none."""


def changed(url: str) -> DataError:
    """Return the error for a file that is no longer the one that was found at first."""
    return DataError(
        f"{url} must stay as it was when it was first read, but it has changed since; put the old file back, or start "
        "a new run with the new one"
    )


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
        """Return the files whose path begins with `prefix`, in the order of their paths.

        Raises:
            NoListError: The server lists nothing.
        """

    @abstractmethod
    def find(self, path: str) -> FileInfo | None:
        """Return a file; None if there is none."""

    @abstractmethod
    def read(self, path: str, start: int = 0, num_bytes: int | None = None, *, version: str = "") -> bytes:
        """Return bytes of a file.

        Args:
            path: Path of the file.
            start: Offset of the first byte.
            num_bytes: Number of bytes; None for all that follow.
            version: Version that the file must still have; empty for any.

        Raises:
            DataError: The file is missing, too short, may not be read, or has another version.
            StorageError: The storage cannot be reached.
        """

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return several ranges (start, number of bytes) of a file, in that order."""
        return [self.read(path, start, num_bytes) for start, num_bytes in ranges]

    @abstractmethod
    def write(self, path: str, content: bytes) -> None:
        """Write a file as a whole: nobody ever sees a part of it. Folders are made."""

    def write_from(self, path: str, file: Path) -> None:
        """Write a file as a whole, from one of this machine."""
        self.write(path, file.read_bytes())

    @abstractmethod
    def remove(self, paths: Sequence[str]) -> None:
        """Remove files; those that are not there are passed over."""

    def forget(self, prefix: str) -> None:
        """Look anew at the files whose path begins with `prefix`; unused here, where nothing is kept of them.

        Args:
            prefix: Beginning of the paths.
        """

    def expect(self, upcoming: Upcoming, locate: Locate) -> None:
        """Take note of what will be read; unused here, where nothing is kept or fetched ahead.

        Args:
            upcoming: Samples that come next.
            locate: Function that returns where samples lie.
        """

    def close(self) -> None:
        """Let go of connections and threads; nothing is read afterwards."""
