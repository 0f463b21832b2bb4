"""Parquet files: a record is a row group; columns may be in the names of folders, such as ``label=3``."""

import base64
import functools
import io
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import unquote

import numpy as np

from paceline.data.formats.base import Format, Scan
from paceline.data.formats.columns import Rows, check_names, count_group_rows, import_pyarrow, make_table
from paceline.data.formats.files import RangeReader
from paceline.data.formats.leaves import Sample, check_leaves
from paceline.data.storage import FileInfo, Storage
from paceline.errors import BadSample, DataError

_NULL = "__HIVE_DEFAULT_PARTITION__"
"""Value of a folder whose rows have none."""


class Parquet(Format):
    """Parquet files; columns are leaves. One sample costs the reading of its row group: write small ones."""

    name: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")
    is_grouped: ClassVar[bool] = True

    def describe(self, files: Sequence[FileInfo]) -> dict[str, Any]:
        """Return for each column that is in the names of folders whether all its values are whole numbers."""
        values: dict[str, list[str]] = {}
        for file in files:
            for name, value in _list_partitions(file.path):
                values.setdefault(name, []).append(value)
        return {"partitions": {name: all(map(_is_number, those)) for name, those in values.items()}} if values else {}

    def scan(self, storage: Storage, file: FileInfo) -> Scan:
        """Read the footer."""
        pyarrow = import_pyarrow()
        try:
            opened = pyarrow.parquet.ParquetFile(RangeReader(storage, file.path, file.num_bytes))
            metadata = opened.metadata
            check_names(opened.schema_arrow, file.path)
            if twice := {name for name, _ in _list_partitions(file.path)}.intersection(opened.schema_arrow.names):
                raise DataError(
                    f"{file.path} must have each column once, but has {min(twice)} as one and in a folder's name; "
                    "rename the folder"
                )
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{file.path} must be a whole Parquet file, but: {error}; fetch it again") from error
        groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
        rows = [(*_find_range(group), group.num_rows) for group in groups if group.num_rows]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        footer = io.BytesIO()
        metadata.write_metadata_file(footer)
        about = {"footer": base64.b64encode(footer.getvalue()).decode(), "num_bytes": file.num_bytes}
        return Scan(table[:, 0], table[:, 1], table[:, 2], about=about)

    def decode(self, path: str, about: Mapping[str, Any], start: int, content: bytes) -> Sequence[Sample]:
        """Return the samples of a row group."""
        pyarrow = import_pyarrow()
        metadata, starts = _read_footer(about["footer"])
        numbers = about.get("partitions", {})
        shared = {name: int(value) if numbers.get(name) else value for name, value in _list_partitions(path)}
        try:
            opened = pyarrow.parquet.ParquetFile(
                RangeReader(None, path, about["num_bytes"], (start, content)),
                metadata=metadata,
                page_checksum_verification=True,
            )
            return Rows(opened.read_row_group(starts[start], use_threads=False), shared)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            message = f"{path}: the row group at byte {start} must be whole, but: {error}; fetch the file again"
            raise BadSample(message, path=path, key=str(start), reason=str(error)) from error

    def encode(self, samples: Sequence[Sample]) -> bytes:
        """Return a file of small row groups whose pages have checksums."""
        check_leaves(samples)
        table, buffer = make_table(samples), io.BytesIO()
        rows = count_group_rows(samples, table)
        import_pyarrow().parquet.write_table(
            table, buffer, row_group_size=rows, compression="zstd", use_dictionary=False, write_page_checksum=True
        )
        return buffer.getvalue()


def _list_partitions(path: str) -> list[tuple[str, str]]:
    """Return the columns that the names of a file's folders tell, as Hive and Spark write them, and their values."""
    parts = [folder.partition("=") for folder in path.split("/")[:-1]]
    return [(unquote(name), unquote(value)) for name, is_one, value in parts if name and is_one and value != _NULL]


def _is_number(value: str) -> bool:
    digits = value.removeprefix("-")
    return digits.isascii() and digits.isdigit() and value == str(int(value))


@functools.lru_cache(maxsize=64)
def _read_footer(footer: str) -> tuple[Any, dict[int, int]]:
    """Return the metadata, and the number of each row group by its first byte."""
    metadata = import_pyarrow().parquet.read_metadata(io.BytesIO(base64.b64decode(footer)))
    groups = range(metadata.num_row_groups)
    return metadata, {
        _find_range(metadata.row_group(place))[0]: place for place in groups if metadata.row_group(place).num_rows
    }


def _find_range(group: Any) -> tuple[int, int]:
    """Return first byte and size of a row group."""
    begins, ends = [], []
    for place in range(group.num_columns):
        column = group.column(place)
        pages = [column.data_page_offset]
        if column.has_dictionary_page:
            pages.append(column.dictionary_page_offset)
        begins.append(min(pages))
        ends.append(min(pages) + column.total_compressed_size)
    return min(begins), max(ends) - min(begins)
