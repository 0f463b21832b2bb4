"""The contract: rows that describe training steps, read strictly. An answer to one is `answers.py`'s."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from paceline.errors import SettingsError
from paceline.registry import explain
from paceline.topology import Precision

VERSION = 1
Count = Annotated[int, Field(ge=1)]
Order = Literal["1f1b", "gpipe", "interleaved", "zero_bubble", "interleaved_zero_bubble"]


class _RowPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class SampleRow(_RowPart):
    """Size of one sample."""

    tokens: Count | None = None
    image: Annotated[list[Count], Field(min_length=3, max_length=3)] | None = None


class LayoutRow(_RowPart):
    """Ranks on each axis."""

    data: Count | None = None
    sharded: Count | None = None
    zero_stage: Literal[1, 2, 3] | None = None
    context: Count | None = None
    tensor: Count | None = None
    pipeline: Count | None = None


class PipelineRow(_RowPart):
    """Order of micro-batches on the pipeline axis."""

    order: Order | None = None
    stages_per_rank: Count | None = None


class MeasuredRow(_RowPart):
    """What was measured of a row."""

    step_s: Annotated[float, Field(gt=0)] | None = None
    memory_bytes: Annotated[float, Field(gt=0)] | None = None


class Row(_RowPart):
    """One row of the contract as it is written: None is what nobody knows."""

    id: str
    model: dict[str, Any]
    sample: SampleRow | None = None
    device: str | dict[str, Any] | None = None
    cluster: dict[str, Any] | None = None
    num_ranks: Count
    devices_per_host: Count | None = None
    layout: LayoutRow | None = None
    sequence_parallel: bool | None = None
    pipeline: PipelineRow | None = None
    micro_batch: Annotated[float, Field(gt=0)] | None = None
    global_batch: Annotated[float, Field(gt=0)] | None = None
    precision: Precision | None = None
    attention: Literal["eager", "fused"] | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    is_compiled: bool | None = None
    optimizer: str | None = None
    sync: dict[str, Any] | None = None
    stack: str | None = None
    family: str | None = None
    """Publication of a shipped row; no answer depends on it."""
    measured: MeasuredRow | None = None
    _refusal: str = PrivateAttr("")

    @property
    def refusal(self) -> str:
        """Reason why it cannot be priced: a number or a name out of range; empty if there is none."""
        return self._refusal

    @classmethod
    def refused(cls, row: Mapping[str, Any], reason: str) -> "Row":
        """Return a row of which only the reason is kept."""
        found = cls(id=row["id"], model={}, num_ranks=1)
        found._refusal = reason
        return found


_OUT_OF_RANGE = {"greater_than", "greater_than_equal", "literal_error", "too_short", "too_long"}


def read_rows(document: object, what: str, *, measured: bool) -> list[Row]:
    """Return the rows of a document of the contract.

    Args:
        document: Parsed JSON.
        what: Name of the document, for messages.
        measured: Whether rows carry measurements: each must, or none may.

    Raises:
        SettingsError: The document is no such thing, has another version, or a row has an unknown or ill-typed field.
    """
    if not isinstance(document, Mapping) or set(document) != {"version", "rows"}:
        raise SettingsError(f'{what} must be {{"version": {VERSION}, "rows": [...]}}, but is not; write it so')
    if document["version"] != VERSION or isinstance(document["version"], bool):
        raise SettingsError(f"version of {what} must be {VERSION}, but got {document['version']!r}; write that form")
    if not isinstance(document["rows"], Sequence) or isinstance(document["rows"], str):
        raise SettingsError(f"rows of {what} must be a list, but got {document['rows']!r}; write one")
    rows = [
        read_row(row, f"row {number} of {what}", keeps_refused=not measured)
        for number, row in enumerate(document["rows"])
    ]
    for row in rows:
        if measured != (row.measured is not None):
            rule = "must have" if measured else "must not have"
            raise SettingsError(f"row {row.id} of {what} {rule} measured; {'add' if measured else 'remove'} it")
    return rows


def read_row(row: object, what: str, *, keeps_refused: bool = False) -> Row:
    """Return a row, read strictly.

    Args:
        row: Parsed JSON.
        what: Name of it, for messages.
        keeps_refused: Whether one with a number or a name out of range is a row with that reason, not an error.

    Raises:
        SettingsError: A field is unknown or ill-typed.
    """
    if isinstance(row, Mapping) and isinstance(row.get("id"), str):
        what = f"{what}, {row['id']}"
    try:
        return Row.model_validate(row)
    except ValidationError as error:
        is_out_of_range = {one["type"] for one in error.errors()} <= _OUT_OF_RANGE
        if keeps_refused and is_out_of_range and isinstance(row, Mapping) and isinstance(row.get("id"), str):
            return Row.refused(row, explain(error))
        raise SettingsError(f"{what}: {explain(error)}") from error
