"""Layer 5: formats: how samples lie in files, found once by an index and then read by their ranges of bytes."""

from collections.abc import Sequence

from paceline.data.formats.arrow import Arrow, HuggingFace
from paceline.data.formats.base import Format
from paceline.data.formats.image_folder import ImageFolder
from paceline.data.formats.jsonl import JsonLines, JsonLinesGzip, JsonLinesZstd
from paceline.data.formats.mds import MDS
from paceline.data.formats.parquet import Parquet
from paceline.data.formats.tar import Tar
from paceline.data.formats.tfrecord import TFRecord
from paceline.data.formats.tokens import TextFiles, TokenFiles
from paceline.data.storage import FileInfo
from paceline.errors import DataError, unknown_name

__all__ = ["FORMATS", "Format", "find_format"]

FORMATS: dict[str, type[Format]] = {
    form.name: form
    for form in (
        *(Tar, Parquet, HuggingFace, Arrow, TFRecord, MDS, JsonLines, JsonLinesGzip, JsonLinesZstd),
        *(ImageFolder, TokenFiles, TextFiles),
    )
}


def find_format(name: str, files: Sequence[FileInfo], sequence_length: int | None = None) -> Format:
    """Return a format by its name, or by its files for ``auto``.

    Args:
        name: Name of the format, or ``auto``.
        files: Files of the data set.
        sequence_length: Number of tokens, or bytes, of a sample of tokens, or text.

    Raises:
        UnknownNameError: No format has the name.
        DataError: The files are of no format that is known.
    """
    if name == "auto":
        name = _detect(files)
    if name not in FORMATS:
        raise unknown_name("format", name, FORMATS)
    if name == "tokens":
        return TokenFiles(sequence_length or 128)
    return TextFiles(sequence_length) if name == "text" else FORMATS[name]()


def _detect(files: Sequence[FileInfo]) -> str:
    """Return the name of the format that most files are of; that of the first in the list where two are even."""
    counts = {name: len(form().choose(files)) for name, form in FORMATS.items()}
    best = max(counts, key=counts.__getitem__)
    if not counts[best]:
        endings = sorted({file.path.rpartition(".")[2] for file in files})[:5]
        raise DataError(
            f"files must be of a known format, but end in {', '.join(endings)}; give one of {', '.join(FORMATS)} "
            "(--data.format)"
        )
    return best
