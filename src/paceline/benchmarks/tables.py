"""Tables: rows that are printed for people, and written as JSON and for a page of documentation."""

import json as json_module
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from rich.console import Console
from rich.table import Table

from paceline.errors import SettingsError


@dataclass(frozen=True)
class TableRow(ABC):
    """A row of a table; its fields are what JSON gets.

    Attributes:
        headings: Headings of the columns.
    """

    headings: ClassVar[tuple[str, ...]]

    @abstractmethod
    def cells(self) -> tuple[str, ...]:
        """Return it as texts, one for each column."""


def print_table(rows: Sequence[TableRow]) -> None:
    """Print rows of one kind for people."""
    headings, *lines = _lines(rows)
    table = Table(*headings, box=None)
    for line in lines:
        table.add_row(*line)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # nothing to fit in, so nothing is cut
    console.print(table, markup=False)


def check_new_files(json: Path | None, markdown: Path | None) -> None:
    """Raise SettingsError where ``--json`` or ``--markdown`` cannot be written: before hours of work, not after."""
    if json is not None and json == markdown:
        raise SettingsError(f"--json and --markdown must be two files, but got {json} for both; name another")
    for path, option in ((json, "--json"), (markdown, "--markdown")):
        if path is not None and path.exists():
            raise SettingsError(f"{option} must be a new file, but {path} exists; choose another")
        if path is not None and not path.absolute().parent.is_dir():
            raise SettingsError(f"{option} must be in a folder that exists, but got {path}; make {path.parent}")


def write_files(rows: Sequence[TableRow], json: Path | None, markdown: Path | None, advice: str = "") -> None:
    """Write rows of one kind as JSON and as a table of a page of documentation, where a path is given.

    Advice comes after the table; the JSON is then an object with the advice and the rows, and else the rows alone.

    Raises:
        SettingsError: A file exists.
    """
    check_new_files(json, markdown)
    if json is not None:
        documents = [asdict(row) for row in rows]
        whole = {"advice": advice, "rows": documents} if advice else documents
        json.write_text(json_module.dumps(whole, indent=2) + "\n")
    if markdown is not None:
        table = format_markdown(rows)
        markdown.write_text(f"{table}\n{advice}\n" if advice else table)


def format_markdown(rows: Sequence[TableRow]) -> str:
    """Return rows of one kind as a table of a page of documentation."""
    headings, *lines = _lines(rows)
    lines = [headings, ("---",) * len(headings), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _lines(rows: Sequence[TableRow]) -> list[tuple[str, ...]]:
    """Return the headings, and then the cells of each row."""
    return [rows[0].headings if rows else (), *(row.cells() for row in rows)]
