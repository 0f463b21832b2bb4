"""Tar shards, named as WebDataset names them: files whose names are equal up to the first dot are one sample.

A record is the part of the shard with all files of one sample, headers included, so that one ranged read has it.
"""

import io
import itertools
import tarfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from paceline.data.formats.base import Format, Scan
from paceline.data.formats.files import StorageFile
from paceline.data.formats.leaves import KEY, Sample, check_leaves, decode_leaves, encode_leaves
from paceline.data.storage import FileInfo, Storage
from paceline.errors import BadSample, DataError

_BLOCK = 512
_FILES = b"07\0"
_GLOBAL = ord("g")
_EXTENDED = b"xgLK"
"""Types of entries that tell the name or size of the entry after them."""
_PASSED_OVER = b"5V"
"""Types of entries that hold nothing: folders, and the name of an archive."""
_OF_MACOS = (".DS_Store", "._")
"""Beginnings of the names of files that macOS puts beside others, which are no data."""
_REFUSED = {
    "1": ("a second link to a file", "pack with --hard-dereference"),
    "2": ("a link to a file", "pack with --dereference"),
    "S": ("a file with holes", "pack without --sparse"),
}
"""Names of entries that hold no content of a file, and what to do, by their type."""


class Tar(Format):
    """Tar shards with WebDataset names, such as ``000017.jpg`` and ``000017.cls``."""

    name: ClassVar[str] = "tar"
    suffixes: ClassVar[tuple[str, ...]] = (".tar",)

    def scan(self, storage: Storage, file: FileInfo) -> Scan:
        """Find the samples of a shard: only headers are read."""
        rows: list[tuple[int, int]] = []
        seen: set[str] = set()
        last, fields = None, set[str]()
        with StorageFile(storage, file, 1 << 16) as opened:
            for begin, end, name, _, _ in _list_members_of(opened.read_at, file.num_bytes, file.path, is_shard=True):
                key, field = _part_name(name)
                if key == last and field in fields:
                    raise DataError(
                        f"{file.path} must have each name once, but has {name} twice; write the shard anew, with other "
                        "names if these are two samples"
                    )
                if key != last and key in seen:
                    raise DataError(
                        f"{file.path} must have the files of one sample one after another, but {name} is apart from "
                        f"others of {key}; write the shard anew, sorted by name"
                    )
                if key == last:
                    rows[-1] = (rows[-1][0], end)
                else:
                    rows.append((begin, end))
                    seen.add(key)
                    fields = set()
                fields.add(field)
                last = key
        bounds = np.array(rows, dtype=np.int64).reshape(-1, 2)
        return Scan(bounds[:, 0], bounds[:, 1] - bounds[:, 0])

    def decode(self, path: str, about: Mapping[str, Any], start: int, content: bytes) -> Sequence[Sample]:
        """Return the sample of a record."""
        key = ""
        fields = []
        try:
            for _, _, name, begin, size in _list_members_of(
                lambda start, n: content[start : start + n], len(content), path
            ):
                key, field = _part_name(name)
                fields.append((field, content[begin : begin + size]))
            return [{KEY: key, **decode_leaves(fields)}]
        except (ValueError, DataError) as error:
            message = f"{path}: sample {key!r} must be whole, but: {error}; fetch the shard again"
            raise BadSample(message, path=path, key=key, reason=str(error)) from error

    def encode(self, samples: Sequence[Sample]) -> bytes:
        """Return a shard; entries have no times and no owners."""
        check_leaves(samples)
        buffer = io.BytesIO()
        used: set[str] = set()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as shard:
            for number, sample in enumerate(samples):
                key = str(sample.get(KEY) or f"{number:09d}").replace(".", "_")
                key = _find_free(key, number, used)
                used.add(key)
                for field, content in encode_leaves(sample):
                    if "/" in field:
                        raise DataError(f"a leaf's name must have no / for format tar, but got {field}; rename it")
                    entry = tarfile.TarInfo(f"{key}.{field}")
                    entry.size = len(content)
                    shard.addfile(entry, io.BytesIO(content))
        return buffer.getvalue()


def _find_free(key: str, number: int, used: Container[str]) -> str:
    """Return the key of a sample; with a number behind it if others have it."""
    numbered = (f"{key}-{more:09d}" for more in itertools.count(number))
    return next(name for name in itertools.chain([key], numbered) if name not in used)


def _part_name(name: str) -> tuple[str, str]:
    """Return a sample's key, with its folders, and the name of one of its leaves."""
    folder, slash, base = name.rpartition("/")
    key, _, field = base.partition(".")
    return folder + slash + key, field or "bin"


def _list_members_of(
    read_at: Callable[[int, int], bytes], num_bytes: int, path: str, *, is_shard: bool = False
) -> Iterator[tuple[int, int, str, int, int]]:
    """Yield each file of a shard: see `_list_members`.

    Raises:
        DataError: A header is damaged, or the shard ends inside a file.
    """
    try:
        yield from _list_members(read_at, num_bytes, path, is_shard=is_shard)
    except ValueError as error:  # such as a number that is none
        raise DataError(f"{path} must have whole headers, but: {error}; fetch it again") from error


def _list_members(
    read_at: Callable[[int, int], bytes], num_bytes: int, path: str, *, is_shard: bool
) -> Iterator[tuple[int, int, str, int, int]]:
    """Yield each file of a shard, or of a part: first and last byte with headers, name, place and size of its content.

    Raises:
        DataError: A header does not have its checksum, or the shard ends inside a file or without its end mark.
    """
    position, begin = 0, -1
    told: dict[str, str] = {}
    while position + _BLOCK <= num_bytes:
        header = read_at(position, _BLOCK)
        if not any(header):  # the end: blocks of zeros
            if is_shard:
                _check_end(read_at, position, num_bytes, path)
            return
        told_sum = int(header[148:156].strip(b"\0 ") or b"0", 8)
        if sum(header.translate(None, bytes(1))) - sum(header[148:156]) + 256 != told_sum:
            raise DataError(f"{path} must have a whole header at byte {position}, but got another checksum")
        size = int(told.pop("size", "0")) or _read_number(header[124:136])
        content = position + _BLOCK
        after = content + -(-size // _BLOCK) * _BLOCK
        if content + size > num_bytes:
            raise DataError(f"{path} must hold {size} bytes from byte {content} on, but has {num_bytes}; it was cut")
        begin = position if begin < 0 else begin
        kind = header[156]
        if kind in _EXTENDED:
            told |= _read_extended(kind, read_at(content, size))
        elif kind not in _PASSED_OVER:
            name = told.get("path") or _read_name(header)
            if not name.rpartition("/")[2].startswith(_OF_MACOS):
                _check_kind(chr(kind) if "sparse" not in told else "S", name, path)
                yield begin, min(after, num_bytes), name, content, size
        if kind not in _EXTENDED or kind == _GLOBAL:
            begin = -1
        if kind not in _EXTENDED:
            told = {}  # also after a folder
        position = after
    if is_shard:
        raise DataError(
            f"{path} must end with a block of {_BLOCK} zeros after its last file, but ends without one at byte "
            f"{num_bytes}; it was cut: fetch it again, or write it anew if it never had one"
        )


def _check_kind(kind: str, name: str, path: str) -> None:
    """Refuse an entry that holds no file's content: its leaf, or its sample, would be missing."""
    if ord(kind) in _FILES:
        return
    what, advice = _REFUSED.get(kind, (f"an entry of type {kind}", "leave it out"))
    raise DataError(f"{path} must hold files with their content, but {name} is {what}; {advice}")


def _check_end(read_at: Callable[[int, int], bytes], position: int, num_bytes: int, path: str) -> None:
    """Refuse a shard with more than zeros after its end mark: other readers would find samples there, or none."""
    for start in range(position, num_bytes, _BLOCK):
        if any(read_at(start, min(_BLOCK, num_bytes - start))):
            raise DataError(
                f"{path} must end with its first block of {_BLOCK} zeros, at byte {position}, but has more at byte "
                f"{start}; keep shards apart, or join them by tar --concatenate"
            )


def _read_name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0].decode()
    has_folder = header[257:263] == b"ustar\0" and header[345]
    return f"{header[345:500].split(bytes(1), 1)[0].decode()}/{name}" if has_folder else name


def _read_number(field: bytes) -> int:
    if field[0] & 0x80:  # of more than 8 GiB
        return int.from_bytes(field[1:], "big")
    return int(field.strip(b"\0 ") or b"0", 8)


def _read_extended(kind: int, content: bytes) -> dict[str, str]:
    """Return what an entry tells of the entry after it: its name and size, and whether it has holes."""
    if kind == ord("L"):
        return {"path": content.rstrip(b"\0").decode()}
    told: dict[str, str] = {}
    while kind == ord("x") and content:
        length = int(content.split(b" ", 1)[0])
        name, _, value = content[:length].split(b" ", 1)[1].rstrip(b"\n").partition(b"=")
        if name in (b"path", b"size"):
            told[name.decode()] = value.decode()
        elif name.startswith(b"GNU.sparse."):
            told["sparse"] = "yes"
        content = content[length:]
    return told
