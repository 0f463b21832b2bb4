"""Files of any format as a source of samples."""

import copy
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.base import Source, Spec
from paceline.data.formats.image_folder import ImageFolder, list_classes
from paceline.data.formats.index import Index, find_index, stride_rows
from paceline.data.formats.leaves import KEY, Sample, is_image, nest
from paceline.data.formats.manifest import DataManifest, FileRecord
from paceline.data.formats.opening import open_place
from paceline.data.formats.verified import VerifiedStorage
from paceline.data.image_decoding import decode_image
from paceline.data.map_source import CollateFn, collate
from paceline.data.orders import Indices
from paceline.data.randomness import seed_generators
from paceline.data.storage import Extent, Storage, StoreSettings
from paceline.data.storage.base import Upcoming
from paceline.errors import BadSample, DataError

_KEPT_BYTES = 64 << 20
"""Size of the groups of samples that stay decoded, by the bytes that they were read from."""


class NoIndexWarning(UserWarning):
    """Data has no index, so that its content cannot be compared with anything."""


class _Fetched(NamedTuple):
    """A sample that was fetched: the bytes of its record, or the decoded sample of a group."""

    content: bytes | Sample
    path: str = ""
    about: Mapping[str, Any] = MappingProxyType({})
    start: int = 0


class FileSource(Source):
    """Samples of files: of tar shards, Parquet, TFRecord, JSONL, MDS, image folders, tokens or text.

    A sample is a tree: a mapping of leaves by name, nested where names have dots. Only the bytes of the samples that
    are asked for are read, or of the groups that hold them.

    Args:
        path: Folder or file of the data, its URL, or its storage.
        format: Name of the format; ``auto`` for what the files' names say.
        transform: Function that makes a sample of a model from a tree of leaves, in which images are still bytes; by
            default images become tensors [channels, height, width] of bytes and all else stays.
        collate_fn: Function that makes a batch from a list of samples; by default it stacks them.
        sequence_length: Number of tokens of a sample, for tokens and for text: see `TokenFiles`.
        snapshot: Fingerprint, or its first characters, that the data must have.
        verify: Whether to compare each block of 1 MiB with its digest when it is first touched, which reads all of it.
        classes: Names of the classes in the order of their numbers, for a folder of images for each class; by default
            those of its folders, sorted. Data that is compared, such as held-out data, wants the same.
        grows: Whether files may be added while it is read, whose names come behind those that are there.
        spec: Sizes for models that are built from settings.
        store: Time limits and caches of a store that an URL names.

    Attributes:
        storage: Storage of the files.
        manifest: Files and digests.

    Raises:
        DataError: Files are missing, changed since the index was made, damaged, or of no format.
    """

    decodes_samples = True

    def __init__(
        self,
        path: str | Path | Storage,
        *,
        format: str = "auto",
        transform: Callable[[dict[str, Any]], Any] | None = None,
        collate_fn: CollateFn | None = None,
        sequence_length: int | None = None,
        snapshot: str = "",
        verify: bool = False,
        classes: Sequence[str] = (),
        grows: bool = False,
        spec: Spec | None = None,
        store: StoreSettings | None = None,
    ) -> None:
        self._where = place = open_place(path, store)
        self._place, self._sequence_length, self._verify, self.grows = str(place), sequence_length, verify, grows
        if grows and (place.name or snapshot):
            raise DataError(
                f"data that grows must be a folder without a snapshot, but got {self._place} and {snapshot!r}; leave "
                "--data.snapshot out, and name the folder"
            )
        self._alike: weakref.WeakSet[FileSource] = weakref.WeakSet([self])
        """This source and those made from it, which grow together."""
        self._classes = list(classes)
        self._found = find_index(place, format, sequence_length)
        self._take(self._found, len(self._found.manifest.files))
        self.manifest.check_snapshot(snapshot, self._place)
        self._warn_of_ignored_files()
        if not self.manifest.has_digests:
            warnings.warn(
                f"{self._place} has no index, so that only sizes of files identify its content; make one: "
                f"paceline data index {self._place}",
                NoIndexWarning,
                stacklevel=2,
            )
        self._transform, self.collate_fn, self.spec = transform, collate_fn, spec or Spec()
        self.stacks, self.is_thread_safe = collate_fn is None, transform is None and collate_fn is None
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, tuple[Sequence[Sample], int]] = OrderedDict()

    def _take(self, index: Index, num_files: int) -> None:
        """Have the samples of the first files of an index.

        Samples that were there keep their numbers, records and files, so that a thread may read meanwhile.
        """
        whole = index.manifest
        files = whole.files[:num_files]
        about = self._number_classes(whole.format, whole.about, files)
        manifest = DataManifest(whole.format, files, about, whole.records_digest, whole.blocks)
        known = {file.path: manifest.digests(file.path) for file in files}
        self._where.digests.update({name: digests for name, digests in known.items() if digests is not None})
        self._index, self.manifest = index, manifest
        self._record_ends = np.fromiter(accumulate(file.num_records for file in files), np.int64, len(files))
        counts = index.counts
        num_records = int(self._record_ends[-1]) if len(files) else 0
        self._sample_ends = None if counts is None else np.cumsum(counts[:num_records])
        self._num_samples = sum(file.num_samples for file in files)
        if not self._num_samples:
            raise DataError(f"{self._place} must hold samples, but its {len(files)} files hold none; check the path")
        self._shard_sizes = [self._num_samples] if index.form.is_one_shard else [file.num_samples for file in files]
        storage = self._where.storage
        self.storage: Storage = VerifiedStorage(storage, manifest) if self._verify else storage

    def _warn_of_ignored_files(self) -> None:
        """Warn of files that a person may take for a part of the data; of data that grows they may be taken later."""
        short = [file.path for file in self.manifest.files if file.num_bytes and not file.num_samples]
        for paths, reason in (
            (self._found.ignored, f"are no part of its {self.manifest.format} data; index it again, or move them"),
            (
                short if self._found.form.is_strided else [],
                "give no sample, as they are shorter than one; lower sequence_length, or join them",
            ),
        ):
            if paths and not self.grows:
                some = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
                warnings.warn(f"files of {self._place} {reason}: {some}", stacklevel=3)

    def _number_classes(self, form: str, about: dict[str, Any], files: Sequence[FileRecord]) -> dict[str, Any]:
        """Return the facts of the data with the classes as they were given, or as they were when it was opened."""
        if form != ImageFolder.name:
            return about
        self._classes = self._classes or about.get("classes", [])
        if unknown := set(list_classes(files)).difference(self._classes) if self._classes else ():
            raise DataError(
                f"the class folders of {self._place} must be among {', '.join(self._classes)}, but got "
                f"{', '.join(sorted(unknown))}; name all classes in --data.classes, in the order of their numbers"
            )
        return {**about, "classes": self._classes} if self._classes else about

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __str__(self) -> str:
        return f"{self._num_samples} samples in {len(self.manifest.files)} files of {self._place}"

    @property
    def shard_sizes(self) -> list[int]:
        """Number of samples of each shard, in the order of the files."""
        return self._shard_sizes

    @property
    def fingerprint(self) -> str:
        """Identifier of the data's content, which all workers must have alike: see `DataManifest`."""
        return self.manifest.fingerprint

    def recognises(self, fingerprint: str) -> bool:
        """Return whether its content is that of a fingerprint; of data that grows, that of its first files."""
        return fingerprint in self.manifest.fingerprints[1:] if self.grows else fingerprint == self.fingerprint

    def list_shards(self, *, looks: bool) -> list[Any]:
        """Return path, sizes and digest of each file.

        Raises:
            DataError: A file that was there is missing, has changed, or has another place among the files.
        """
        if looks:
            self._found = self._look()
        return [[file.path, file.num_bytes, file.num_samples, file.digest] for file in self._found.manifest.files]

    def list_versions(self) -> list[list[str | int]]:
        """Return path, size and mark of the content of each file, as they are now."""
        known = {file.path for file in self.manifest.files}
        found = self._where.list_files(sorted(known))
        return [[file.path, file.num_bytes, file.version] for file in found if file.path in known]

    def list_unindexed(self) -> list[str]:
        """Return the paths of files of its format that its index does not name; none where there is no index."""
        ending = self._found.form.suffixes if self.manifest.has_digests else ()
        return [path for path in self._found.ignored if path.lower().endswith(ending)]

    def take_shards(self, num_shards: int) -> None:
        """Have the samples of the first files; so have sources made from this one."""
        for source in list(self._alike):
            source._found = self._found
            source._take(self._found, num_shards)

    def _look(self) -> Index:
        """Return an index of the files that are there by now; the old one while a new one is being written.

        Raises:
            DataError: See `list_shards`.
        """
        before = self.manifest.files
        self._where.storage.forget(f"{self._where.index_folder}/")
        self.manifest.check_files(self._where.list_files([file.path for file in before]), self._place)
        try:
            index = find_index(self._where, self.manifest.format, self._sequence_length)
        except DataError as error:
            warnings.warn(f"{self._place} is looked at again after the next epoch, since {error}", stacklevel=2)
            return self._found
        for known, file in zip(before, index.manifest.files, strict=False):
            if (known.path, known.num_bytes) != (file.path, file.num_bytes) or "" != known.digest != file.digest:
                raise DataError(
                    f"new files must have names behind those that {self._place} holds, and these must stay as they "
                    f"are, but got {file.path} in place of {known.path}; rename the new ones"
                )
        return index if len(index.manifest.files) >= len(before) else self._found

    def transformed(self, transform: Callable[[dict[str, Any]], Any], *, is_thread_safe: bool = False) -> "FileSource":
        """Return the source with another function that makes samples; it shares the index."""
        other = self._copy()
        other._transform, other.is_thread_safe = transform, is_thread_safe
        return other

    def with_collate(self, collate_fn: CollateFn) -> "FileSource":
        """Return the source with another function that makes a batch from a list of samples; it shares the index."""
        other = self._copy()
        other.collate_fn, other.stacks = collate_fn, False
        return other

    def _copy(self) -> "FileSource":
        other = copy.copy(self)
        self._alike.add(other)
        return other

    def locate(self, indices: Indices) -> list[Extent]:
        """Return the ranges of bytes that reading samples touches, in their order; of samples in one group, one."""
        records, _ = self._find_records(np.asarray(indices, dtype=np.int64))
        files, rows = self._find_rows(records)
        names = self.manifest.files
        extents = [Extent(names[file].path, *row) for file, row in zip(files.tolist(), rows.tolist(), strict=True)]
        return list(dict.fromkeys(extents))

    def expect(self, upcoming: Upcoming) -> None:
        """Tell the storage what will be read, so that it fetches ahead and keeps what is used next."""
        self.storage.expect(upcoming, self.locate)

    def read(self, indices: Indices) -> Any:
        """Return samples, transformed and collated.

        Raises:
            BadSample: A sample is damaged.
            DataError: A file cannot be read, or samples cannot be stacked.
        """
        return self.collate(self.decode(self.fetch(indices)))

    def fetch(self, indices: Indices) -> list[_Fetched]:
        """Return samples as bytes of the files; those of a group, such as rows of Parquet, are decoded already.

        Raises:
            BadSample: A sample's group is damaged.
            DataError: A file cannot be read.
        """
        records, within = self._find_records(np.asarray(indices, dtype=np.int64))
        if within is None:
            return self._fetch_records(records)
        groups = {record: self._read_group(record) for record in dict.fromkeys(records.tolist())}
        return [_Fetched(groups[record][row]) for record, row in zip(records.tolist(), within.tolist(), strict=True)]

    def decode(self, fetched: list[_Fetched], seeds: Sequence[int] | None = None) -> list[Any]:
        """Return samples, transformed; with seeds each has its own random numbers if the function is the user's.

        Raises:
            BadSample: A sample is damaged.
        """
        samples = []
        for number, one in enumerate(fetched):
            if seeds is not None and not self.is_thread_safe:
                seed_generators(seeds[number])
            samples.append(self._make(one))
        return samples

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch of samples.

        Raises:
            DataError: Samples cannot be stacked.
        """
        return collate(samples, self.collate_fn)

    def read_trees(self, indices: Indices) -> list[dict[str, Any]]:
        """Return samples as the files hold them: trees of leaves, images still as bytes.

        Raises:
            BadSample: A sample is damaged.
            DataError: A file cannot be read.
        """
        return [self._nest(one) for one in self.fetch(indices)]

    def read_leaves(self, indices: Indices) -> list[Sample]:
        """Return samples as the files hold them, with dotted names in place of trees."""
        return [self._decode_leaves(one) for one in self.fetch(indices)]

    def __getitem__(self, index: int) -> Any:
        """Return one sample, transformed."""
        if not -self._num_samples <= index < self._num_samples:
            raise IndexError(f"{self} have no sample {index}")
        return self._make(self.fetch(np.array([index % self._num_samples]))[0])

    def _make(self, fetched: _Fetched) -> Any:
        tree = self._nest(fetched)
        try:
            if self._transform is not None:
                return self._transform(tree)
            return _decode_images({name: value for name, value in tree.items() if name != KEY})
        except DataError as error:
            raise self._explain(fetched, tree, error) from error

    def _nest(self, fetched: _Fetched) -> dict[str, Any]:
        leaves = self._decode_leaves(fetched)
        try:
            return nest(leaves)
        except DataError as error:
            raise self._explain(fetched, leaves, error) from error

    def _explain(self, fetched: _Fetched, sample: Mapping[str, Any], error: DataError) -> BadSample:
        key = str(sample.get(KEY, ""))
        path = f"{self._where.storage.url}/{fetched.path}" if fetched.path else self._place
        message = f"sample {key!r} of {path} must be readable, but: {error}"
        return BadSample(message, path=path, key=key, reason=str(error))

    def _find_records(self, indices: Indices) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Return the records of samples, and their places in these; None where each record holds one."""
        if self._sample_ends is None:
            return indices, None
        records = np.searchsorted(self._sample_ends, indices, side="right")
        begins = np.concatenate([[0], self._sample_ends])
        return records, indices - begins[records]

    def _find_rows(self, records: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of the file of each record, and its place there."""
        files = np.searchsorted(self._record_ends, records, side="right")
        if self._index.table is not None:
            return files, self._index.table.look_up(records)
        assert self._index.strides is not None
        begins = np.concatenate([[0], self._record_ends])
        rows = [
            stride_rows(self._index.strides[file], np.array([record - begins[file]]))[0]
            for file, record in zip(files.tolist(), records.tolist(), strict=True)
        ]
        return files, np.stack(rows) if rows else np.zeros((0, 2), np.int64)

    def _fetch_records(self, records: NDArray[np.int64]) -> list[_Fetched]:
        files, rows = self._find_rows(records)
        numbers, ranges = files.tolist(), rows.tolist()
        by_file: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            by_file.setdefault(number, []).append(place)
        read: list[_Fetched] = [_Fetched(b"")] * len(numbers)
        about = self.manifest.about
        for number, places in by_file.items():
            file = self.manifest.files[number]
            contents = self.storage.read_ranges(file.path, [ranges[place] for place in places])
            facts = {**about, **file.about} if file.about else about
            for place, content in zip(places, contents, strict=True):
                read[place] = _Fetched(content, file.path, facts, ranges[place][0])
        return read

    def _decode_record(self, fetched: _Fetched) -> Sequence[Sample]:
        assert isinstance(fetched.content, bytes)
        return self._index.form.decode(fetched.path, fetched.about, fetched.start, fetched.content)

    def _decode_leaves(self, fetched: _Fetched) -> Sample:
        return self._decode_record(fetched)[0] if isinstance(fetched.content, bytes) else fetched.content

    def _read_group(self, record: int) -> Sequence[Sample]:
        """Return the samples of a record, which stay decoded for a while."""
        with self._lock:
            if record in self._kept:
                self._kept.move_to_end(record)
                return self._kept[record][0]
        rows = np.array([record])
        fetched = self._fetch_records(rows)[0]
        samples = self._decode_record(fetched)
        assert self._index.counts is not None
        if len(samples) != (wanted := int(self._index.counts[record])):
            reason = f"it holds {len(samples)} samples, not {wanted} as the index says"
            message = f"{fetched.path}: the record at byte {fetched.start} must be as when it was indexed, but {reason}"
            raise BadSample(
                f"{message}; index the data again: paceline data index {self._place}",
                path=fetched.path,
                key=str(fetched.start),
                reason=reason,
            )
        with self._lock:
            self._kept[record] = samples, int(self._find_rows(rows)[1][0, 1])
            while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        return samples


def _decode_images(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tree with image files as tensors."""
    decoded: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            decoded[name] = _decode_images(value)
        else:
            decoded[name] = to_tensor(decode_image(value, name=name)) if is_image(value) else _own(value)
    return decoded


def _own(value: Any) -> Any:
    """Return a leaf; an array that shares the bytes of a file, which torch would warn of, as one of its own."""
    return value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value


def to_tensor(pixels: NDArray[np.uint8]) -> Tensor:
    """Return an image [height, width, channels] as a tensor [channels, height, width]."""
    return torch.from_numpy(np.array(pixels).transpose(2, 0, 1).copy())
