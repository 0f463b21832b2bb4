"""`paceline plan a.py:run b.py:run`: several runs on one fleet, divided or put in order by their own curves."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.plan_recipe import prepare
from paceline.errors import SettingsError, storing
from paceline.monitor.formatting import duration, number
from paceline.planner.fleet_planning import FleetPlan, FleetRun, plan_fleet
from paceline.planner.fleet_search import FleetLimits
from paceline.planner.fleet_words import describe_fleet, name_runs, to_document
from paceline.planner.planning import to_plan
from paceline.planner.problem import Limits
from paceline.simulator.training.answers import find_posterior

if TYPE_CHECKING:
    from paceline.planner.candidate import Machines
    from paceline.simulator.training import Row
    from paceline.topology import Site


def plan_recipes(
    recipes: Sequence[str],
    overrides: list[tuple[str, str]],
    fields: Mapping[str, Any],
    machines: "tuple[Machines, ...]",
    limits: Limits,
    site: "Site",
    measured: "list[Row]",
    allows_inexact: bool,
    out: Path,
    json_file: Path | None,
) -> None:
    """Plan several recipes on one fleet; print the plan, and write one file for each, and `json_file`.

    Raises:
        SettingsError: A recipe cannot be planned, there are several clusters, or nothing keeps the limits.
    """
    if len(machines) > 1:
        raise SettingsError(
            "--cluster must be one for several runs, without --cap, but got "
            f"{', '.join(one.name for one in machines)}; leave out all but one"
        )
    free = Limits(currency=limits.currency)  # limits are of all runs together
    prepared = [prepare(recipe, overrides, fields, machines, free, site, allows_inexact) for recipe in recipes]
    if limits.budget is not None and not prepared[0].problem.has_prices:
        raise SettingsError(f"--budget must go with a price, but {machines[0].name} has none; give --price")
    names = name_runs([one.recipe for one in prepared])
    runs = [FleetRun(name, one.problem, one.trial) for name, one in zip(names, prepared, strict=True)]
    together = FleetLimits(limits.within_s, limits.budget, limits.energy_j)
    fleet = plan_fleet(runs, find_posterior(measured), together)
    files = [out.with_name(f"{out.stem}-{place}{out.suffix}") for place in range(1, len(runs) + 1)]
    for one, planned, file in zip(prepared, fleet.plans, files, strict=True):
        to_plan(planned, one.recipe, one.digest(planned.candidate)).save(file)
    if json_file is not None:
        with storing(json_file):
            json_file.write_text(json.dumps(to_document(fleet, [str(file) for file in files]), indent=1) + "\n")
    for line in describe_fleet(fleet):
        typer.echo(line)
    _print_curves(fleet)
    typer.echo("\nwritten; train them with:")
    for entry in sorted(fleet.best.timetable.entries, key=lambda one: one.begin_s):
        when = (
            ""
            if not entry.begin_s
            else f"    # when {' and '.join(names[run] for run in fleet.list_before(entry))} ended"
        )
        typer.echo(f"  paceline train {prepared[entry.run].recipe} --plan {files[entry.run]}{when}")


def _print_curves(fleet: FleetPlan) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = 200
    typer.echo("\nhow long each takes by the ranks that it holds, alone on them (what is chosen has a star):")
    currency = fleet.curves[0].run.problem.currency
    has_prices = fleet.curves[0].run.problem.has_prices
    table = Table("run", "ranks", "time", "", *([currency] if has_prices else []), "kWh", "plan", box=None)
    chosen = set(fleet.best.timetable.order)
    for run, curve in enumerate(fleet.curves):
        for place, (option, choice) in enumerate(zip(curve.options, curve.choices, strict=True)):
            low, high = fleet.intervals[run][place]
            table.add_row(
                ("* " if (run, place) in chosen else "  ") + curve.run.name,
                str(option.num_ranks),
                duration(option.time_s),
                f"({duration(low)} to {duration(high)})",
                *([number(option.money)] if has_prices else []),
                number(option.energy_j / 3.6e6) if option.energy_j else "?",
                choice.needs.candidate.describe(),
            )
    console.print(table, markup=False)
