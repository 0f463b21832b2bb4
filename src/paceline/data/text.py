"""Text and token files as samples of a language model.

Shapes: B samples of a batch, T tokens of a sample (`sequence_length`).
"""

import hashlib
import os
import stat
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from paceline.data.base import Data, Source, Spec, Splits
from paceline.data.local_path import LocalPath
from paceline.data.orders import Indices
from paceline.errors import DataError
from paceline.registry import register

Tokens = np.ndarray[tuple[int], np.dtype[Any]]

TOKEN_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")
SNIFFED_BYTES = 8192
SEPARATOR = b"\n"
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
)
"""Folders of the standard library that are left out: packages of others, tests, and tables."""


@register("text")
class Text(Data):
    """Bytes of text, or prepared tokens, cut into windows that do not overlap.

    A folder's files are joined by a newline, and each side of the split has whole files; of a single file the
    end is held out. A single file is memory-mapped; files of a folder are read into memory.
    """

    path: LocalPath | None = None
    """File of any text (its bytes are the tokens); a folder of such files; a file of tokens: ``.npy`` (one dim,
    of an integer type) or ``.bin`` (little-endian uint16). None: the Python standard library's own source.
    Below a folder a file counts as text if its first 8,192 bytes contain no zero byte; hidden files and
    folders (their names start with a dot) are ignored."""
    sequence_length: int = Field(128, ge=1)
    """Number of tokens in a sample."""
    held_out_fraction: float = Field(0.1, gt=0, lt=1)
    """Fraction of the bytes or tokens that is held out, as closely as whole files allow."""
    vocab_size: int = Field(256, ge=1)
    """Number of different tokens: 256 for bytes, more for most token files."""
    max_bytes: int | None = Field(None, ge=1)
    """Largest part of the data that is used: the start of a file, or files of a folder in the order of their
    names' hashes. None: all."""

    def open(self) -> Splits:
        """Open the text.

        Raises:
            DataError: The text is missing, empty, unreadable, of the wrong type, or too short for two windows.
        """
        path = standard_library() if self.path is None else self.path.expanduser()
        try:
            train, held_out = self._open_folder(path) if path.is_dir() else self._split(path, _open_file(path))
        except OSError as error:
            found = error.strerror or error
            raise DataError(
                f"{error.filename or path} must be readable, but got: {found}; check --data.path"
            ) from error
        return Splits(self._source(path, train), self._source(path, held_out))

    def _source(self, path: Path, tokens: Tokens) -> "TokenSource":
        return TokenSource(path, tokens, self.sequence_length, self.vocab_size)

    def _open_folder(self, folder: Path) -> tuple[Tokens, Tokens]:
        suffix, excluded = (".py", LEFT_OUT) if self.path is None else ("", frozenset[str]())
        files = limit_files(list(find_texts(folder, suffix, excluded)), self.max_bytes)
        if not files:
            raise DataError(f"{folder} must hold text files, but got none; give --data.path a folder or file of text")
        if len(files) == 1:
            return self._split(folder, _join(files))
        window = self.sequence_length + 1
        train, held_out = (_join(side) for side in _divide(files, self.held_out_fraction, window))
        for side, tokens in (("training", train), ("held-out", held_out)):
            if len(tokens) < window:
                raise DataError(
                    f"the {side} part of {folder} must hold at least data.sequence_length + 1 = {window} "
                    f"bytes, but got {len(tokens)}; shorten data.sequence_length or add text"
                )
        return train, held_out

    def _split(self, path: Path, tokens: Tokens) -> tuple[Tokens, Tokens]:
        if self.max_bytes is not None:
            tokens = tokens[: self.max_bytes // tokens.itemsize]
        window = self.sequence_length + 1
        if len(tokens) < 2 * window:
            raise DataError(
                f"{path} must hold at least 2 * (data.sequence_length + 1) = {2 * window} tokens, a "
                f"window to train on and one held out, but got {len(tokens)}; shorten "
                "data.sequence_length or add text"
            )
        num_held_out = round(len(tokens) * self.held_out_fraction)
        start = len(tokens) - min(max(num_held_out, window), len(tokens) - window)
        return tokens[:start], tokens[start:]


class TokenSource(Source):
    """Windows of a row of tokens: sample i has inputs from token i T on and targets from token i T + 1 on."""

    is_thread_safe = True

    def __init__(self, path: Path, tokens: Tokens, sequence_length: int, vocab_size: int):
        self.spec = Spec(num_classes=vocab_size, input_shape=(sequence_length,))
        self._path = path
        self._tokens = tokens
        self._sequence_length = sequence_length

    def __len__(self) -> int:
        """Return the number of whole windows."""
        return (len(self._tokens) - 1) // self._sequence_length

    def read(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs_BT and targets_BT, int64.

        Raises:
            DataError: A token is not below the vocabulary's size.
        """
        windows = np.lib.stride_tricks.sliding_window_view(self._tokens, self._sequence_length + 1)
        tokens = windows[:: self._sequence_length][indices].astype(np.int64)
        self._check(tokens)
        both = torch.from_numpy(tokens)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _check(self, tokens: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> None:
        if not tokens.size:
            return
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest >= 0 and highest < self.spec.num_classes:
            return
        found = lowest if lowest < 0 else highest
        advice = "write the file again" if lowest < 0 else f"set data.vocab_size to {highest + 1} or more"
        raise DataError(
            f"tokens of {self._path} must be from 0 to below data.vocab_size = {self.spec.num_classes}, "
            f"but got {found}; {advice}"
        )


@dataclass(frozen=True)
class _File:
    path: Path
    num_bytes: int


def standard_library() -> Path:
    """Return the folder of the Python standard library."""
    return Path(sysconfig.get_path("stdlib"))


def find_texts(folder: Path, suffix: str, excluded: frozenset[str]) -> Iterator[_File]:
    """Yield the text files below `folder` in the order of their relative names' hashes, each file once."""
    paths = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if name[0] != "." and name not in excluded]
        paths += [Path(parent, name) for name in names if name[0] != "." and name.endswith(suffix)]
    seen = set()
    for path in sorted(paths, key=lambda path: _stable_hash(path.relative_to(folder))):
        if not path.exists():  # a link to nothing
            continue
        status = path.stat()
        identity = status.st_dev, status.st_ino
        if stat.S_ISREG(status.st_mode) and status.st_size and identity not in seen and _is_text(path):
            seen.add(identity)  # a second link to it could end up on the other side
            yield _File(path, status.st_size)


def _raise(error: OSError) -> None:
    raise error


def _stable_hash(relative: Path) -> bytes:
    return hashlib.blake2b(os.fsencode(relative.as_posix()), digest_size=8).digest()


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(SNIFFED_BYTES)


def limit_files(files: list[_File], max_bytes: int | None) -> list[_File]:
    """Return the first of `files` up to `max_bytes`, the last one cut."""
    if max_bytes is None:
        return files
    limited = []
    for file in files:
        num_bytes = min(file.num_bytes, max_bytes)
        if num_bytes:
            limited.append(_File(file.path, num_bytes))
        max_bytes -= num_bytes
    return limited


def _divide(files: list[_File], fraction: float, window: int) -> tuple[list[_File], list[_File]]:
    """Return the training files and the held-out ones; neither list is empty.

    Each file that still fits into the fraction is held out, in order. If these are too short for a window, the
    shortest other file that has one joins them.
    """
    train: list[_File] = []
    held_out: list[_File] = []
    budget = fraction * sum(file.num_bytes for file in files)
    for file in files:
        fits = file.num_bytes <= budget
        (held_out if fits else train).append(file)
        budget -= file.num_bytes * fits
    if sum(file.num_bytes for file in held_out) < window and len(train) > 1:
        by_length = sorted(train, key=lambda file: file.num_bytes)
        moved = next((file for file in by_length if file.num_bytes >= window), by_length[0])
        train.remove(moved)
        held_out.append(moved)
    return train, held_out


def _join(files: list[_File]) -> Tokens:
    parts = []
    for file in files:
        with file.path.open("rb") as opened:
            parts.append(opened.read(file.num_bytes))
    return np.frombuffer(SEPARATOR.join(parts), dtype=np.uint8)


def _open_file(path: Path) -> Tokens:
    num_bytes = path.stat().st_size
    if not num_bytes:
        raise DataError(f"{path} must hold text or tokens, but got an empty file; give --data.path another")
    if path.suffix == ".npy":
        return _open_npy(path)
    if path.suffix != ".bin":
        return np.memmap(path, dtype=np.uint8, mode="r")
    if num_bytes % 2:
        raise DataError(
            f"{path} must be a row of uint16 tokens, 2 bytes each, but got {num_bytes} bytes, an odd number; "
            "write it again, or name it otherwise if it is text"
        )
    return np.memmap(path, dtype="<u2", mode="r")


def _open_npy(path: Path) -> Tokens:
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, tokenize.TokenError) as error:  # NumPy lets Python's tokenizer read the header
        raise DataError(f"{path} must be a whole NumPy array file, but got: {error}; write it again") from error
    if tokens.ndim != 1 or tokens.dtype.name not in TOKEN_TYPES:
        raise DataError(
            f"{path} must be an array of one dim and of type {', '.join(TOKEN_TYPES)}, but got "
            f"{tokens.ndim} dims of {tokens.dtype}; write one row of integer tokens"
        )
    return tokens
