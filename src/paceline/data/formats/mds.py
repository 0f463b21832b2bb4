"""MDS shards of MosaicML Streaming: offsets, the columns' types as JSON, then the samples."""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from paceline.data.formats.base import Format, Scan
from paceline.data.formats.leaves import KEY, Sample, decode_array, encode_array, encode_text, to_native
from paceline.data.storage import FileInfo, Storage
from paceline.errors import BadSample, DataError

_SHAPE_TYPES = ("uint8", "uint16", "uint32", "uint64")
_ARRAY_TYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_ARRAY_CODES = {name: code for code, name in _ARRAY_TYPES.items()}
_INDEX = "index.json"


class MDS(Format):
    """MDS shards, not packed; columns are leaves. Pickled columns, which would run code, are refused."""

    name: ClassVar[str] = "mds"
    suffixes: ClassVar[tuple[str, ...]] = (".mds",)

    def choose(self, files: Sequence[FileInfo]) -> list[FileInfo]:
        """Return the shards.

        Raises:
            DataError: Shards are packed.
        """
        packed = [file.path for file in files if ".mds." in file.path]
        if packed:
            raise DataError(
                f"MDS shards must not be packed for single samples to be read, but got {packed[0]}; unpack them, or "
                "write them without compression"
            )
        return super().choose(files)

    def list_named(self, storage: Storage, file: FileInfo) -> list[str] | None:
        """Return the paths of the shards that an ``index.json`` names; None of another file."""
        folder, slash, name = file.path.rpartition("/")
        if name != _INDEX:
            return None
        try:
            shards = json.loads(storage.read(file.path))["shards"]
            return [f"{folder}{slash}{shard['raw_data']['basename']}" for shard in shards]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file.path} must be the index of MDS shards, but: {error!r}; fetch it again") from error

    def scan(self, storage: Storage, file: FileInfo) -> Scan:
        """Read the offsets and columns of a shard."""
        try:
            (num_samples,) = struct.unpack("<I", storage.read(file.path, 0, 4))
            offsets = np.frombuffer(storage.read(file.path, 4, 4 * (num_samples + 1)), dtype="<u4").astype(np.int64)
            begin = 4 + 4 * (num_samples + 1)
            columns = json.loads(storage.read(file.path, begin, int(offsets[0]) - begin))
            about = {name: columns[f"column_{name}"] for name in ("names", "encodings", "sizes")}
        except (ValueError, KeyError, struct.error) as error:
            raise DataError(f"{file.path} must be a whole MDS shard, but: {error}; fetch it again") from error
        if offsets[-1] != file.num_bytes or (np.diff(offsets) < 0).any():
            raise DataError(f"{file.path} must have {offsets[-1]} bytes, as its header says, but has {file.num_bytes}")
        for name, encoding in zip(about["names"], about["encodings"], strict=True):
            _find_reader(name, encoding, file.path)
        return Scan(offsets[:-1], np.diff(offsets), about=about)

    def decode(self, path: str, about: Mapping[str, Any], start: int, content: bytes) -> Sequence[Sample]:
        """Return the sample of a record."""
        sample: Sample = {}
        try:
            place = 4 * sum(size is None for size in about["sizes"])
            varying = iter(np.frombuffer(content[:place], dtype="<u4").tolist())
            for name, encoding, size in zip(about["names"], about["encodings"], about["sizes"], strict=True):
                size = next(varying) if size is None else size
                value = content[place : place + size]
                if len(value) < size:
                    raise ValueError(f"column {name} was cut")
                place += size
                leaf = name.removesuffix(".npy") if encoding == "bytes" and name != KEY else name
                sample[leaf] = _find_reader(name, encoding, path)(value)
        except (ValueError, IndexError, KeyError, StopIteration) as error:
            message = f"{path}: the sample at byte {start} must be whole, but: {error}; fetch the shard again"
            raise BadSample(message, path=path, key=str(start), reason=str(error)) from error
        return [sample]

    def encode(self, samples: Sequence[Sample]) -> bytes:
        """Return a shard."""
        columns = _choose_columns(samples)
        config = {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": [],
            "size_limit": None,
            "column_names": [name for name, _, _ in columns],
            "column_encodings": [encoding for _, encoding, _ in columns],
            "column_sizes": [8 if encoding in ("int", "float64") else None for _, encoding, _ in columns],
        }
        header = json.dumps(config, sort_keys=True).encode()
        rows = []
        for sample in samples:
            values = [(encoding, _write_value(encoding, sample[leaf])) for _, encoding, leaf in columns]
            sizes = [len(value) for encoding, value in values if encoding not in ("int", "float64")]
            rows.append(np.array(sizes, dtype="<u4").tobytes() + b"".join(value for _, value in values))
        begin = 4 + 4 * (len(rows) + 1) + len(header)
        offsets = begin + np.cumsum([0, *map(len, rows)])
        if offsets[-1] >= 1 << 32:
            raise DataError(f"an MDS shard must be below 4 GiB, but got {offsets[-1]} bytes; lower --shard_bytes")
        return struct.pack("<I", len(rows)) + offsets.astype("<u4").tobytes() + header + b"".join(rows)

    def finish(self, storage: Storage, files: Sequence[FileInfo]) -> None:
        """Write the index that the streaming package reads."""
        shards = []
        for file in self.choose(files):
            scan = self.scan(storage, file)
            columns = {f"column_{name}": scan.about[name] for name in ("encodings", "names", "sizes")}
            raw = {"basename": file.path, "bytes": file.num_bytes, "hashes": {}}
            fixed: dict[str, Any] = {
                "compression": None,
                "format": "mds",
                "hashes": [],
                "size_limit": None,
                "version": 2,
            }
            shards.append({**columns, **fixed, "raw_data": raw, "samples": scan.num_records, "zip_data": None})
        storage.write(_INDEX, json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode())


def _choose_columns(samples: Sequence[Sample]) -> list[tuple[str, str, str]]:
    """Return name, type and leaf of each column, which all samples have."""
    first = samples[0] if samples else {}
    other = next((sample for sample in samples if sample.keys() != first.keys()), None)
    if other is not None:
        raise DataError(
            f"samples must have the same leaves for format mds, but got {', '.join(first)} and {', '.join(other)}; "
            "take tar or jsonl"
        )
    columns = []
    for leaf in first:
        kinds = {_find_encoding(sample[leaf]) for sample in samples}
        encoding = kinds.pop() if len(kinds) == 1 else "json"
        if encoding == "bytes" and leaf.endswith(".npy"):
            raise DataError(f"a leaf of bytes must have no name that says an array, but got {leaf}; rename it")
        columns.append((f"{leaf}.npy", "bytes", leaf) if encoding == "npy" else (leaf, encoding, leaf))
    return columns


def _find_encoding(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "ndarray" if value.size and value.ndim and value.dtype.name in _ARRAY_CODES else "npy"
    if type(value) is int and not -(2**63) <= value < 2**63:
        return "json"
    return {bytes: "bytes", str: "str", int: "int", float: "float64"}.get(type(value), "json")


def _write_value(encoding: str, value: Any) -> bytes:
    if encoding == "ndarray":
        kind = next(place for place, name in enumerate(_SHAPE_TYPES) if max(value.shape) <= np.iinfo(name).max)
        shape = np.array(value.shape, dtype=_SHAPE_TYPES[kind]).tobytes()
        content: bytes = to_native(value).tobytes()
        return bytes([_ARRAY_CODES[value.dtype.name], value.ndim << 2 | kind]) + shape + content
    if encoding == "bytes":
        return value if isinstance(value, bytes) else encode_array(value)
    if encoding == "json":
        return _dump(value)
    return encode_text(value) if encoding == "str" else struct.pack("<q" if encoding == "int" else "<d", value)


def _dump(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except TypeError as error:
        raise DataError(f"a leaf must be of one type in all samples for format mds, but: {error}; take tar") from error


def _find_reader(name: str, encoding: str, path: str) -> Callable[[bytes], Any]:
    """Return what reads a value of a column.

    Raises:
        DataError: The type is not known, or would run code.
    """
    kind, _, settings = encoding.partition(":")
    if kind == "ndarray":
        return lambda content: _read_array(content, settings)
    if kind == "bytes" and name.endswith(".npy"):
        return decode_array
    if kind in _ARRAY_CODES:
        return lambda content: np.frombuffer(content, dtype=kind)[0].item()
    if kind not in _READERS:
        raise DataError(
            f"column {name} of {path} must be of a type that can be read safely, but is {encoding}; write it as "
            f"one of {', '.join(_READERS)}, ndarray"
        )
    return _READERS[kind]


_READERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "jpeg": bytes,
    "png": bytes,
    "str": bytes.decode,
    "int": lambda content: int(np.frombuffer(content, dtype="<i8")[0]),
    "str_int": lambda content: int(content.decode()),
    "str_float": lambda content: float(content.decode()),
    "json": json.loads,
}


def _read_array(content: bytes, settings: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array, whose type and shape are in the settings or before it."""
    dtype, _, dims = settings.partition(":")
    if not dtype:
        dtype, content = _ARRAY_TYPES[content[0]], content[1:]
    if dims:
        return np.frombuffer(content, dtype=dtype).reshape([int(dim) for dim in dims.split(",")])
    num_dims, kind = content[0] >> 2, _SHAPE_TYPES[content[0] % 4]
    size = num_dims * np.dtype(kind).itemsize
    shape = np.frombuffer(content[1 : 1 + size], dtype=kind)
    return np.frombuffer(content[1 + size :], dtype=dtype).reshape(shape)
