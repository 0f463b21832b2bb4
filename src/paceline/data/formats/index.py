"""The index of a data set: its manifest, and the place of each sample; made once, kept beside the files."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from paceline.data.formats import FORMATS, find_format
from paceline.data.formats.arrow import is_cache
from paceline.data.formats.base import Format, Scan, Stride
from paceline.data.formats.leaves import KEY
from paceline.data.formats.manifest import BLOCK_BYTES, DataManifest, FileRecord
from paceline.data.formats.opening import Place
from paceline.data.formats.parallel import map_in_processes
from paceline.data.formats.records import RecordTable, pack_rows
from paceline.data.storage import FileInfo, Storage
from paceline.errors import DataError

MANIFEST = "manifest.json"
RECORDS = "records.bin"
COUNTS = "counts.bin"
BLOCKS = "blocks.bin"
_PART_BYTES = 1 << 22
_IMAGES = (".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".heic", ".jp2", ".jfif")
"""Endings of images that no format here reads."""


@dataclass(frozen=True)
class Index:
    """DataManifest of a data set, and the places of its records."""

    manifest: DataManifest
    form: Format
    table: RecordTable | None
    """Places of all records; None where strides say them."""
    strides: Sequence[Stride] | None
    """Places of each file's records, if they are regular."""
    counts: NDArray[np.int64] | None
    """Number of samples in each record; None if each holds one."""
    ignored: Sequence[str] = ()
    """Paths of files that look like data of this set and are no part of it."""


def find_index(place: Place, name: str, sequence_length: int | None) -> Index:
    """Return the index that lies beside the data, checked against the files; without one, what a look at them finds.

    Raises:
        DataError: Files are missing, changed since the index was made, damaged, or of no format.
    """
    storage, folder = place.storage, place.index_folder
    if storage.find(f"{folder}/{MANIFEST}") is None:
        files = place.list_files()
        found = scan_files(place, files, find_format(name, files, sequence_length))
        return replace(found, ignored=_list_ignored(files, found.manifest, found.form))
    blocks = storage.read(f"{folder}/{BLOCKS}")
    manifest = DataManifest.from_json(storage.read(f"{folder}/{MANIFEST}"), blocks, str(place))
    files = place.list_files([file.path for file in manifest.files])
    if name not in ("auto", manifest.format):
        raise DataError(
            f"the format of {place} must be {manifest.format}, as its index says, but got {name}; leave it out, or "
            f"index the data again: paceline data index {place} --format {name}"
        )
    manifest.check_files(files, str(place))
    form = find_format(manifest.format, files, sequence_length)
    ignored = _list_ignored(files, manifest, form)
    if form.is_strided:
        found = scan_files(place, [file for file in files if file.path in {one.path for one in manifest.files}], form)
        about = manifest.about | found.manifest.about
        sizes = [(file.num_records, file.num_samples, file.about) for file in found.manifest.files]
        records = [
            FileRecord(file.path, file.num_bytes, num_records, num_samples, file.digest, file.version, facts)
            for file, (num_records, num_samples, facts) in zip(manifest.files, sizes, strict=True)
        ]
        known = DataManifest(manifest.format, records, about, manifest.records_digest, blocks)
        return Index(known, form, None, found.strides, None, ignored)
    table = RecordTable.from_parts(_read_parts(storage, f"{folder}/{RECORDS}"))
    if table.digest() != manifest.records_digest:
        raise _damaged(place, "records")
    counts = None
    if form.is_grouped:
        content = storage.read(f"{folder}/{COUNTS}")
        counts = np.frombuffer(content[: len(content) // 8 * 8], dtype="<i8")
    _check_counts(place, manifest, table, counts)
    return Index(manifest, form, table, None, counts, ignored)


def scan_files(place: Place, files: Sequence[FileInfo], form: Format) -> Index:
    """Return what a look at the files finds: places and sizes, no digests."""
    chosen = _choose(place, files, form)
    scans = [form.scan(place.storage, file) for file in chosen]
    is_far = "://" in place.storage.url
    records = [
        FileRecord(file.path, file.num_bytes, scan.num_records, scan.num_samples, "", file.version * is_far, scan.about)
        for file, scan in zip(chosen, scans, strict=True)
    ]
    manifest = DataManifest(form.name, records, form.describe(chosen))
    if form.is_strided:
        strides = [scan.stride for scan in scans if scan.stride is not None]
        return Index(manifest, form, None, strides, None)
    table = RecordTable.from_parts(pack_rows(scan.starts, scan.sizes) for scan in scans)
    return Index(manifest, form, table, None, _join_counts(scans) if form.is_grouped else None)


def write_index(place: Place, name: str, sequence_length: int | None = None, num_processes: int = 1) -> DataManifest:
    """Read all files of a data set, and write its index beside them.

    Args:
        place: Place of the data.
        name: Name of the format, or ``auto``.
        sequence_length: Number of tokens of a sample, if it is of tokens.
        num_processes: Number of processes that read.

    Returns:
        The manifest.

    Raises:
        DataError: A file or a sample is damaged, or the files are of no format.
        StorageError: The index could not be written.
    """
    files = place.list_files()
    form = find_format(name, files, sequence_length)
    chosen = _choose(place, files, form)
    about = form.describe(chosen)
    read = functools.partial(_read_file, place, form, about)
    records, parts, counts, blocks = [], [], [], []
    largest: dict[str, int] = {}
    for found in map_in_processes(read, chosen, num_processes):
        records.append(found.record)
        blocks.append(found.blocks)
        for leaf, value in found.largest.items():
            largest[leaf] = max(value, largest.get(leaf, value))
        if not form.is_strided:
            parts.append(pack_rows(found.scan.starts, found.scan.sizes))
        if found.scan.counts is not None:
            counts.append(found.scan.counts)
    table = b"".join(parts)
    manifest = DataManifest(
        form.name, records, about | {"largest": largest}, blake3(table).hexdigest(), b"".join(blocks)
    )
    folder, storage = place.index_folder, place.storage
    storage.write(f"{folder}/{RECORDS}", table)
    storage.write(f"{folder}/{BLOCKS}", manifest.blocks)
    if form.is_grouped:
        storage.write(f"{folder}/{COUNTS}", np.concatenate(counts).astype("<i8").tobytes())
    storage.write(f"{folder}/{MANIFEST}", manifest.to_json().encode())  # last: an index without it is none
    return manifest


def stride_rows(stride: Stride, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places of regular records."""
    return np.stack([stride.begin + rows * stride.step, np.full(len(rows), stride.num_bytes, np.int64)], axis=1)


@dataclass(frozen=True)
class _Found:
    """What reading a file found."""

    record: FileRecord
    scan: Scan
    blocks: bytes
    largest: dict[str, int]


def _read_file(place: Place, form: Format, about: dict[str, Any], file: FileInfo) -> _Found:
    """Return digests, records and largest numbers of a file."""
    whole, blocks = blake3(), []
    for start in range(0, file.num_bytes, BLOCK_BYTES):
        block = place.storage.read(file.path, start, min(BLOCK_BYTES, file.num_bytes - start))
        whole.update(block)
        blocks.append(blake3(block).digest())
    scan = form.scan(place.storage, file)
    record = FileRecord(
        file.path, file.num_bytes, scan.num_records, scan.num_samples, whole.hexdigest(), about=scan.about
    )
    largest: dict[str, int] = {}
    for start, num_bytes in [] if form.is_strided else zip(scan.starts.tolist(), scan.sizes.tolist(), strict=True):
        content = place.storage.read(file.path, start, num_bytes)
        for sample in form.decode(file.path, {**about, **scan.about}, start, content):
            for leaf, value in sample.items():
                if type(value) is int and leaf != KEY:
                    largest[leaf] = max(value, largest.get(leaf, value))
    return _Found(record, scan, b"".join(blocks), largest)


def _list_ignored(files: Sequence[FileInfo], manifest: DataManifest, form: Format) -> list[str]:
    """Return files beside those of a data set that someone may take for a part of it.

    They have the ending of its format or of other shards; images count where images are the data.
    """
    others = [other for other in FORMATS.values() if not other.is_strided and not other.is_one_shard]
    endings = {*form.suffixes, *(ending for other in others for ending in other.suffixes)}
    if form.is_one_shard:
        endings.update(_IMAGES)
    used = {file.path for file in manifest.files}
    unused = [file.path for file in files if file.path not in used and not is_cache(file.path)]
    return [path for path in unused if path.lower().endswith(tuple(endings))]


def _choose(place: Place, files: Sequence[FileInfo], form: Format) -> list[FileInfo]:
    chosen = list(files) if place.name else form.choose(files)
    if not place.name:
        _compare_named(place, files, chosen, form)
    if not chosen:
        raise DataError(
            f"{place} must hold files of format {form.name} ({', '.join(form.suffixes)}), but got none; check "
            "--data.path and --data.format"
        )
    return chosen


def _check_counts(place: Place, manifest: DataManifest, table: RecordTable, counts: NDArray[np.int64] | None) -> None:
    """Compare the numbers of records and samples that the parts of an index tell.

    Raises:
        DataError: The numbers differ.
    """
    ends = np.cumsum([0, *(file.num_records for file in manifest.files)])
    if ends[-1] != table.num_rows or (counts is not None and len(counts) != table.num_rows):
        raise _damaged(place, "numbers of records")
    told = [file.num_samples for file in manifest.files]
    if counts is None:
        found = np.diff(ends)
    else:
        sums = np.concatenate([[0], np.cumsum(counts)])
        found = sums[ends[1:]] - sums[ends[:-1]]
    if told != found.tolist() or (counts is not None and (counts < 0).any()):
        raise _damaged(place, "numbers of samples")


def _damaged(place: Place, what: str) -> DataError:
    return DataError(
        f"the index of {place} must be whole, but its {what} are damaged; make it again: paceline data index {place}"
    )


def _compare_named(place: Place, files: Sequence[FileInfo], chosen: Sequence[FileInfo], form: Format) -> None:
    """Compare the files with those that the data's own lists name, such as the ``index.json`` of MDS.

    Raises:
        DataError: A file is missing, or is not named.
    """
    here, named, folders = {file.path for file in chosen}, set[str](), set[str]()
    for file in files:
        names = form.list_named(place.storage, file)
        if names is None:
            continue
        named.update(names)
        folders.add(file.path.rpartition("/")[0])
        if missing := sorted(set(names) - here):
            raise DataError(f"{place} must hold {missing[0]}, which its {file.path} names; fetch it again")
    for path in sorted(here - named):
        if path.rpartition("/")[0] in folders:
            raise DataError(
                f"{place} must hold the files of format {form.name} that its own list names, but also holds {path}; "
                "move it elsewhere, or name it there"
            )


def _read_parts(storage: Storage, path: str) -> Iterator[bytes]:
    """Yield a file's bytes, in parts: a table of records may be large."""
    file = storage.find(path)
    for start in range(0, file.num_bytes if file else 0, _PART_BYTES):
        assert file is not None
        yield storage.read(path, start, min(_PART_BYTES, file.num_bytes - start))


def _join_counts(scans: Iterable[Scan]) -> NDArray[np.int64]:
    return np.concatenate([scan.counts for scan in scans if scan.counts is not None])
