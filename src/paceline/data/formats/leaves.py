"""A sample's leaves: values under dotted names; and each leaf as bytes under a name that says its type.

A leaf ``mask`` that holds an array is the bytes of an ``.npy`` file under the name ``mask.npy``, as files of a tar
shard are named. Formats without types of their own keep leaves so.
"""

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.errors import DataError

Sample = dict[str, Any]
"""Leaves by dotted name: bytes, text, numbers, arrays, or what JSON holds; under `KEY` the sample's own name."""

KEY = "__key__"
"""Name of the leaf that holds the sample's own name."""
IMAGE_TYPES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpg", b"BM": "bmp", b"GIF8": "gif"}
"""First bytes of image files, and the ending of their names."""

_INTEGERS = frozenset({"cls", "cls2", "index", "count", "id"})
_TEXTS = frozenset({"txt", "text", "transcript"})
_JSON = frozenset({"json", "jsn"})
_BYTES = frozenset(
    {"bin", "png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff", "ppm", "wav", "flac", "mp3", "mp4"}
)
_IMAGES = frozenset({"jpeg", "webp", *IMAGE_TYPES.values()})
_KNOWN = _INTEGERS | _TEXTS | _JSON | _BYTES | {"npy"}


class NamedImage(bytes):
    """Bytes of a file whose name says that it is an image, but which do not begin like one."""


def name_image(ending: str, content: bytes) -> bytes:
    """Return the bytes of a file, marked if they are no image though the ending of its name says so."""
    return NamedImage(content) if ending in _IMAGES and not find_image_type(content) else content


def is_image(value: object) -> bool:
    """Return whether a leaf is to be decoded as an image: by its first bytes, or by the name of its file."""
    return isinstance(value, NamedImage) or bool(find_image_type(value))


def find_image_type(content: object) -> str:
    """Return the ending of an image file's name, such as ``png``, by its first bytes; empty if it is none."""
    if not isinstance(content, bytes):
        return ""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    return next((ending for magic, ending in IMAGE_TYPES.items() if content.startswith(magic)), "")


def flatten(sample: Mapping[str, Any], prefix: str = "") -> Sample:
    """Return the leaves of nested mappings under dotted names; tensors and array scalars as NumPy's and Python's.

    Raises:
        DataError: Two leaves have one name, as `a.b` and `b` in `a` have.
    """
    flat: Sample = {}
    for name, value in sample.items():
        if isinstance(value, Mapping) and value:
            leaves = flatten(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            leaves = {f"{prefix}{name}": value.detach().cpu().numpy()}
        else:
            leaves = {f"{prefix}{name}": value.item() if isinstance(value, np.generic) else value}
        if twice := flat.keys() & leaves.keys():
            raise DataError(f"a leaf must have a name of its own, but {min(twice)} is there twice; rename one of them")
        flat |= leaves
    return flat


def nest(sample: Sample) -> dict[str, Any]:
    """Return nested mappings of leaves with dotted names.

    Raises:
        DataError: A name is that of a leaf and of a mapping, as `a` beside `a.b` is.
    """
    if not any("." in name for name in sample):
        return sample
    tree: dict[str, Any] = {}
    for name, value in sample.items():
        *path, last = name.split(".")
        place = tree
        for part in path:
            inner = place.setdefault(part, {})
            if not isinstance(inner, dict):
                raise _holds_both(part)
            place = inner
        if last in place:
            raise _holds_both(last)
        place[last] = value
    return tree


def _holds_both(name: str) -> DataError:
    return DataError(f"a leaf must hold a value or further leaves, but {name} holds both; rename one of them")


def encode_leaves(sample: Sample) -> list[tuple[str, bytes]]:
    """Return the leaves as bytes, each under its name with the ending of its type; without the sample's own name.

    Raises:
        DataError: A leaf is of a type that no format stores.
    """
    return [encode_leaf(name, value) for name, value in sample.items() if name != KEY]


def encode_leaf(name: str, value: Any) -> tuple[str, bytes]:
    """Return a leaf's name with the ending of its type, and its bytes: see `encode_leaves`."""
    if isinstance(value, bytes | bytearray | memoryview):
        content = bytes(value)
        ending = find_image_type(content) or "bin"
        return (name if name == ending else f"{name}.{ending}"), content
    if isinstance(value, str):
        return _with_ending(name, _TEXTS, "txt"), encode_text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return _with_ending(name, _INTEGERS, "cls"), str(value).encode()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return _with_ending(name, {"npy"}, "npy"), encode_array(value)
    try:
        return _with_ending(name, _JSON, "json"), encode_text(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"a leaf must be bytes, text, a number, an array or JSON, but {name} is {type(value).__name__}; convert it"
        ) from error


def encode_bare(name: str, value: Any) -> tuple[str, bytes]:
    """Return a leaf as `encode_leaf` does, but for bytes, which stay under their name if that says no type."""
    if isinstance(value, bytes):
        return (f"{name}.bin" if name in _TEXTS or has_ending(name) else name), value
    field, content = encode_leaf(name, value)
    return (field if field in _TEXTS or has_ending(field) else f"{field}.{field}"), content


def has_ending(field: str) -> bool:
    """Return whether a leaf's name has an ending that says its type, such as ``mask.npy``."""
    return _part_ending(field)[0] != field


def decode_bare(name: str, content: bytes) -> str | bytes:
    """Return what `encode_bare` stored under a name without an ending: text if that is its name, else bytes."""
    return decode_text(content) if name in _TEXTS else name_image(name.lower(), content)


def _with_ending(name: str, endings: frozenset[str] | set[str], ending: str) -> str:
    return name if name in endings else f"{name}.{ending}"


def decode_leaves(fields: Sequence[tuple[str, bytes]]) -> Sample:
    """Return the leaves of named bytes; those with an ending that is not known stay bytes.

    Raises:
        ValueError: Bytes are not what their ending says.
    """
    names = [_part_ending(name) for name, _ in fields]
    bare = [name for name, _ in names]
    is_clear = len(set(bare)) == len(bare)
    return {
        (name if is_clear else field): decode_leaf(ending, content)
        for (name, ending), (field, content) in zip(names, fields, strict=True)
    }


def _part_ending(field: str) -> tuple[str, str]:
    """Return a leaf's name and the ending that says its type: ``("image", "png")`` for ``image.png``."""
    name, dot, ending = field.rpartition(".")
    ending = ending.lower()
    return (name, ending) if dot and ending in _KNOWN else (field, ending)


def decode_leaf(ending: str, content: bytes) -> Any:
    """Return the value of a leaf's bytes: see `decode_leaves`."""
    if ending in _BYTES:
        return name_image(ending, content)
    if ending == "id" and not _is_plain_number(content):
        return decode_text(content)
    if ending in _INTEGERS:
        return int(content)
    if ending in _TEXTS:
        return content.decode()
    if ending in _JSON:
        return json.loads(content)
    if ending == "npy":
        return decode_array(content)
    return content


def _is_plain_number(content: bytes) -> bool:
    """Return whether bytes are a whole number as Python writes it, so that ``007`` and ``img_1`` are none."""
    try:
        return str(int(content)).encode() == content
    except ValueError:
        return False


def encode_text(text: str) -> bytes:
    """Return text as UTF-8.

    Raises:
        DataError: The text holds half of a pair of surrogates, which is no character.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"text must be of whole characters, but got half of one ({text[error.start]!r}) at character "
            f"{error.start}; replace it"
        ) from error


def describe_no_text(content: bytes, error: UnicodeDecodeError) -> str:
    """Return words on bytes that are no UTF-8, and what to do."""
    byte, place = content[error.start], error.start
    return f"byte {place} is {byte:#04x}; convert it, for instance by iconv -f latin1 -t utf-8"


def check_array(array: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Refuse an array of Python objects, or of several fields.

    Raises:
        DataError: The array is of objects or has fields.
    """
    if array.dtype.kind in "OV":
        raise DataError(f"an array must be of numbers to be stored, but got one of {array.dtype}; convert it")


def decode_text(content: bytes) -> str | bytes:
    """Return the text of bytes; the bytes if they are none."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content


def encode_array(array: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """Return the bytes of an ``.npy`` file."""
    check_array(array)
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array), allow_pickle=False)
    return buffer.getvalue()


def decode_array(content: bytes) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the array of an ``.npy`` file; objects, which would run code, are refused.

    Raises:
        ValueError: The bytes are no array.
    """
    array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    return to_native(np.asarray(array))


def to_native(array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array in this machine's byte order, which torch and most formats want."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def check_leaves(samples: Sequence[Sample]) -> None:
    """Refuse samples without leaves, of which tables have no rows and tar shards no entries.

    Raises:
        DataError: A sample has none.
    """
    if any(not sample.keys() - {KEY} for sample in samples):
        raise DataError("a sample must have leaves to be stored, but one has none; leave it out with a filter")
