"""All published tables that are predicted, in one: with it the page of reproductions is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.benchmarks.reproductions.base import Reproduction
from paceline.benchmarks.reproductions.predicted import PredictedRow, PredictedTable
from paceline.benchmarks.tables import TableRow, format_markdown
from paceline.errors import storing
from paceline.registry import list_variants, register

_INTRODUCTION = """# Published tables beside ours

Numbers that others have printed, beside what Paceline predicts or counts, and what does not add up. Nothing was fitted
to them. *90 %* is the interval of a prediction; *counted* is what follows from definitions and specifications alone.
Where a table does not say what it is of, settings of ours are fields of the command, which `--help` lists.

`paceline reproduce all --markdown reproductions.md` writes this page.
"""
_MEASURED = """## Measured, not predicted

These train, for minutes and more; {doc}`benchmarks` and {doc}`large_batch` have what was measured.

| command | what it is |
|---|---|
"""
_MISSING = """
## Not reproduced

| published | why |
|---|---|
| rates of decentralised training | theirs are orders of growth; `paceline compare gossip` measures ours |
| loss against time of ASGD and SSP | a figure without numbers; `paceline bench time_to_loss` measures ours |
| overlap of 60-80 and 40-60 % | of a network that is not stated; `paceline bench exposed` measures ours |
| storage of Lustre, GPFS, Ceph | no such file system is here; `paceline bench io` measures this machine's |
| four fault mechanisms | their recovery times are inputs of `paceline simulate failures`, so that nothing is compared |
| energy of DVFS, precision, attention | a cap is a choice of `paceline plan`, and no measured row is of one |
| pruning and quantisation | not measured |
| federated, neuromorphic, quantum training | rules of federated training are measured; the others not simulated |
"""


@dataclass(frozen=True)
class TabledRow(TableRow):
    """A row, with the table that it is of."""

    headings = ("table", *PredictedRow.headings)

    table: str
    row: PredictedRow

    def cells(self) -> tuple[str, ...]:
        """Return it as texts."""
        return self.table, *self.row.cells()


@register("all")
class AllTables(Reproduction):
    """All tables that are predicted, not measured; with --markdown as a page of documentation."""

    def reproduce(self) -> list[TabledRow]:
        """Predict them."""
        return [TabledRow(name, row) for name, table in list_predicted().items() for row in table().reproduce()]


def list_predicted() -> dict[str, type[PredictedTable]]:
    """Return the tables that are predicted, by name."""
    variants: dict[str, Any] = list_variants(Reproduction)
    return {name: variant for name, variant in variants.items() if issubclass(variant, PredictedTable)}


def write_page(rows: Sequence[TabledRow], path: Path) -> None:
    """Write rows of `AllTables` as a page.

    Raises:
        StorageError: The disk is full or read-only.
    """
    parts = [_INTRODUCTION]
    predicted = list_predicted()
    for name, table in predicted.items():
        words = _describe(table)
        of_table = [one.row for one in rows if one.table == name]
        parts.append(f"## {name}\n\n`paceline reproduce {name}`: {words}\n\n{format_markdown(of_table)}")
    variants: dict[str, Any] = list_variants(Reproduction)
    measured = {name: one for name, one in variants.items() if name not in predicted and one is not AllTables}
    lines = [f"| `paceline reproduce {name}` | {_describe(one).partition('. ')[0]} |" for name, one in measured.items()]
    parts.append(_MEASURED + "\n".join(lines) + "\n" + _MISSING)
    with storing(path):
        path.write_text("\n".join(parts))


def _describe(table: type[Reproduction]) -> str:
    """Return the docstring of a table as one paragraph."""
    return " ".join((table.__doc__ or "").split())
