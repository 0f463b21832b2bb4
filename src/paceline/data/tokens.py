"""Tokens of documents: of their bytes, or by a tokenizer; made once where there is a folder to keep them."""

import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from paceline.data.orders import Indices
from paceline.errors import DataError, missing_extra

NUM_BYTES = 256
_BATCH = 1000
"""Documents that a tokenizer is given at a time."""
_VERSION = b"3"
"""Version of the files that are kept: other tokens for the same texts and tokenizer need another one."""


class Documents(NamedTuple):
    """Tokens of documents, one after another."""

    tokens: np.ndarray[Any, np.dtype[Any]]
    """Tokens of all documents."""
    offsets: Indices
    """First token of each document; after the last the number of tokens."""
    vocab_size: int

    @property
    def lengths(self) -> Indices:
        """Number of tokens of each document."""
        return np.diff(self.offsets)


def encode_documents(texts: Sequence[bytes], tokenizer: Path | None, cache: Path | None) -> Documents:
    """Return the tokens of texts, each a document.

    Args:
        texts: Texts, in UTF-8 where there is a tokenizer.
        tokenizer: File ``tokenizer.json`` of the package tokenizers, which encodes with all cores; None for bytes.
        cache: Folder that keeps tokens by the digest of texts and tokenizer: they are made by one process of a host,
            once; None to make them each time.

    Raises:
        DataError: The file is no tokenizer.
        MissingExtraError: The package is not installed.
    """
    if tokenizer is None:
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        tokens = np.frombuffer(b"".join(texts), dtype=np.uint8)
        return Documents(tokens, np.append(0, np.cumsum(lengths)), NUM_BYTES)
    if cache is None:
        return _encode(texts, tokenizer)
    kept = cache.expanduser() / _digest(texts, tokenizer)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{kept}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            _keep(_encode(texts, tokenizer), kept)
    vocab_size, offsets = np.load(kept / "vocab_size.npy"), np.load(kept / "offsets.npy")
    return Documents(np.load(kept / "tokens.npy", mmap_mode="r"), offsets, int(vocab_size))


def tokenise_samples(samples: Sequence[dict[str, Any]], tokenizer: Path) -> list[dict[str, Any]]:
    """Return samples with tokens in place of their text: the leaf ``text``, or the only one that is text.

    Args:
        samples: Samples as trees of leaves.
        tokenizer: File ``tokenizer.json`` of the package tokenizers.

    Raises:
        DataError: A sample has no text, or the file is no tokenizer.
        MissingExtraError: The package is not installed.
    """
    names = [_find_text(sample) for sample in samples]
    texts = [sample[name].encode() for sample, name in zip(samples, names, strict=True)]
    documents = encode_documents(texts, tokenizer, None)
    rows = np.split(documents.tokens, documents.offsets[1:-1])
    return [
        {key: value for key, value in sample.items() if key != name} | {"tokens": row}
        for sample, name, row in zip(samples, names, rows, strict=True)
    ]


def _find_text(sample: dict[str, Any]) -> str:
    found = [name for name, value in sample.items() if isinstance(value, str) and not name.startswith("__")]
    if "text" in found or len(found) == 1:
        return "text" if "text" in found else found[0]
    raise DataError(
        f"samples must have the leaf text, or one leaf that is text, to be tokenised, but got {', '.join(sample)}; "
        "rename one with --change"
    )


def _encode(texts: Sequence[bytes], path: Path) -> Documents:
    tokenizer = _open_tokenizer(path)
    vocab_size = max(tokenizer.get_vocab().values(), default=0) + 1  # numbers may be left out
    dtype = np.uint16 if vocab_size <= np.iinfo(np.uint16).max + 1 else np.uint32
    parts, lengths = [np.empty(0, dtype)], [0]
    for start in range(0, len(texts), _BATCH):
        decoded = [text.decode("utf-8", errors="replace") for text in texts[start : start + _BATCH]]
        for encoded in tokenizer.encode_batch(decoded, add_special_tokens=False):
            parts.append(np.array(encoded.ids, dtype=dtype))
            lengths.append(len(encoded.ids))
    return Documents(np.concatenate(parts), np.cumsum(lengths, dtype=np.int64), vocab_size)


def _open_tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise missing_extra("tokenizers", "tokenizers", "a tokenizer") from error
    try:
        tokenizer = Tokenizer.from_file(str(path.expanduser()))
    except Exception as error:  # the package raises nothing more special
        raise DataError(
            f"{path} must be a tokenizer.json of the package tokenizers, but got: {error}; check --data.tokenizer"
        ) from error
    tokenizer.no_truncation()  # files keep what their last user set; documents are cut and padded by what reads them
    tokenizer.no_padding()
    return tokenizer


def _keep(documents: Documents, folder: Path) -> None:
    """Write tokens into a new folder, which appears with all of its files."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tokens-") as made:
        inside = Path(made, "whole")
        inside.mkdir()
        np.save(inside / "tokens.npy", documents.tokens)
        np.save(inside / "offsets.npy", documents.offsets)
        np.save(inside / "vocab_size.npy", np.array(documents.vocab_size))
        os.replace(inside, folder)


def _digest(texts: Sequence[bytes], tokenizer: Path) -> str:
    digest = blake3(_VERSION)
    try:
        digest.update(tokenizer.expanduser().read_bytes())
    except OSError as error:
        raise DataError(f"{tokenizer} must be readable, but got: {error.strerror}; check --data.tokenizer") from error
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest(16)
