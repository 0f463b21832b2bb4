"""`paceline plan`: the best way to train a model on machines and within limits, with reasons."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli import plan_options as options
from paceline.errors import SettingsError, storing

if TYPE_CHECKING:
    from paceline.planner.planning import Planned


def plan(
    context: typer.Context,
    recipes: options.Recipes = None,
    cluster: options.Cluster = None,
    num_ranks: options.NumRanks = None,
    model: options.Model = None,
    row: options.Row = "{}",
    global_batch: options.GlobalBatch = None,
    num_steps: options.NumSteps = None,
    within: options.Within = None,
    budget: options.Budget = None,
    energy: options.Energy = None,
    carbon: options.Carbon = None,
    zone: options.Zone = "world",
    memory: options.Memory = None,
    cap: options.Cap = None,
    allow: options.Allow = None,
    measure: options.Measure = None,
    price: options.Price = None,
    prices: options.Prices = None,
    profile: options.Profile = None,
    calibrate: options.Calibrate = None,
    out: options.Out = Path("plan.json"),
    json_file: options.JsonFile = None,
) -> None:
    """Plan a training: which layout, micro-batches, recomputation and ranks, how long, at what cost, and why.

    All ways that `paceline train` would not refuse are priced: those that train the same model, and with --allow
    inexact also codecs and rules whose loss was measured.
    Every setting of the recipe can be overridden, as for `paceline train`. Several recipes share the ranks: each
    holds some, or waits for others, by what all of them take.

    `paceline plan mine.py:run --cluster dgx_h100 --num_ranks 64 --within 8h`, then
    `paceline train mine.py:run --plan plan.json`. Without a recipe: `paceline plan --model '{"name": "decoder",
    "num_layers": 40, "width": 6144}' --cluster dgx_h100 --num_ranks 64 --global_batch 1024`.
    """
    from paceline.cli.overrides import parse_pairs
    from paceline.planner.limits import list_machines
    from paceline.topology import Site

    recipe = recipes[0] if recipes else None
    overrides = parse_pairs(context.args)
    site = Site(zone=zone)
    limits = _read_limits(within, budget, energy, carbon, site)
    profiled = None if profile is None else _read_profile(profile, recipe, cluster)
    clusters = _read_clusters(cluster) if profiled is None else [("the profiled machine", profiled.cluster)]
    _check_measure(measure, cluster, profiled)
    machines = list_machines(clusters, num_ranks, memory, price or [], prices, cap or ())
    given = {"global_batch": global_batch, "num_steps": num_steps}
    named = [(name, str(value)) for name, value in given.items() if value is not None]
    if recipes is not None and len(recipes) > 1:
        _check_several(model, profile, measure)
        from paceline.cli.plan_fleet import plan_recipes

        plan_recipes(
            *(recipes, overrides + named, _read_row(row), machines, limits, site),
            *(_read_measured(calibrate), allow is not None, out, json_file),
        )
        return
    if (recipe is None) == (model is None):
        found = "neither" if recipe is None else "both"
        raise SettingsError(f"either a recipe or --model must be given, but got {found}; give one")
    fields = _read_row(row)
    if recipe is None:
        _check_shape(overrides, allow, measure)
        assert model is not None
        planned = _plan_shape(
            _read_json(model, "--model"), fields, machines, global_batch, num_steps, limits, site, calibrate
        )
        digest = ""
    else:
        from paceline.cli.plan_recipe import plan_recipe

        overrides += named
        measured = _read_measured(calibrate)
        recipe, planned, digest = plan_recipe(
            recipe, overrides, fields, machines, limits, site, measured, profiled, allow is not None, measure or 0
        )
    _print(planned)
    _write(planned, recipe, digest, out, json_file)


def _read_limits(within: str | None, budget: str | None, energy: str | None, carbon: str | None, site: Any) -> Any:
    from paceline.planner.limits import parse_budget, parse_energy, parse_time
    from paceline.planner.problem import Limits

    money, currency = (None, "") if budget is None else parse_budget(budget)
    within_s = None if within is None else parse_time(within)
    return Limits(within_s, money, parse_energy(energy, carbon, site), currency)


def _check_shape(overrides: list[tuple[str, str]], allow: str | None, measure: int | None) -> None:
    """Refuse what is of a recipe alone."""
    if overrides:
        raise SettingsError(
            f"overrides must be of a recipe, but got --{overrides[0][0]} with --model; put it into --model or --row"
        )
    if allow is not None or measure is not None:
        raise SettingsError("--allow and --measure must go with a recipe, but got --model; leave them out")


def _check_several(model: str | None, profile: Path | None, measure: int | None) -> None:
    """Refuse what is of one run alone."""
    for name, value in (("--model", model), ("--profile", profile), ("--measure", measure)):
        if value is not None:
            raise SettingsError(f"{name} must be of one run, but got several recipes; leave it out, or plan one")


def _plan_shape(
    model: Any,
    fields: dict[str, Any],
    machines: Any,
    global_batch: int | None,
    num_steps: int | None,
    limits: Any,
    site: Any,
    calibrate: Path | None,
) -> "Planned":
    from paceline.planner.planning import make_plan
    from paceline.planner.problem import PlanProblem, choose_precision
    from paceline.simulator.training.answers import find_posterior
    from paceline.simulator.training.contract import read_row

    if global_batch is None:
        raise SettingsError("--global_batch must be given with --model, but is not; give the samples of a step")
    row = read_row({"id": "plan", "num_ranks": 1, **fields, "model": model}, "--row")
    precision = row.precision or choose_precision(machines)
    problem = PlanProblem(row, global_batch, machines, (precision,), num_steps, limits, site)
    return make_plan(problem, find_posterior(_read_measured(calibrate)))


def _read_measured(calibrate: Path | None) -> Any:
    from paceline.cli.clusters import read_json
    from paceline.simulator.training import read_rows

    return [] if calibrate is None else read_rows(read_json(calibrate, "--calibrate"), str(calibrate), measured=True)


def _read_profile(path: Path, recipe: str | None, cluster: list[str] | None) -> Any:
    from paceline.cli.profile import read_profile

    if recipe is None or cluster:
        found = "--cluster" if cluster else "--model"
        raise SettingsError(f"--profile must go with a recipe alone, which it is of, but got {found}; leave it out")
    return read_profile(path)


def _check_measure(measure: int | None, cluster: list[str] | None, profiled: Any) -> None:
    """Refuse to measure on machines that are not here."""
    from paceline.topology import Loopback

    found = "--cluster" if cluster else ""
    if profiled is not None and not isinstance(profiled.cluster, Loopback):
        found = "a profile of several hosts"
    if measure is not None and found:
        raise SettingsError(f"--measure must be of this machine, but got {found}; leave one out")


def _read_clusters(names: list[str] | None) -> list[tuple[str, Any]]:
    from paceline.cli.clusters import read_cluster
    from paceline.planner.limits import describe_this_machine

    if not names:
        return [("this machine", describe_this_machine())]
    return [(Path(name).stem if name.endswith(".json") else name, read_cluster(name)) for name in names]


def _read_row(text: str) -> dict[str, Any]:
    """Return the fields of a row that are given beside the model."""
    fields = _read_json(text, "--row")
    if not isinstance(fields, dict):
        raise SettingsError(f"--row must be a JSON object of fields, but got {text!r}; write one")
    planned = ("id", "model", "num_ranks", "cluster", "device", "layout", "pipeline", "micro_batch", "global_batch")
    if taken := [name for name in (*planned, "recompute", "sync", "measured", "family") if name in fields]:
        raise SettingsError(f"--row must leave out what is planned or has an option, but got {taken[0]}; remove it")
    return fields


def _read_json(text: str, what: str) -> Any:
    from paceline.cli.clusters import read_json

    if text.endswith(".json"):
        return read_json(Path(text), what)
    try:
        return json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{what} must be JSON or a file of it, but got {text!r}: {error}; correct it") from error


def _write(planned: "Planned", recipe: str | None, digest: str, out: Path, json_file: Path | None) -> None:
    from paceline.planner.planning import to_document, to_plan

    to_plan(planned, recipe, digest).save(out)
    if json_file is not None:
        with storing(json_file):
            json_file.write_text(json.dumps(to_document(planned), indent=1) + "\n")
    if recipe is None:
        typer.echo(f"written: {out}")
    else:
        typer.echo(f"written: {out}; train it with: paceline train {recipe} --plan {out}")


def _print(planned: "Planned") -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.planner.planning import describe_choice, describe_what_if

    console = Console()
    if not console.is_terminal:
        console.width = 220
    for line in describe_choice(planned):
        typer.echo(line)
    typer.echo("\nwhat would change it, by time of a step:")
    for change in planned.what_ifs:
        typer.echo(f"  {describe_what_if(change, planned.candidate)}")
    typer.echo("\nwhy not its neighbours:")
    for neighbour in planned.neighbours:
        typer.echo(f"  {neighbour.change}: {neighbour.reason}")
    typer.echo("\nnothing that was searched is better in time, money, energy and memory at once than each of these:")
    inexact = planned.problem.inexact
    names = (
        "plan",
        "machines",
        "step, s" if inexact is None else "step x steps to the same loss, s",
        *([f"{planned.problem.currency} an hour"] if planned.problem.has_prices else []),
        "kJ",
        "GB a rank",
    )
    table = Table(*names, box=None)
    choice = planned.choice
    for index in choice.shown:
        table.add_row(*_front_row(planned, index))
    console.print(table, markup=False)
    rest = len(choice.front) - len(choice.shown)
    more = f" ({rest} more in --json)" if rest > 0 else ""
    searched, left = planned.space, planned.space.left_out
    typer.echo(
        f"\nsearched {len(searched.candidates):,} candidates in {planned.took_s:.3g} s; training refuses "
        f"{searched.num_refused + len(choice.refused):,} others, {planned.num_pruned:,} do not fit by far; front of "
        f"{len(choice.front)}{more}" + (f"; not searched: {left}" if left else "")
    )
    for line in [] if inexact is None else inexact.describe_left_out():
        typer.echo(line)
    if assumed := planned.answer["assumed"]:
        typer.echo(f"basis: {planned.answer['basis']}; assumed: {', '.join(assumed)}")


def _front_row(planned: "Planned", index: int) -> list[str]:
    from paceline.monitor.formatting import interval, number

    pool = planned.choice.pool
    values, ends = planned.choice.objectives[index].tolist(), pool.intervals([index])[0].tolist()
    step_s, money, energy_j, memory = ((value, *of_value) for value, of_value in zip(values, ends, strict=True))
    candidate = pool.needs[index].candidate
    cells = [candidate.describe(), planned.problem.machines[candidate.machines].name, interval(*step_s)]
    if planned.problem.has_prices:
        cells.append(number(money[0] * 3600 / step_s[0]))
    energy = interval(*(value / 1e3 for value in energy_j)) if energy_j[0] else "?"
    marker = "* " if index == planned.choice.index else "  "
    return [marker + cells[0], *cells[1:], energy, interval(*(value / 1e9 for value in memory))]
