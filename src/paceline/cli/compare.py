"""`paceline compare`: the same training in several ways, side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.compare_gossip import compare_gossip
from paceline.cli.recipes import find_run
from paceline.errors import SettingsError, unknown_name
from paceline.registry import Settings

if TYPE_CHECKING:
    from paceline.benchmarks.comparison import Overrides, RunOutcome


def compare(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="Comparison: codecs, sync or gossip.")],
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe's name, or your own: file.py:function. [default: resnet]")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes on this machine. [default: 2; gossip: threads, 8 and 16]")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of runs of each, with seeds from 0 on.")] = 3,
    only: Annotated[str | None, typer.Option(help="Names to compare, separated by commas. [default: all]")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of the runs; existing ones are kept. [default: runs/compare-WHAT]"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="New file for the rows, as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="New file for the table.")] = None,
) -> None:
    """Train a recipe in several ways, such as with each codec, with several seeds, and print the results.

    Overrides of the recipe apply to all runs: `paceline compare codecs resnet --num_steps 300 --data.path mnist`;
    `paceline compare codecs resnet --help` lists its settings.
    Called again with the same `--out` it continues; runs with other settings are refused.
    `paceline compare gossip` trains a small network of its own over each graph; its fields are overrides too, such as
    `--num_steps 300 --skew 1`.
    """
    if what == "gossip":
        if recipe is not None or out is not None:
            raise SettingsError(f"recipe and --out must be left out of compare gossip, but got {recipe} and {out}")
        compare_gossip(context.args, workers, seeds, only, json, markdown)
        return
    from paceline.benchmarks import COMPARISONS, check_new_files, print_table, write_files
    from paceline.cli.overrides import parse_pairs
    from paceline.cli.prepare import make_run

    if what not in COMPARISONS:
        raise unknown_name("comparison", what, [*COMPARISONS, "gossip"])
    recipe, workers = recipe or "resnet", 2 if workers is None else workers
    if seeds < 1 or workers < 2:
        raise SettingsError(f"--seeds must be at least 1 and --workers 2, but got {seeds} and {workers}")
    check_new_files(json, markdown)
    comparison = COMPARISONS[what]
    given = parse_pairs(context.args)
    run = make_run(recipe, given)
    ways = comparison.choose(only.split(",") if only else None, run.num_steps or run.count_steps(run.open_data()))
    out = out or Path("runs") / f"compare-{what}"
    runs: dict[tuple[str, int], tuple[Path, Overrides]] = {
        (name, seed): (out / f"{name.replace(' ', '-')}-{seed}", [*given, *ways[name], ("seed", str(seed))])
        for seed in range(seeds)
        for name in ways
    }
    for directory, overrides in runs.values():
        _check_same(directory, recipe, workers, overrides)
    outcomes: dict[str, list[RunOutcome]] = {name: [] for name in ways}
    for (name, seed), (directory, overrides) in runs.items():
        outcome = _train(directory, recipe, workers, overrides)
        outcomes[name].append(outcome)
        typer.echo(f"{name}, seed {seed}: held-out loss {outcome.loss:.4f} after {outcome.elapsed_s:.1f} s")
    rows = comparison.compare(ways, outcomes)
    print_table(rows)
    write_files(rows, json, markdown)


def find_settings(arguments: Sequence[str]) -> Settings | None:
    """Return the settings of the comparison: those of a run, or of the comparison of graphs."""
    if not arguments:
        return None
    if arguments[0] != "gossip":
        return find_run(arguments[1:] or ["resnet"])
    from paceline.benchmarks.gossip_comparison import GossipComparison

    return GossipComparison()


def _check_same(directory: Path, recipe: str, workers: int, overrides: "Overrides") -> None:
    """Raise if `directory` holds a run with other settings; the number of threads may be the machine's."""
    from paceline.cli.changes import flatten_settings
    from paceline.cli.prepare import make_run
    from paceline.launch.worker import load_run
    from paceline.training.run import RunFile

    if not (directory / "run.json").exists():
        return
    file = RunFile.load(directory)
    there = {**flatten_settings(load_run(file).model_dump(mode="json")), "workers": file.num_workers}
    here = {**flatten_settings(make_run(recipe, overrides).model_dump(mode="json")), "workers": workers}
    if here["num_threads"] is None:
        here["num_threads"] = there["num_threads"]
    absent = object()
    differing = [name for name in {**here, **there} if here.get(name, absent) != there.get(name, absent)]
    if differing:
        words = ", ".join(f"{name} is {there.get(name)} there and {here.get(name)} here" for name in differing)
        raise SettingsError(
            f"a run that is compared must have the requested settings, but in {directory} {words}; "
            "give the same again, or another --out"
        )


def _train(directory: Path, recipe: str, workers: int, overrides: "Overrides") -> "RunOutcome":
    """Train, or resume, unless the run is finished, and return its outcome."""
    from rich.console import Console

    from paceline.benchmarks.comparison import RunOutcome
    from paceline.cli.prepare import prepare_new
    from paceline.launch import ExitCode
    from paceline.launch.local import launch
    from paceline.monitor.live import LiveView
    from paceline.monitor.reader import read_log, summarise
    from paceline.training.run import RunFile

    log = directory / "events.jsonl"
    if not log.exists() or summarise(read_log(log)).finish is None:
        if not (directory / "run.json").exists():
            prepare_new(recipe, workers, directory, overrides)
        code = launch(directory.absolute(), RunFile.load(directory).num_processes, view=LiveView(Console(quiet=True)))
        if code is not ExitCode.FINISHED:
            raise SettingsError(f"every run of a comparison must finish, but {directory} did not; read {log}")
    summary = summarise(read_log(log))
    if summary.finish is None or summary.finish.event.held_out_loss is None:
        raise SettingsError(
            f"every run of a comparison must have a held-out loss, but {directory} has none; "
            "take data with a held-out part"
        )
    return RunOutcome(
        loss=summary.finish.event.held_out_loss,
        accuracy=summary.finish.event.metrics.get("accuracy"),
        wire_bytes=summary.wire_bytes or 0,
        elapsed_s=summary.elapsed_s,
    )
