"""`--go_on`: start a run, or resume the one in its directory."""

from pathlib import Path
from typing import Any

import typer

from paceline.cli.overrides import apply_overrides
from paceline.cli.prepare import absolute_recipe, find_early_end, find_last_step, make_run, write_report
from paceline.errors import SettingsError
from paceline.launch.worker import load_run
from paceline.training.run import Run, RunFile


def is_begun(out: Path) -> bool:
    """Return whether a run was begun in `out`."""
    return (out / "run.json").is_file()


def check_begun(recipe: str, num_workers: int | None, out: Path, overrides: list[tuple[str, str]]) -> bool:
    """Print the effects of resuming the run in `out`; return False if it is finished.

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
    begun = load_run(file)
    run = apply_overrides(begun, overrides)
    num_steps = run.num_steps or run.count_steps(run.open_data())
    last_step, reason = find_last_step(out, num_steps), find_early_end(out, run)
    if last_step is not None or reason:
        end = reason or f"at step {last_step} of {num_steps}"
        typer.echo(f"the run in {out} is finished, {end}: nothing is left to do")
        if not (out / "report.html").exists():
            write_report(out)
        return False
    typer.echo(f"goes on with the run that was begun in {out}")
    changed = list_differences(begun, run)
    if num_workers not in (None, file.num_workers):
        changed["workers"] = (file.num_workers, num_workers)
    for name, (before, now) in changed.items():
        typer.echo(f"changed by the command line: {name} from {before} to {now}")
    for name, (there, here) in list_differences(run, make_run(recipe, overrides)).items():
        if (name, here) != ("num_threads", None):  # resolved when the run was begun
            typer.echo(f"kept as begun: {name} {there}, though a new run would now have {here}; --{name} changes it")
    return True


def list_differences(first: Run, second: Run) -> dict[str, tuple[Any, Any]]:
    """Return both values of each setting in which two runs differ, by dotted path."""
    one, other = (flatten_settings(run.model_dump(mode="json")) for run in (first, second))
    return {name: (one.get(name), other.get(name)) for name in {**one, **other} if one.get(name) != other.get(name)}


def flatten_settings(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted path."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        path = prefix + name
        flat |= flatten_settings(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat
