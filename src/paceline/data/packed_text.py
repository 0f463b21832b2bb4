"""Documents of text, packed into rows in which none sees another.

Shapes: B rows of a batch, T tokens of a row (`sequence_length`).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from pydantic import Field
from torch import Tensor

from paceline.data.base import Data, Source, Spec, Splits
from paceline.data.formats.leaves import describe_no_text
from paceline.data.local_path import LocalPath
from paceline.data.masked_text import NOT_ASKED
from paceline.data.orders import Indices
from paceline.data.packing import PackingMethod, pack
from paceline.data.text import LEFT_OUT, find_texts, limit_files, standard_library
from paceline.data.tokens import Documents, encode_documents
from paceline.errors import DataError
from paceline.registry import register


@register("packed_text")
class PackedText(Data):
    """Documents of text, several in a row: a token sees only those before it in its own document.

    The loss is that of each document alone, a mean over all of their tokens but each one's first. Documents are held
    out whole, by the digest of their content, so that the same ones are in every run, and equal ones on one side.
    """

    path: LocalPath | None = None
    """Folder of text files, each a document; or one file, which is cut at `separator`. None: the Python standard
    library's own source."""
    separator: str = "\n\n"
    """Text between the documents of one file."""
    tokenizer: Path | None = None
    """File tokenizer.json of the package tokenizers; None: the tokens are bytes."""
    cache: Path | None = None
    """Folder that keeps the tokens, so that a tokenizer runs once; None: it runs at each start."""
    sequence_length: int = Field(128, ge=1)
    """Number of tokens in a row."""
    pack: PackingMethod = "best_fit"
    """Way to fill rows: best_fit cuts only documents longer than a row, and leaves some room; concatenate leaves none,
    and cuts a document at the end of most rows."""
    held_out_fraction: float = Field(0.1, gt=0, lt=1)
    """Fraction of the documents that is held out, on average."""
    max_bytes: int | None = Field(None, ge=1)
    """Largest part of a folder that is used, of files in the order of their names' hashes. None: all."""

    def open(self) -> Splits:
        """Open the text.

        Raises:
            DataError: The text is missing, or has fewer than two documents of two tokens.
            MissingExtraError: The package tokenizers is needed and not installed.
        """
        path = standard_library() if self.path is None else self.path.expanduser()
        try:
            texts = self._read_folder(path) if path.is_dir() else self._read_file(path)
        except OSError as error:
            found = error.strerror or error
            raise DataError(
                f"{error.filename or path} must be readable, but got: {found}; check --data.path"
            ) from error
        documents = encode_documents(texts, self.tokenizer, self.cache)
        is_long = documents.lengths > 1
        order = [number for number in np.argsort([_place(text) for text in texts], kind="stable") if is_long[number]]
        if len(order) < 2:
            raise DataError(
                f"{path} must hold two documents or more of two tokens or more, one to train on and one to hold "
                f"out, but got {len(order)}; check --data.path and --data.separator"
            )
        num_held_out = sum(_place(texts[number]) < self.held_out_fraction for number in order)
        num_held_out = min(max(num_held_out, 1), len(order) - 1)
        sides = (np.sort(order[num_held_out:]), np.sort(order[:num_held_out]))
        train, held_out = (PackedSource(documents, side, self.sequence_length, self.pack) for side in sides)
        return Splits(train, held_out)

    def _read_folder(self, folder: Path) -> list[bytes]:
        suffix, excluded = (".py", LEFT_OUT) if self.path is None else ("", frozenset[str]())
        files = limit_files(list(find_texts(folder, suffix, excluded)), self.max_bytes)
        return [self._read(file.path, file.num_bytes) for file in files]

    def _read_file(self, path: Path) -> list[bytes]:
        content = self._read(path, self.max_bytes)
        return (
            [part for part in content.split(self.separator.encode()) if part.strip()] if self.separator else [content]
        )

    def _read(self, path: Path, num_bytes: int | None) -> bytes:
        """Return the beginning of a file, which must be text where a tokenizer reads it; the end may cut a character.

        Raises:
            DataError: The file must be text in UTF-8, and is not.
        """
        whole = path.read_bytes()
        if self.tokenizer is not None:
            try:
                whole.decode()
            except UnicodeDecodeError as error:
                if num_bytes is None or error.start < num_bytes:
                    raise DataError(f"{path} must be text in UTF-8, but {describe_no_text(whole, error)}") from error
        return whole[:num_bytes]


class PackedSource(Source):
    """Rows of documents.

    Args:
        documents: Tokens of all documents.
        used: Documents of this source.
        sequence_length: Tokens of a row.
        method: Way to pack.
    """

    is_thread_safe = True

    def __init__(self, documents: Documents, used: Indices, sequence_length: int, method: PackingMethod) -> None:
        self.spec = Spec(documents.vocab_size, (sequence_length,))
        self._tokens, self._starts = documents.tokens, documents.offsets[used]
        self.packing = pack(documents.lengths[used] - 1, sequence_length, method)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.packing.num_rows

    def read(self, indices: Indices) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Return inputs, each x_BT: tokens, numbers of their documents in the row, places in them; and targets_BT.

        What is left of a row counts as one more document, without targets.
        """
        shape = (len(indices), self.spec.input_shape[0])
        tokens, documents, positions = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        targets = np.full(shape, NOT_ASKED, dtype=np.int64)
        for row, index in enumerate(indices):
            end = number = 0
            for document, start, length in self.packing.list_pieces(int(index)):
                first, place = self._starts[document] + start, slice(end, end + length)
                tokens[row, place] = self._tokens[first : first + length]
                targets[row, place] = self._tokens[first + 1 : first + length + 1]
                documents[row, place], positions[row, place] = number, np.arange(length)
                end, number = end + length, number + 1
            documents[row, end:], positions[row, end:] = number, np.arange(shape[1] - end)
        inputs: Any = tuple(torch.from_numpy(each) for each in (tokens, documents, positions))
        return inputs, torch.from_numpy(targets)


def _place(text: bytes) -> float:
    """Return a number from 0 to below 1 that depends on a document's content alone."""
    return int.from_bytes(blake3(text).digest(8), "little") / 2**64
