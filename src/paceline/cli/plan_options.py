"""Options of `paceline plan`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Recipes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE]...",
        help="A recipe's name, or your own: file.py:function; several share the ranks; none with --model.",
    ),
]
Cluster = Annotated[
    list[str] | None,
    typer.Option(help="Machines on offer: a name of `paceline clusters` or a JSON file; may be given again."),
]
NumRanks = Annotated[
    int | None, typer.Option("--num_ranks", "--num-ranks", help="Most ranks; fewer are considered too.", min=1)
]
Model = Annotated[str | None, typer.Option(help="Without a recipe: shape of the model, as JSON.")]
Row = Annotated[
    str, typer.Option(help="Other fields of a row of the contract, as JSON: sample, precision, attention, ...")
]
GlobalBatch = Annotated[
    int | None, typer.Option("--global_batch", "--global-batch", help="Samples of a step, with --model.", min=1)
]
NumSteps = Annotated[
    int | None, typer.Option("--num_steps", "--num-steps", help="Steps of the run. [default: the recipe's]", min=1)
]
Within = Annotated[str | None, typer.Option(help="Longest time of the run: 8h, 30min, 2d.")]
Budget = Annotated[str | None, typer.Option(help="Most money for the run, in the price's currency: 50usd.")]
Energy = Annotated[str | None, typer.Option(help="Most energy of the run: 20kWh.")]
Carbon = Annotated[str | None, typer.Option(help="Most carbon of the run, in CO2e: 2kg.")]
Zone = Annotated[str, typer.Option(help="Zone of the grid, for carbon: see `paceline prices`.")]
Allow = Annotated[
    Literal["inexact"] | None,
    typer.Option(help="inexact: codecs and relaxed rules too, by measured steps to the same loss."),
]
Cap = Annotated[
    list[str] | None,
    typer.Option(help="Limit of each device's power to consider beside none: 500W; may be given again."),
]
Measure = Annotated[
    int | None,
    typer.Option(help="Train the best so many on this machine for seconds each, and choose by that.", min=1),
]
Memory = Annotated[str | None, typer.Option(help="Memory of a rank: 16GB. [default: the device's]")]
Price = Annotated[list[str] | None, typer.Option(help="Price of a host and hour: 98.32, or CLUSTER=98.32 for each.")]
Prices = Annotated[str | None, typer.Option(help="CSV file of prices of instance types. [default: shipped examples]")]
Profile = Annotated[
    Path | None,
    typer.Option(help="File of `paceline profile`: plan on that machine, with times that were measured there."),
]
Calibrate = Annotated[Path | None, typer.Option(help="Measured rows that correct the prices, as JSON.")]
Out = Annotated[Path, typer.Option(help="New file for the plan, for `paceline train --plan`.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="New file for all of it, as JSON.")]
