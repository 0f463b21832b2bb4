"""Base class of formats: how samples lie in the files of a data set."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.formats.leaves import Sample
from paceline.data.storage import FileInfo, Storage
from paceline.errors import SettingsError


class Stride(NamedTuple):
    """Places of records of one size, at equal distances."""

    begin: int
    step: int
    num_bytes: int
    num_records: int


def _none() -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Scan:
    """Places of a file's records: ranges of its bytes that can be read alone."""

    starts: NDArray[np.int64] = field(default_factory=_none)
    """First byte of each record."""
    sizes: NDArray[np.int64] = field(default_factory=_none)
    """Number of bytes of each record."""
    counts: NDArray[np.int64] | None = None
    """Number of samples in each record; None if each holds one."""
    stride: Stride | None = None
    """Rule that gives the records' places, in place of `starts` and `sizes`."""
    about: dict[str, Any] = field(default_factory=dict)
    """Facts of the file that reading needs, as JSON."""

    @property
    def num_records(self) -> int:
        """Number of records of the file."""
        return len(self.starts) if self.stride is None else self.stride.num_records

    @property
    def num_samples(self) -> int:
        """Number of samples of the file."""
        return self.num_records if self.counts is None else int(self.counts.sum())


class Format(ABC):
    """A format: the places of a file's samples, and their values from its bytes. Threads share it."""

    name: ClassVar[str]
    """Name in settings and on the command line."""
    suffixes: ClassVar[tuple[str, ...]]
    """Endings of its files' names; the first is that of files it writes."""
    is_grouped: ClassVar[bool] = False
    """Whether a record holds several samples, which are read together."""
    has_digests: ClassVar[bool] = False
    """Whether its files hold digests of their own, which reading compares."""
    is_strided: ClassVar[bool] = False
    """Whether settings say where the samples begin, so that an index does not hold their places."""
    is_one_shard: ClassVar[bool] = False
    """Whether all files together are one shard, since each holds one sample."""

    def choose(self, files: Sequence[FileInfo]) -> list[FileInfo]:
        """Return those of the files that hold samples, in the order of their paths."""
        return [file for file in files if file.path.lower().endswith(self.suffixes)]

    def list_named(self, storage: Storage, file: FileInfo) -> list[str] | None:
        """Return the paths of the files that a file beside them names as the whole of the data; None if it names none.

        Raises:
            DataError: The file is damaged.
        """
        return None

    def describe(self, files: Sequence[FileInfo]) -> dict[str, Any]:
        """Return facts of the data set that its files' names tell, as JSON."""
        return {}

    @abstractmethod
    def scan(self, storage: Storage, file: FileInfo) -> Scan:
        """Find the records of a file.

        Raises:
            DataError: The file is not of this format, or damaged.
        """

    @abstractmethod
    def decode(self, path: str, about: Mapping[str, Any], start: int, content: bytes) -> Sequence[Sample]:
        """Return the samples of a record.

        Args:
            path: Path of the file.
            about: Facts of the file, and those of the data set.
            start: First byte of the record.
            content: Bytes of the record.

        Raises:
            BadSample: The bytes are damaged.
        """

    def encode(self, samples: Sequence[Sample]) -> bytes:
        """Return the bytes of a file that holds these samples, the same for the same samples.

        Raises:
            DataError: The format cannot hold them.
        """
        raise SettingsError(f"format must be one that can be written, but got {self.name}; take tar")

    def measure(self, samples: Sequence[Sample]) -> int:
        """Return the number of bytes of a file that holds these samples.

        Raises:
            DataError: The format cannot hold them.
        """
        return len(self.encode(samples))

    def list_left_out(self, sample: Sample) -> list[str]:
        """Return the leaves of a sample that the format's files do not hold; none here."""
        return []

    def write(self, storage: Storage, stem: str, samples: Sequence[Sample]) -> None:
        """Write a shard.

        Args:
            storage: Storage to write to.
            stem: Path of the shard, without the ending.
            samples: Samples of the shard.

        Raises:
            DataError: The format cannot hold them.
        """
        storage.write(stem + self.suffixes[0], self.encode(samples))

    def finish(self, storage: Storage, files: Sequence[FileInfo]) -> None:
        """Write what belongs to all shards, once these are there; nothing here."""
