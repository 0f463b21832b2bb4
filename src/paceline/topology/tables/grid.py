"""Carbon of a grid's electricity, and overhead of data centres."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from paceline.topology.tables.table import DatedRow, find_row, read_rows


class GridFactor(DatedRow):
    """Carbon of the electricity of a zone, mean over a year."""

    zone: str
    """Country by its three letters, world, or a name of one's own."""
    kg_co2e_per_kwh: float = Field(ge=0)
    """Mass of greenhouse gases, as that of CO2, for each kWh that is used."""
    source: str
    """Publication of the number."""


class Overhead(DatedRow):
    """Energy of a data centre for each unit that its machines use: power usage effectiveness."""

    place: str
    """Operator, average, none, or a name of one's own."""
    pue: float = Field(ge=1)
    """Ratio of all energy to that of machines."""
    source: str
    """Publication of the number."""


def read_grid(path: str | Path | None = None) -> list[GridFactor]:
    """Return the factors of a CSV file, or the shipped ones.

    Raises:
        SettingsError: The file cannot be read, or a row is wrong.
    """
    return read_rows(GridFactor, "grid", path)


def read_overheads(path: str | Path | None = None) -> list[Overhead]:
    """Return the overheads of a CSV file, or the shipped ones.

    Raises:
        SettingsError: The file cannot be read, or a row is wrong.
    """
    return read_rows(Overhead, "pue", path)


def find_factor(factors: Sequence[GridFactor], zone: str) -> GridFactor:
    """Return the factor of a zone.

    Raises:
        UnknownNameError: The table does not have it.
    """
    return find_row({factor.zone: factor for factor in factors}, zone, "a grid's zone")


def find_overhead(overheads: Sequence[Overhead], place: str) -> Overhead:
    """Return the overhead of a place.

    Raises:
        UnknownNameError: The table does not have it.
    """
    return find_row({overhead.place: overhead for overhead in overheads}, place, "a data centre's place")
