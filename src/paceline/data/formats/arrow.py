"""Arrow files and streams, and data sets that the datasets library has saved: a record is a record batch."""

import base64
import functools
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from paceline.data.formats.base import Format, Scan
from paceline.data.formats.columns import Rows, check_names, count_group_rows, import_pyarrow, make_table
from paceline.data.formats.files import RangeReader
from paceline.data.formats.leaves import Sample, check_leaves
from paceline.data.storage import FileInfo, Storage
from paceline.errors import BadSample, DataError

_MAGIC = b"ARROW1\0\0"
_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"""Marks of a stream's end, of today and of versions before 0.15."""


class Arrow(Format):
    """Arrow IPC files and streams; columns are leaves. One sample costs the reading of its record batch."""

    name: ClassVar[str] = "arrow"
    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather")
    is_grouped: ClassVar[bool] = True

    def scan(self, storage: Storage, file: FileInfo) -> Scan:
        """Find the record batches; all of the file is read."""
        pyarrow = import_pyarrow()
        opened = RangeReader(storage, file.path, file.num_bytes)
        if not (has_footer := opened.read(len(_MAGIC)) == _MAGIC):
            opened.seek(0)
        rows, schema, header = [], None, b""
        try:
            while (start := opened.tell()) < file.num_bytes:
                try:
                    message = pyarrow.ipc.read_message(opened)
                except EOFError:
                    break
                if message.type == "schema":
                    header = message.serialize().to_pybytes()
                    schema = pyarrow.ipc.read_schema(message)
                    check_names(schema, file.path)
                elif message.type == "record batch" and schema is not None:
                    batch = pyarrow.ipc.read_record_batch(message, schema)
                    rows.append((start, opened.tell() - start, batch.num_rows))
                else:
                    raise DataError(
                        f"{file.path} must hold plain columns, but holds a {message.type}; write it as parquet"
                    )
            _check_end(storage, file, start, len(rows) if has_footer else None)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{file.path} must be a whole Arrow file, but: {error}; fetch it again") from error
        table = np.array([row for row in rows if row[2]], dtype=np.int64).reshape(-1, 3)
        return Scan(table[:, 0], table[:, 1], table[:, 2], about={"schema": base64.b64encode(header).decode()})

    def decode(self, path: str, about: Mapping[str, Any], start: int, content: bytes) -> Sequence[Sample]:
        """Return the samples of a record batch."""
        pyarrow = import_pyarrow()
        try:
            message = pyarrow.ipc.read_message(pyarrow.py_buffer(content))
            batch = pyarrow.ipc.read_record_batch(message, _read_schema(about["schema"]))
            batch.validate(full=True)
            return Rows(batch)
        except (pyarrow.ArrowException, OSError, EOFError, ValueError) as error:
            message = f"{path}: the record batch at byte {start} must be whole, but: {error}; fetch the file again"
            raise BadSample(message, path=path, key=str(start), reason=str(error)) from error

    def encode(self, samples: Sequence[Sample]) -> bytes:
        """Return a stream of small record batches."""
        check_leaves(samples)
        table, buffer = make_table(samples), io.BytesIO()
        with import_pyarrow().ipc.new_stream(buffer, table.schema) as writer:
            writer.write_table(table, max_chunksize=count_group_rows(samples, table))
        return buffer.getvalue()


class HuggingFace(Arrow):
    """A data set, or a split of one, that `datasets.Dataset.save_to_disk` wrote."""

    name: ClassVar[str] = "hf"

    def choose(self, files: Sequence[FileInfo]) -> list[FileInfo]:
        """Return the Arrow files beside a ``state.json``: all of a data set, which has no splits.

        Raises:
            DataError: The folder holds several splits.
        """
        folders = {file.path.rpartition("/")[0] for file in files if file.path.rpartition("/")[2] == "state.json"}
        if len(folders) > 1:
            raise DataError(
                f"a data set must be one split, but got {', '.join(sorted(folders))}; give the folder of one of them"
            )
        chosen = [file for file in super().choose(files) if file.path.rpartition("/")[0] in folders]
        return [file for file in chosen if not is_cache(file.path)]

    def list_named(self, storage: Storage, file: FileInfo) -> list[str] | None:
        """Return the paths of the Arrow files that a ``state.json`` names; None of another file."""
        folder, slash, name = file.path.rpartition("/")
        if name != "state.json":
            return None
        try:
            return [f"{folder}{slash}{one['filename']}" for one in json.loads(storage.read(file.path))["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file.path} must name the files of a split, but: {error!r}; fetch it again") from error

    def finish(self, storage: Storage, files: Sequence[FileInfo]) -> None:
        """Write what the datasets library needs beside the shards."""
        names = [{"filename": file.path} for file in files if file.path.endswith(self.suffixes)]
        state: dict[str, Any] = {
            "_data_files": names,
            "_fingerprint": "0" * 16,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        storage.write("state.json", json.dumps(state, indent=2).encode())
        storage.write("dataset_info.json", b"{}")


def is_cache(path: str) -> bool:
    """Return whether a file is one in which the datasets library keeps what `map` and the like returned."""
    name = path.rpartition("/")[2]
    return name.startswith("cache-") and name.endswith(".arrow")


def _check_end(storage: Storage, file: FileInfo, end: int, num_batches: int | None) -> None:
    """Refuse a file that was cut between record batches, and streams that were joined, of which one would be read.

    Args:
        storage: Storage of the file.
        file: File.
        end: First byte after the last record batch.
        num_batches: Number of record batches that were found in a file with a footer; None of a stream.

    Raises:
        DataError: The file has other record batches than its footer says, or the stream no mark of its end.
    """
    opened = RangeReader(storage, file.path, file.num_bytes)
    if num_batches is not None:
        told = import_pyarrow().ipc.open_file(opened).num_record_batches
        if told != num_batches:
            raise DataError(
                f"{file.path} must hold {told} record batches, as its footer says, but has {num_batches}; fetch it "
                "again"
            )
        return
    opened.seek(end)
    if opened.read(max(map(len, _ENDS)) + 1) not in _ENDS:
        raise DataError(
            f"{file.path} must end with the mark of a stream's end, but has none at byte {end}, or more after it; it "
            "was cut, or is several streams: fetch it again, or write it anew if it never had one"
        )


@functools.lru_cache(maxsize=64)
def _read_schema(header: str) -> Any:
    pyarrow = import_pyarrow()
    return pyarrow.ipc.read_schema(pyarrow.ipc.read_message(pyarrow.py_buffer(base64.b64decode(header))))
