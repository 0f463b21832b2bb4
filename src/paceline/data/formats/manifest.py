"""The truth about a data set: its files with their sizes and digests, and one fingerprint of all."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from blake3 import blake3

from paceline.data.storage import FileInfo
from paceline.errors import DataError

BLOCK_BYTES = 1 << 20
"""Size of the blocks that have a digest each."""
DIGEST_BYTES = 32
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a data set."""

    path: str
    """Path below the data set's root."""
    num_bytes: int
    num_records: int
    num_samples: int
    digest: str = ""
    """Blake3 digest of the content, in hexadecimal; empty if nobody has read it for an index."""
    version: str = ""
    """Mark of the content that a store far away gave; empty if it has none."""
    about: dict[str, Any] = field(default_factory=dict)
    """Facts that reading it needs."""


@dataclass(frozen=True)
class DataManifest:
    """Files of a data set, and what identifies their content."""

    format: str
    """Name of the format."""
    files: Sequence[FileRecord]
    about: dict[str, Any] = field(default_factory=dict)
    """Facts of the whole data set, such as the names of its classes and the largest value of each whole number."""
    records_digest: str = ""
    """Blake3 digest of the table of records."""
    blocks: bytes = b""
    """Blake3 digests of all blocks of all files, one after another; empty without an index."""

    @cached_property
    def fingerprint(self) -> str:
        """Identifier of the content: of digests (``b3-``) or, without an index, of sizes alone (``size-``)."""
        *_, whole = self.fingerprints
        return whole

    @cached_property
    def fingerprints(self) -> list[str]:
        """Identifiers of the content of the first files: of none, of one, and so on to all."""
        hasher, kind = blake3(self.format.encode()), "b3"
        found = [f"{kind}-{hasher.hexdigest(16)}"]
        for file in self.files:
            line = [file.path, file.num_bytes, file.digest or file.version]
            hasher.update(json.dumps(line, ensure_ascii=True).encode())
            kind = kind if file.digest else "size"
            found.append(f"{kind}-{hasher.hexdigest(16)}")
        return found

    @property
    def has_digests(self) -> bool:
        """Whether each file has a digest."""
        return all(file.digest for file in self.files)

    @cached_property
    def _first_blocks(self) -> dict[str, tuple[int, int]]:
        """First block of each file, and the number of its blocks."""
        found, first = {}, 0
        for file in self.files:
            number = -(-file.num_bytes // BLOCK_BYTES)
            found[file.path] = (first, number)
            first += number
        return found

    def digests(self, path: str) -> list[str] | None:
        """Return the digests of a file's blocks of 1 MiB, in hexadecimal; None for a file that has none here."""
        first, number = self._first_blocks.get(path, (0, 0))
        if not number or not self.blocks:
            return None
        return [
            self.blocks[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES].hex()
            for place in range(first, first + number)
        ]

    def check_files(self, found: Sequence[FileInfo], place: str) -> None:
        """Compare the files with those that are there now.

        Raises:
            DataError: A file is missing, or of another size.
        """
        here = {file.path: file.num_bytes for file in found}
        for file in self.files:
            if here.get(file.path) == file.num_bytes:
                continue
            what = f"has {here[file.path]} bytes" if file.path in here else "is missing"
            raise DataError(
                f"{place}/{file.path} must have {file.num_bytes} bytes, as when the data was indexed, but {what}; "
                f"restore it, or index the data as it is now: paceline data index {place}"
            )

    def check_snapshot(self, snapshot: str, place: str) -> None:
        """Compare the fingerprint with the one that a run wants, or the first characters of that.

        Raises:
            DataError: The fingerprint is another.
        """
        if not self.fingerprint.startswith(snapshot) or (snapshot and len(snapshot) < 8):
            raise DataError(
                f"{place} must hold the data of snapshot {snapshot} (8 characters or more), but holds "
                f"{self.fingerprint}; restore the files, or leave --data.snapshot out to train on what is there"
            )

    def to_json(self) -> str:
        """Return everything but the blocks, as JSON."""
        document = {
            "version": FORMAT_VERSION,
            "format": self.format,
            "fingerprint": self.fingerprint,
            "records_digest": self.records_digest,
            "blocks_digest": blake3(self.blocks).hexdigest(),
            "about": self.about,
            "files": [asdict(file) for file in self.files],
        }
        return json.dumps({**document, "digest": _digest(document)}, indent=1, ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str | bytes, blocks: bytes, place: str) -> "DataManifest":
        """Return the manifest of a document and its blocks.

        Raises:
            DataError: Both are damaged, or of another version.
        """
        try:
            document = json.loads(text)
            if document["version"] != FORMAT_VERSION:
                raise DataError(
                    f"the index of {place} must be of version {FORMAT_VERSION}, but is of {document['version']}; "
                    f"index the data again: paceline data index {place}"
                )
            files = [FileRecord(**file) for file in document["files"]]
            manifest = cls(document["format"], files, document["about"], document["records_digest"], blocks)
            whole = manifest.fingerprint == document["fingerprint"]
            whole &= blake3(blocks).hexdigest() == document["blocks_digest"]
            whole &= document.pop("digest", None) in (None, _digest(document))  # None: of an earlier Paceline
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(place) from error
        if not whole:
            raise _damaged(place)
        return manifest


def _digest(document: dict[str, Any]) -> str:
    """Return the digest of a manifest's document."""
    return blake3(json.dumps(document, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _damaged(place: str) -> DataError:
    return DataError(f"the index of {place} must be whole, but is damaged; make it again: paceline data index {place}")
