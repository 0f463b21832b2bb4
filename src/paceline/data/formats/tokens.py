"""Rows of tokens in ``.bin`` and ``.npy`` files, and text as rows of bytes: a sample is a window of them.

Windows lie side by side in each file and share one token: the last target of one is the first input of the next.
"""

import tokenize
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from paceline.data.formats.base import Format, Scan, Stride
from paceline.data.formats.files import RangeReader
from paceline.data.formats.leaves import KEY, Sample, describe_no_text, encode_text
from paceline.data.storage import FileInfo, Storage
from paceline.errors import BadSample, DataError

TOKEN_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")


class TokenFiles(Format):
    """Token files: ``.npy`` (one dim, of an integer type) or ``.bin`` (little-endian uint16); the leaf is ``tokens``.

    Args:
        sequence_length: Number of tokens of a sample, which has one more, the last one's target.
    """

    name: ClassVar[str] = "tokens"
    suffixes: ClassVar[tuple[str, ...]] = (".bin", ".npy")
    is_strided: ClassVar[bool] = True

    def __init__(self, sequence_length: int = 128) -> None:
        self._sequence_length = sequence_length

    def scan(self, storage: Storage, file: FileInfo) -> Scan:
        """Return the windows of a file."""
        begin, kind, num_tokens = self._find_row(storage, file)
        size = np.dtype(kind).itemsize
        length = self._sequence_length
        num_windows = max((num_tokens - 1) // length, 0)
        return Scan(stride=Stride(begin, length * size, (length + 1) * size, num_windows), about={"dtype": kind})

    def decode(self, path: str, about: Mapping[str, Any], start: int, content: bytes) -> Sequence[Sample]:
        """Return the sample of a window: its tokens."""
        return [{"tokens": np.frombuffer(content, dtype=about["dtype"])}]

    def _find_row(self, storage: Storage, file: FileInfo) -> tuple[int, str, int]:
        """Return the first byte, the type and the number of a file's tokens."""
        if not file.path.endswith(".npy"):
            if file.num_bytes % 2:
                raise DataError(
                    f"{file.path} must be a row of uint16 tokens, 2 bytes each, but got {file.num_bytes} bytes, an odd "
                    "number; write it again, or name it otherwise if it is text"
                )
            return 0, "<u2", file.num_bytes // 2
        opened = RangeReader(storage, file.path, file.num_bytes)
        try:
            version = np.lib.format.read_magic(opened)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(opened)
        except (ValueError, tokenize.TokenError) as error:  # NumPy lets Python's tokenizer read the header
            raise DataError(
                f"{file.path} must be a whole NumPy array file, but got: {error}; write it again"
            ) from error
        begin = opened.tell()
        if len(shape) != 1 or dtype.name not in TOKEN_TYPES:
            raise DataError(
                f"{file.path} must be an array of one dim and of type {', '.join(TOKEN_TYPES)}, but got {len(shape)} "
                f"dims of {dtype}; write one row of integer tokens"
            )
        if begin + shape[0] * dtype.itemsize != file.num_bytes:
            raise DataError(
                f"{file.path} must have {begin} + {shape[0]} * {dtype.itemsize} bytes, but has {file.num_bytes}; "
                "it was cut"
            )
        return begin, dtype.str, shape[0]

    def encode(self, samples: Sequence[Sample]) -> bytes:
        """Return the samples' tokens as one row: uint16, little-endian."""
        rows = [_find_tokens(sample) for sample in samples]
        joined = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        if joined.size and (joined.min() < 0 or joined.max() >= 1 << 16):
            raise DataError(
                f"tokens must be from 0 to 65535 for format tokens, but got {joined.min()} to {joined.max()}; "
                "take parquet"
            )
        return joined.astype("<u2").tobytes()

    def list_left_out(self, sample: Sample) -> list[str]:
        """Return all leaves but the tokens."""
        taken = "tokens" if "tokens" in sample else "input_ids"
        return [name for name in sample if name not in (KEY, taken)]


class TextFiles(Format):
    """Text files: with a `sequence_length` windows of their bytes, as ``tokens``; else each file one ``text``.

    Args:
        sequence_length: Number of bytes of a sample, which has one more; None for whole files.
    """

    name: ClassVar[str] = "text"
    suffixes: ClassVar[tuple[str, ...]] = (".txt", ".text", ".md", ".py")
    is_strided: ClassVar[bool] = True

    def __init__(self, sequence_length: int | None = None) -> None:
        self._sequence_length = sequence_length

    def scan(self, storage: Storage, file: FileInfo) -> Scan:
        """Return the windows of a file, or the whole of it."""
        length = self._sequence_length
        if length is None:
            return Scan(stride=Stride(0, 0, file.num_bytes, 1))
        return Scan(stride=Stride(0, length, length + 1, max((file.num_bytes - 1) // length, 0)))

    def decode(self, path: str, about: Mapping[str, Any], start: int, content: bytes) -> Sequence[Sample]:
        """Return the sample of a record."""
        if self._sequence_length is not None:
            return [{"tokens": np.frombuffer(content, dtype=np.uint8)}]
        try:
            return [{KEY: path.rpartition(".")[0], "text": content.decode()}]
        except UnicodeDecodeError as error:
            reason = describe_no_text(content, error)
            raise BadSample(f"{path} must be text in UTF-8, but {reason}", path=path, key="", reason=reason) from error

    def encode(self, samples: Sequence[Sample]) -> bytes:
        """Return the samples' texts, joined by a newline."""
        texts = [
            value for sample in samples for name, value in sample.items() if isinstance(value, str) and name != KEY
        ]
        if len(texts) != len(samples):
            raise DataError("a sample must have one text for format text, but not each has; take jsonl")
        return encode_text("\n".join(texts))

    def list_left_out(self, sample: Sample) -> list[str]:
        """Return all leaves but the text."""
        return [name for name, value in sample.items() if name != KEY and not isinstance(value, str)]


def _find_tokens(sample: Sample) -> np.ndarray[Any, np.dtype[Any]]:
    tokens = sample.get("tokens", sample.get("input_ids"))
    if not isinstance(tokens, list | np.ndarray):
        raise DataError(
            f"a sample must have tokens for format tokens, but has {', '.join(sample)}; turn text into "
            "tokens with a hook"
        )
    return np.asarray(tokens)
