"""`paceline prices`: prices of hosts, carbon of grids and overhead of data centres."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from paceline.topology.tables import Price


def prices(
    csv: Annotated[
        str | None, typer.Option(help="Print a shipped table, prices, grid or pue, as CSV to begin your own from.")
    ] = None,
    table: Annotated[Path | None, typer.Option(help="CSV file of prices of your own, in place of the shipped.")] = None,
) -> None:
    """List what hosts cost, what carbon grids' electricity has, and what data centres use beside machines.

    Shipped prices are examples, and old ones are warned of: `paceline prices --csv prices > mine.csv`, then
    `--site.prices mine.csv` for a run.
    """
    from paceline.topology.tables import read_prices, read_shipped

    if csv is not None:
        typer.echo(read_shipped(csv), nl=False)
        return
    from rich.console import Console

    found = read_prices(table)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    for listed in (_tabulate_prices(found), _tabulate_grid(), _tabulate_overheads()):
        console.print(listed, markup=False)
    for warning in dict.fromkeys(price.warn_of_age() for price in found):
        if warning:
            typer.echo(f"warning: {warning}")


def _tabulate_prices(found: "Sequence[Price]") -> "Table":
    from rich.table import Table

    listed = Table("instance type", "region", "on demand, an hour", "spot, an hour", "egress, a GB", "as of", box=None)
    for price in found:
        amounts = (
            "-" if amount is None else f"{amount:.4g} {price.currency}"
            for amount in (price.on_demand_per_hour, price.spot_per_hour, price.egress_per_gb)
        )
        listed.add_row(price.type, price.region, *amounts, str(price.as_of))
    return listed


def _tabulate_grid() -> "Table":
    from rich.table import Table

    from paceline.topology.tables import read_grid

    listed = Table("zone", "kgCO2e/kWh", "as of", "source", box=None)
    for factor in read_grid():
        listed.add_row(factor.zone, f"{factor.kg_co2e_per_kwh:.3f}", str(factor.as_of), factor.source)
    return listed


def _tabulate_overheads() -> "Table":
    from rich.table import Table

    from paceline.topology.tables import read_overheads

    listed = Table("data centre", "PUE", "as of", "source", box=None)
    for overhead in read_overheads():
        listed.add_row(overhead.place, f"{overhead.pue:.2f}", str(overhead.as_of), overhead.source)
    return listed
