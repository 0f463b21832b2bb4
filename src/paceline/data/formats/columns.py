"""Samples as columns of Arrow tables, and back: the types of leaves, and where columns lack them."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from paceline.data.formats.leaves import Sample, decode_array, encode_array, to_native
from paceline.errors import DataError, missing_extra

if TYPE_CHECKING:
    import pyarrow

GROUP_BYTES = 1 << 18
"""Size of the groups that are written: what is read for one sample."""
_CODING = b"paceline"
"""Key of a column's metadata that says how its values are coded, where Arrow has no type for them."""


def import_pyarrow() -> Any:
    """Return the package.

    Raises:
        MissingExtraError: The package is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise missing_extra("pyarrow", "formats", "reading and writing Parquet and Arrow files") from error
    return pyarrow


class Rows(Sequence[Sample]):
    """Rows of a table as samples, made when asked for.

    Args:
        table: Table or record batch.
        shared: Leaves that each row has beside its columns.
    """

    def __init__(self, table: "pyarrow.Table | pyarrow.RecordBatch", shared: Sample | None = None) -> None:
        self._table, self._shared = table, shared or {}
        self._codings = [(field.metadata or {}).get(_CODING, b"").decode() for field in table.schema]

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, row: int) -> Sample: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Sample]: ...
    def __getitem__(self, row: int | slice) -> Sample | Sequence[Sample]:
        """Return a sample: leaves that are null are left out."""
        if isinstance(row, slice):
            return [self[place] for place in range(*row.indices(len(self)))]
        sample: Sample = dict(self._shared)
        for place, (name, coding) in enumerate(zip(self._table.schema.names, self._codings, strict=True)):
            cell = self._table.column(place)[row]
            if cell.is_valid:
                _put(sample, name, _read_cell(cell, coding))
        return sample


def _put(sample: Sample, name: str, value: Any) -> None:
    """Put a value into a sample: fields of structures are leaves of their own."""
    if isinstance(value, dict):
        for inner, leaf in value.items():
            _put(sample, f"{name}.{inner}", leaf)
    else:
        sample[name] = value


def _read_cell(cell: Any, coding: str) -> Any:
    if coding == "npy":
        return decode_array(cell.as_py())
    if coding == "json":
        return json.loads(cell.as_py())
    pyarrow = import_pyarrow()
    kind = cell.type
    if isinstance(kind, pyarrow.FixedShapeTensorType):
        return cell.to_numpy()
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)
    if is_list and (
        pyarrow.types.is_floating(kind.value_type)
        or (pyarrow.types.is_integer(kind.value_type) and not cell.values.null_count)
    ):
        return cell.values.to_numpy(zero_copy_only=False)
    value = cell.as_py()
    if isinstance(value, dict) and value.keys() == {"bytes", "path"} and value["bytes"] is not None:
        return value["bytes"]  # an image or a sound as the datasets library keeps it
    return value


def check_names(schema: "pyarrow.Schema", path: str) -> None:
    """Refuse columns of which one would hide another.

    Raises:
        DataError: Two columns, with the names of structures before them, have one name.
    """
    names: set[str] = set()
    waiting = [(field.name, field.type) for field in schema]
    while waiting:
        name, kind = waiting.pop()
        if import_pyarrow().types.is_struct(kind):
            waiting += [(f"{name}.{inner.name}", inner.type) for inner in kind]
        elif name in names:
            raise DataError(f"{path} must have each column once, but has {name} twice; rename one of them")
        names.add(name)


def make_table(samples: Sequence[Sample]) -> "pyarrow.Table":
    """Return samples as a table, a column a leaf; a leaf that a sample lacks is null.

    Raises:
        DataError: A leaf cannot be stored.
    """
    pyarrow = import_pyarrow()
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    fields, columns = [], []
    for name in names:
        values = [sample.get(name) for sample in samples]
        kind, coding = _choose_type([sample[name] for sample in samples if name in sample])
        if coding == "npy":
            values = [None if value is None else encode_array(value) for value in values]
        elif coding == "json":
            values = [_dump(name, sample[name]) if name in sample else None for sample in samples]
        else:
            values = [to_native(value) if isinstance(value, np.ndarray) else value for value in values]
        fields.append(pyarrow.field(name, kind, metadata={_CODING: coding.encode()} if coding else None))
        try:
            columns.append(pyarrow.array(values, type=kind))
        except UnicodeEncodeError as error:
            raise DataError(f"text must be of whole characters, but leaf {name}: {error}; replace it") from error
    return pyarrow.table(columns, schema=pyarrow.schema(fields))


def count_group_rows(samples: Sequence[Sample], table: "pyarrow.Table") -> int:
    """Return the number of rows of a group, by their mean size."""
    return max(1, min(len(samples), GROUP_BYTES * len(samples) // max(1, table.nbytes))) if samples else 1


def _choose_type(values: Sequence[Any]) -> tuple[Any, str]:
    """Return the Arrow type that holds all values, and the coding that they need for it."""
    pyarrow = import_pyarrow()
    kinds = {type(value) for value in values}
    plain = {bytes: pyarrow.binary(), str: pyarrow.string(), bool: pyarrow.bool_(), float: pyarrow.float64()}
    if len(kinds) == 1 and (kind := kinds.pop()) in (*plain, int, np.ndarray):
        if kind is np.ndarray:
            dtypes = {value.dtype.newbyteorder("=") for value in values}
            if len(dtypes) == 1 and all(value.ndim == 1 for value in values) and values[0].dtype.kind in "iuf":
                return pyarrow.list_(pyarrow.from_numpy_dtype(dtypes.pop())), ""
            return pyarrow.binary(), "npy"
        if kind is not int:
            return plain[kind], ""
        if all(-(2**63) <= value < 2**63 for value in values):
            return pyarrow.int64(), ""
    return pyarrow.string(), "json"


def _dump(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError as error:
        raise DataError(f"leaf {name} must be of one type in all samples, or JSON, but: {error}; take tar") from error
