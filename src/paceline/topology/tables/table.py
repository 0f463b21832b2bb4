"""Tables as CSV files with a header: read strictly, and refused with the line that is wrong."""

import csv
import functools
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from paceline.errors import SettingsError, unknown_name
from paceline.registry import Settings, explain

TABLES = ("prices", "grid", "pue")
"""Names of the shipped tables."""
OLD_DAYS = 180
"""Age of a price or factor above which it is warned of."""

R = TypeVar("R", bound="DatedRow")


class DatedRow(Settings):
    """A row of a table: numbers of one day."""

    as_of: date
    """Day of the numbers."""

    def count_days(self, today: date | None = None) -> int:
        """Return the age of the row in days; `today` is for tests."""
        return ((today or datetime.now(tz=UTC).date()) - self.as_of).days


def read_shipped(name: str) -> str:
    """Return the text of a shipped table, to begin one's own from.

    Raises:
        SettingsError: There is no such table.
    """
    if name not in TABLES:
        raise SettingsError(f"a table must be one of {', '.join(TABLES)}, but got {name!r}; choose one")
    return files("paceline.topology.tables").joinpath(f"{name}.csv").read_text(encoding="utf-8")


def read_rows(kind: type[R], name: str, path: str | Path | None) -> list[R]:
    """Return the rows of the CSV file at `path`, or of the shipped table `name`.

    Raises:
        SettingsError: The file cannot be read, has other columns, or a row is wrong; the message names its line.
    """
    if path is None:
        return list(_read_shipped_rows(kind, name))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} must be a CSV file that can be read, but got {error}; check the path") from error
    return _parse_rows(kind, text, str(path))


def find_row(rows: Mapping[str, R], name: str, what: str) -> R:
    """Return the row of a name.

    Raises:
        UnknownNameError: There is none; the message says `what` was looked for.
    """
    if name not in rows:
        raise unknown_name(what, name, rows)
    return rows[name]


@functools.cache
def _read_shipped_rows(kind: type[R], name: str) -> tuple[R, ...]:
    return tuple(_parse_rows(kind, read_shipped(name), f"the shipped table {name}"))


def _parse_rows(kind: type[R], text: str, what: str) -> list[R]:
    reader = csv.DictReader(text.splitlines())
    _check_columns(reader.fieldnames or (), kind, what)
    rows = []
    for cells in reader:
        try:
            rows.append(kind.model_validate({key: value or None for key, value in cells.items()}))
        except ValidationError as error:
            raise SettingsError(f"{what}, line {reader.line_num}: {explain(error)}") from error
    if not rows:
        raise SettingsError(f"{what} must have a row below its header, but has none; add one")
    return rows


def _check_columns(found: Sequence[str], kind: type[DatedRow], what: str) -> None:
    fields = kind.model_fields
    missing = [name for name, field in fields.items() if field.is_required() and name not in found]
    unknown = [name for name in found if name not in fields]
    if missing or unknown:
        known = ",".join(fields)
        raise SettingsError(f"the header of {what} must be {known}, but got {','.join(found)}; write it so")
