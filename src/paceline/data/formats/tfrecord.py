"""TFRecord files of `tf.train.Example`: records with the CRCs of their length and of their content."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from paceline.data.formats.base import Format, Scan
from paceline.data.formats.crc32c import masked_crc32c
from paceline.data.formats.files import StorageFile
from paceline.data.formats.leaves import KEY, Sample, decode_bare, decode_leaves, encode_bare, has_ending
from paceline.data.storage import FileInfo, Storage
from paceline.errors import BadSample, DataError

_HEADER = 12
_FOOTER = 4
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class TFRecord(Format):
    """TFRecord files; features are leaves. Lists of one number are the number, longer ones arrays.

    Leaves that features cannot hold keep the ending of their type in their name, as in tar shards: ``mask.npy``. Bytes
    under a name without an ending are bytes, or text where the name is text, txt or transcript.
    """

    name: ClassVar[str] = "tfrecord"
    suffixes: ClassVar[tuple[str, ...]] = (".tfrecord", ".tfrecords", ".tfrec")
    has_digests: ClassVar[bool] = True

    def scan(self, storage: Storage, file: FileInfo) -> Scan:
        """Find the records by their lengths, whose CRCs are compared."""
        rows, position = [], 0
        with StorageFile(storage, file, 1 << 16) as opened:
            while position < file.num_bytes:
                size = _read_length(opened.read_at(position, _HEADER), file.path, position)
                whole = _HEADER + size + _FOOTER
                if position + whole > file.num_bytes:
                    raise DataError(f"{file.path} must have {whole} bytes from byte {position} on, but was cut")
                rows.append((position, whole))
                position += whole
        places = np.array(rows, dtype=np.int64).reshape(-1, 2)
        return Scan(places[:, 0], places[:, 1])

    def decode(self, path: str, about: Mapping[str, Any], start: int, content: bytes) -> Sequence[Sample]:
        """Return the sample of a record, after both CRCs are compared."""
        key = str(start)
        try:
            size = _read_length(content[:_HEADER], path, start)
            payload = content[_HEADER : _HEADER + size]
            if masked_crc32c(payload) != struct.unpack("<I", content[_HEADER + size : _HEADER + size + _FOOTER])[0]:
                raise DataError("the content does not have its CRC")
            return [_read_example(payload)]
        except (ValueError, IndexError, struct.error, DataError) as error:
            message = f"{path}: the record at byte {key} must be whole, but: {error}; fetch the file again"
            raise BadSample(message, path=path, key=key, reason=str(error)) from error

    def encode(self, samples: Sequence[Sample]) -> bytes:
        """Return a file of records."""
        parts = []
        for sample in samples:
            payload = _write_example(sample)
            length = struct.pack("<Q", len(payload))
            parts += [length, struct.pack("<I", masked_crc32c(length))]
            parts += [payload, struct.pack("<I", masked_crc32c(payload))]
        return b"".join(parts)


def _read_length(header: bytes, path: str, position: int) -> int:
    if len(header) < _HEADER or masked_crc32c(header[:8]) != struct.unpack("<I", header[8:])[0]:
        raise DataError(f"{path} must have a whole record at byte {position}, but its length does not have its CRC")
    return int(struct.unpack("<Q", header[:8])[0])


def _read_example(record: bytes) -> Sample:
    """Return the features of an Example."""
    sample: Sample = {}
    fields: list[tuple[str, bytes]] = []
    for _, features in _list_fields(record):
        for _, entry in _list_fields(features):
            parts = dict(_list_fields(entry))
            name = parts[1].decode()
            if not parts.get(2):
                continue  # a feature without a value
            kind, values = next(_list_fields(parts[2]))
            read = [value for _, value in _list_fields(values)] if kind == 1 else _read_numbers(kind, values)
            if kind == 1 and len(read) == 1 and name != KEY:
                fields.append((name, read[0]))
            else:
                sample[name] = read[0].decode() if name == KEY else _unpack(read)
    typed = iter(decode_leaves([field for field in fields if has_ending(field[0])]).items())
    names = sample.keys() | {name for name, _ in fields}
    for name, content in fields:
        leaf, value = next(typed) if has_ending(name) else (name, decode_bare(name, content))
        sample[name if leaf in names else leaf] = value
    return sample


def _unpack(values: Any) -> Any:
    if len(values) != 1:
        return values
    return values[0].item() if isinstance(values, np.ndarray) else values[0]


def _read_numbers(kind: int, content: bytes) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the values of a FloatList (2) or an Int64List (3), packed or one by one."""
    if kind == 2:
        return np.frombuffer(b"".join(value for _, value in _list_fields(content)), dtype="<f4")
    numbers = []
    for _, value in _list_fields(content):
        place = 0
        while place < len(value):
            number, place = _read_varint(value, place)
            numbers.append(number - (number >> 63 << 64))
    return np.array(numbers, dtype=np.int64)


def _list_fields(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each field of a protocol buffer."""
    place = 0
    while place < len(content):
        tag, place = _read_varint(content, place)
        begin, kind = place, tag & 7
        if kind == _BYTES:
            size, begin = _read_varint(content, place)
            place = begin + size
        elif kind == _VARINT:
            _, place = _read_varint(content, place)
        elif kind in (_FIXED64, _FIXED32):
            place += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if place > len(content):
            raise ValueError("a field that ends after its record")
        yield tag >> 3, content[begin:place]


def _read_varint(content: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = content[place]
        number |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return number, place


def _write_example(sample: Sample) -> bytes:
    entries = []
    for name, value in sample.items():
        if type(value) is int and -(2**63) <= value < 2**63:
            feature = _field(3, _field(1, _varint(value % 2**64)))
        elif isinstance(value, float) and float(np.float32(value)) == value:
            feature = _field(2, _field(1, struct.pack("<f", value)))
        else:
            name, content = (name, str(value).encode()) if name == KEY else encode_bare(name, value)
            feature = _field(1, _field(1, content))
        entries.append(_field(1, _field(1, name.encode()) + _field(2, feature)))
    return _field(1, b"".join(entries))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)
