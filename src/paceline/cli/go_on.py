"""`--go_on`: start a run, or resume the one in its directory."""

from pathlib import Path

import typer

from paceline.cli.changes import list_differences
from paceline.cli.overrides import apply_overrides
from paceline.cli.prepare import absolute_recipe, find_early_end, find_last_step, make_run, write_report
from paceline.errors import SettingsError
from paceline.launch.worker import load_run
from paceline.training.run import Run
from paceline.training.run_file import RunFile


def is_begun(out: Path) -> bool:
    """Return whether a run was begun in `out`."""
    return (out / "run.json").is_file()


def is_reported(out: Path) -> bool:
    """Return whether the report of the run in `out` is as new as its log: its launcher lived to write it."""
    report, log = out / "report.html", out / "events.jsonl"
    return report.exists() and (not log.exists() or report.stat().st_mtime_ns >= log.stat().st_mtime_ns)


def tell_finished(out: Path, run: Run) -> bool:
    """Print that a run is finished, and write its report if its launcher was lost before it did; False if it is not."""
    num_steps = run.num_steps or run.count_steps(run.open_data())
    last_step, reason = find_last_step(out, num_steps), find_early_end(out, run)
    if last_step is None and not reason:
        return False
    typer.echo(
        f"the run in {out} is finished, {reason or f'at step {last_step} of {num_steps}'}: nothing is left to do"
    )
    if not is_reported(out):
        write_report(out)
    return True


def check_begun(recipe: str, out: Path, overrides: list[tuple[str, str]]) -> bool:
    """Print what resuming the run in `out` keeps of its settings; return False if it is finished.

    Settings are those of the begun run, except for the overrides of the command line.

    Raises:
        SettingsError: The run was begun with another recipe.
    """
    file = RunFile.load(out)
    if absolute_recipe(recipe) != absolute_recipe(file.recipe):
        raise SettingsError(
            f"--go_on must be given the recipe that the run was begun with, {file.recipe}, but got {recipe} for {out}; "
            "choose another --out for another run"
        )
    run = apply_overrides(load_run(file), overrides)
    if tell_finished(out, run):
        return False
    typer.echo(f"goes on with the run that was begun in {out}")
    for name, (there, here) in list_differences(run, make_run(recipe, overrides)).items():
        if (name, here) != ("num_threads", None):  # resolved when the run was begun
            typer.echo(f"kept as begun: {name} {there}, though a new run would now have {here}; --{name} changes it")
    return True
