"""What is in a data set, and what is wrong with it: every sample read once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from blake3 import blake3

from paceline.data.formats.leaves import KEY, Sample, encode_leaves, is_image
from paceline.data.formats.manifest import BLOCK_BYTES
from paceline.data.formats.parallel import map_in_processes
from paceline.data.formats.source import FileSource
from paceline.data.image_decoding import decode_image
from paceline.errors import DataError

_PART_SAMPLES = 1024
_MOST_CLASSES = 10_000
"""Number of different values beyond which a leaf of whole numbers is no class."""


@dataclass
class Found:
    """Facts of some samples."""

    num_samples: int = 0
    sizes: list[int] = field(default_factory=list)
    """Bytes of each sample's leaves."""
    lengths: dict[str, list[int]] = field(default_factory=dict)
    """Length of each text and array, by leaf."""
    classes: dict[str, dict[int, int]] = field(default_factory=dict)
    """Number of samples of each value, by leaf of whole numbers."""
    hashes: list[tuple[bytes, int]] = field(default_factory=list)
    """Digest of each sample's leaves, without its name, and its index."""
    unreadable: list[tuple[int, str]] = field(default_factory=list)
    """Index of each sample that cannot be read, and the reason."""
    changed: list[str] = field(default_factory=list)
    """Blocks that are not what the index says, and files that it does not name."""

    def add(self, other: "Found") -> None:
        """Add the facts of other samples."""
        self.num_samples += other.num_samples
        for name in ("sizes", "hashes", "unreadable", "changed"):
            getattr(self, name).extend(getattr(other, name))
        for leaf, lengths in other.lengths.items():
            self.lengths.setdefault(leaf, []).extend(lengths)
        for leaf, counts in other.classes.items():
            mine = self.classes.setdefault(leaf, {})
            for value, count in counts.items():
                mine[value] = mine.get(value, 0) + count

    def list_duplicates(self) -> list[list[int]]:
        """Return the indices of samples that are the same, a list for each content."""
        by_hash: dict[bytes, list[int]] = {}
        for digest, index in self.hashes:
            by_hash.setdefault(digest, []).append(index)
        return [indices for indices in by_hash.values() if len(indices) > 1]

    def list_classes(self) -> dict[str, dict[int, int]]:
        """Return the number of samples of each class, by leaf."""
        return {
            leaf: dict(sorted(counts.items())) for leaf, counts in self.classes.items() if len(counts) <= _MOST_CLASSES
        }

    @property
    def is_sound(self) -> bool:
        """Whether every sample could be read, and the files are what the index says."""
        return not self.unreadable and not self.changed


def check_data(source: FileSource, num_processes: int = 1) -> Found:
    """Read all samples and files of a data set, images decoded, and return what is there."""
    found = Found(changed=[f"{path}, which it does not name" for path in source.list_unindexed()])
    parts = range(0, len(source), _PART_SAMPLES)
    for part in map_in_processes(partial(_check_part, source), parts, num_processes):
        found.add(part)
    files = range(len(source.manifest.files)) if source.manifest.has_digests else range(0)
    for changed in map_in_processes(partial(_check_file, source), files, num_processes):
        found.changed += changed
    return found


def _check_part(source: FileSource, begin: int) -> Found:
    found = Found()
    indices = np.arange(begin, min(begin + _PART_SAMPLES, len(source)))
    try:
        samples: Sequence[Sample | None] = source.read_leaves(indices)
    except DataError:  # one of them: find it
        samples = [_read_one(source, index, found) for index in indices.tolist()]
    for index, sample in zip(indices.tolist(), samples, strict=True):
        found.num_samples += 1
        if sample is not None:
            _look_at(sample, index, found)
    return found


def _read_one(source: FileSource, index: int, found: Found) -> Sample | None:
    try:
        return source.read_leaves(np.array([index]))[0]
    except DataError as error:
        found.unreadable.append((index, str(error)))
        return None


def _look_at(sample: Sample, index: int, found: Found) -> None:
    hasher, num_bytes = blake3(), 0
    for name, content in encode_leaves(sample):
        hasher.update(f"{len(name)} {len(content)} {name}".encode())
        hasher.update(content)
        num_bytes += len(content)
    found.sizes.append(num_bytes)
    found.hashes.append((hasher.digest(16), index))
    for leaf, value in sample.items():
        if leaf == KEY:
            continue
        if type(value) is int:
            counts = found.classes.setdefault(leaf, {})
            counts[value] = counts.get(value, 0) + 1
        elif isinstance(value, str | np.ndarray | list):
            is_scalar = isinstance(value, np.ndarray) and not value.ndim
            found.lengths.setdefault(leaf, []).append(1 if is_scalar else len(value))
        elif isinstance(value, bytes) and is_image(value):
            try:
                decode_image(value, name=leaf)
            except DataError as error:
                found.unreadable.append((index, f"{sample[KEY]}: {error}" if KEY in sample else str(error)))


def _check_file(source: FileSource, number: int) -> list[str]:
    """Return the blocks of a file that are not what the index says."""
    file = source.manifest.files[number]
    changed: list[str] = []
    for place, digest in enumerate(source.manifest.digests(file.path) or ()):
        begin = place * BLOCK_BYTES
        block: Any = source.storage.read(file.path, begin, min(BLOCK_BYTES, file.num_bytes - begin))
        if blake3(block).hexdigest() != digest:
            changed.append(f"{file.path}, bytes {begin} to {begin + len(block)}")
    return changed
