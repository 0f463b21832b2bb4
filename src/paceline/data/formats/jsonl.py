"""Lines of JSON: plain, or packed by gzip or Zstandard in frames that can be read alone."""

import base64
import gzip
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from paceline.data.formats.base import Format, Scan
from paceline.data.formats.files import StorageFile
from paceline.data.formats.leaves import Sample, check_array, encode_text, flatten, nest, to_native
from paceline.data.storage import FileInfo, Storage
from paceline.errors import BadSample, DataError, missing_extra

_PART_BYTES = 1 << 20
_FRAME_BYTES = 1 << 18
"""Size of the frames that are written, before packing: what is unpacked to read one sample."""
_BASE64 = "base64"
_SPACES = b" \t\r\n"
_IS_SPACE = np.isin(np.arange(256), list(_SPACES))


class JsonLines(Format):
    """Files of one JSON object a line; bytes are ``{"base64": ...}``, arrays have ``dtype`` and ``shape`` beside it."""

    name: ClassVar[str] = "jsonl"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")

    def scan(self, storage: Storage, file: FileInfo) -> Scan:
        """Find the lines that hold more than spaces."""
        ends, marks, num_marks = [0], [0], 0  # ends of lines, and what no space is before each
        for start in range(0, file.num_bytes, _PART_BYTES):
            part = storage.read(file.path, start, min(_PART_BYTES, file.num_bytes - start))
            marks_here = num_marks + np.cumsum(~_IS_SPACE[(letters := np.frombuffer(part, dtype=np.uint8))])
            newlines = np.flatnonzero(letters == ord("\n"))
            ends += (newlines + start + 1).tolist()
            marks += marks_here[newlines].tolist()
            num_marks = int(marks_here[-1])
        bounds = np.array([*ends, file.num_bytes], dtype=np.int64)
        is_line = np.diff([*marks, num_marks]) > 0
        return Scan(bounds[:-1][is_line], np.diff(bounds)[is_line])

    def decode(self, path: str, about: Mapping[str, Any], start: int, content: bytes) -> Sequence[Sample]:
        """Return the sample of a line."""
        return [_read_line(line, path, start) for line in (content,)]

    def encode(self, samples: Sequence[Sample]) -> bytes:
        """Return lines."""
        return b"".join(map(_write_line, samples))


class _Packed(Format):
    """Lines of JSON in frames, each of which holds whole lines."""

    is_grouped: ClassVar[bool] = True
    has_digests: ClassVar[bool] = True

    padding: ClassVar[bytes] = b""
    """Byte that may fill the room after a frame."""

    def make_unpacker(self) -> Any:
        """Return what unpacks one frame: it has `decompress`, `eof` and `unused_data`."""
        raise NotImplementedError

    def pack(self, content: bytes) -> bytes:
        """Return one frame."""
        raise NotImplementedError

    def scan(self, storage: Storage, file: FileInfo) -> Scan:
        """Find the frames; some that end inside a line are one record with those after them.

        All of the file is unpacked once. A file of one frame is read whole for any of its samples.
        """
        frames = _find_frames(self.make_unpacker, storage, file, self.padding)
        rows: list[tuple[int, int, int]] = []
        is_open = False
        for start, num_bytes, num_lines, ends_open in frames:
            if is_open:
                first, size, count = rows.pop()
                rows.append((first, size + num_bytes, count + num_lines))
            else:
                rows.append((start, num_bytes, num_lines))
            is_open = ends_open
        if is_open:  # the last line has no newline
            first, size, count = rows.pop()
            rows.append((first, size, count + 1))
        table = np.array([row for row in rows if row[2]], dtype=np.int64).reshape(-1, 3)
        return Scan(table[:, 0], table[:, 1], table[:, 2])

    def decode(self, path: str, about: Mapping[str, Any], start: int, content: bytes) -> Sequence[Sample]:
        """Return the samples of a record."""
        try:
            parts = []
            while content:
                unpacker = self.make_unpacker()
                parts.append(unpacker.decompress(content))
                if not unpacker.eof:
                    raise ValueError("a frame was cut")
                content = unpacker.unused_data.lstrip(self.padding) if self.padding else unpacker.unused_data
        except Exception as error:  # each package has errors of its own
            message = f"{path}: the frame at byte {start} must be whole, but: {error}; fetch the file again"
            raise BadSample(message, path=path, key=str(start), reason=str(error)) from error
        lines = b"".join(parts).split(b"\n")
        return [_read_line(line, path, start) for line in lines if line.strip(_SPACES)]

    def encode(self, samples: Sequence[Sample]) -> bytes:
        """Return lines in frames."""
        frames, lines, size = [], [], 0
        for sample in samples:
            lines.append(_write_line(sample))
            size += len(lines[-1])
            if size >= _FRAME_BYTES:
                frames.append(self.pack(b"".join(lines)))
                lines, size = [], 0
        return b"".join([*frames, self.pack(b"".join(lines))] if lines else frames)


class JsonLinesGzip(_Packed):
    """Lines of JSON, packed by gzip; members of a file are read alone."""

    name: ClassVar[str] = "jsonl_gz"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl.gz", ".ndjson.gz", ".json.gz")
    padding: ClassVar[bytes] = b"\0"

    def make_unpacker(self) -> Any:
        """Return what unpacks one member."""
        return zlib.decompressobj(wbits=31)

    def pack(self, content: bytes) -> bytes:
        """Return one member, without a time."""
        return gzip.compress(content, compresslevel=6, mtime=0)


class JsonLinesZstd(_Packed):
    """Lines of JSON, packed by Zstandard; frames of a file are read alone."""

    name: ClassVar[str] = "jsonl_zst"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl.zst", ".ndjson.zst", ".json.zst")

    def make_unpacker(self) -> Any:
        """Return what unpacks one frame."""
        return _import_zstandard().ZstdDecompressor().decompressobj()

    def pack(self, content: bytes) -> bytes:
        """Return one frame, with a checksum."""
        packed: bytes = _import_zstandard().ZstdCompressor(level=3, write_checksum=True).compress(content)
        return packed


def _import_zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise missing_extra("zstandard", "formats", "reading and writing Zstandard files") from error
    return zstandard


def _find_frames(
    make_unpacker: Callable[[], Any], storage: Storage, file: FileInfo, padding: bytes
) -> list[tuple[int, int, int, bool]]:
    """Return first byte and size of each frame, the lines that end in it, and whether it ends inside a line.

    Lines of spaces do not count; an empty frame ends no line. Padding after a frame is a part of it.
    """
    frames, start, is_open = [], 0, False
    with StorageFile(storage, file) as opened:
        while start < file.num_bytes:
            unpacker, position, num_lines = make_unpacker(), start, 0
            while not unpacker.eof:
                part = opened.read_at(position, _PART_BYTES)
                try:
                    unpacked = unpacker.decompress(part) if part else b""
                except Exception as error:
                    raise DataError(f"{file.path} must hold whole frames, but that at byte {start}: {error}") from error
                if not part:
                    raise DataError(f"{file.path} must end with a whole frame, but that at byte {start} was cut")
                position += len(part)
                num_here, is_open = _count_lines(unpacked, is_open)
                num_lines += num_here
            position = _pass_over(opened, position - len(unpacker.unused_data), padding)
            frames.append((start, position - start, num_lines, is_open))
            start = position
    return frames


def _pass_over(opened: StorageFile, position: int, padding: bytes) -> int:
    """Return the position of the first byte, from one on, that is no padding."""
    while padding and (part := opened.read_at(position, _PART_BYTES)):
        rest = part.lstrip(padding)
        position += len(part) - len(rest)
        if rest:
            break
    return position


def _count_lines(content: bytes, is_open: bool) -> tuple[int, bool]:
    """Return the number of lines with more than spaces that end in the content, and whether one is open after it.

    Args:
        content: Part of a file.
        is_open: Whether a line with more than spaces is open before it.
    """
    *ended, last = content.split(b"\n")
    num_lines = sum(1 for line in ended if line.strip(_SPACES))
    if ended and is_open and not ended[0].strip(_SPACES):
        num_lines += 1
    return num_lines, bool(last.strip(_SPACES)) or (is_open and not ended)


def _read_line(line: bytes, path: str, start: int) -> Sample:
    try:
        sample = json.loads(line, object_pairs_hook=_make_object)
        if not isinstance(sample, dict):
            raise ValueError(f"it is no object but {type(sample).__name__}")
        if _is_hidden(sample):
            raise ValueError(f"{_BASE64!r} says that it is one value, and not leaves with names")
        return {name: _read_value(value) for name, value in flatten(_hide(sample)).items()}
    except (ValueError, KeyError, TypeError, DataError, RecursionError) as error:
        message = f"{path}: the line at byte {start} must be a JSON object, but: {error}; mend or remove it"
        raise BadSample(message, path=path, key=str(start), reason=str(error)) from error


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, of which no key hides another."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return made


class _Hidden:
    """A mapping that is one value."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value


def _hide(value: Any) -> Any:
    """Return a tree whose bytes and arrays are no mappings."""
    if not isinstance(value, dict):
        return value
    return _Hidden(value) if _is_hidden(value) else {name: _hide(inner) for name, inner in value.items()}


def _is_hidden(value: dict[str, Any]) -> bool:
    """Return whether an object stands for bytes or an array."""
    return _BASE64 in value and value.keys() <= {_BASE64, "dtype", "shape"}


def _seems_hidden(tree: dict[str, Any]) -> bool:
    """Return whether leaves that are written would be read as bytes or an array."""
    return _is_hidden(tree) or any(_seems_hidden(inner) for inner in tree.values() if isinstance(inner, dict))


def _read_value(value: Any) -> Any:
    if not isinstance(value, _Hidden):
        return value
    content = base64.b64decode(value.value[_BASE64], validate=True)
    if "dtype" not in value.value:
        return content
    return to_native(np.frombuffer(content, dtype=value.value["dtype"]).reshape(value.value["shape"]))


def _write_line(sample: Sample) -> bytes:
    tree = nest({name: _write_value(value) for name, value in sample.items()})
    if _seems_hidden(tree):
        raise DataError(
            f"leaves must not be named {_BASE64} alone for JSON lines, where that marks bytes and arrays, but some of "
            f"{', '.join(sample)} are; rename them, or take tar"
        )
    try:
        return encode_text(json.dumps(tree, ensure_ascii=False, default=_show)) + b"\n"
    except TypeError as error:
        raise DataError(f"a leaf must be bytes, text, a number, an array or JSON, but: {error}; convert it") from error


def _write_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return _Hidden({_BASE64: base64.b64encode(value).decode()})
    if isinstance(value, np.ndarray):
        check_array(value)
        content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return _Hidden({_BASE64: content, "dtype": value.dtype.str, "shape": list(value.shape)})
    return value


def _show(value: Any) -> dict[str, Any]:
    """Return the mapping that stands for a value of JSON's own types."""
    if isinstance(value, _Hidden):
        return value.value
    raise TypeError(f"it is {type(value).__name__}")
