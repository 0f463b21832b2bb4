"""`--plan`: the settings of a plan under those of the command line, and its prediction beside the run."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from paceline.cli.other_command import end_process
from paceline.errors import SettingsError
from paceline.launch.signals import cleaning_up_when_asked
from paceline.planner.plan_file import Plan
from paceline.training.forecast import FILE

AUTO = Path("auto")
"""Value of `--plan` for a plan that is made before the run."""


def use_plan(
    path: Path | None, recipe: str | None, workers: int | None, overrides: list[tuple[str, str]]
) -> tuple[Plan | None, int | None, list[tuple[str, str]]]:
    """Return a plan, and what it makes of the number of workers and of overrides, which stay above it.

    Args:
        path: File of the plan; `AUTO` for one that is made now, of a profile.
        recipe: Recipe of a run that is to begin on this machine; None for others, which no plan is made for.
        workers: Workers of the command line: for `AUTO` the most that are planned with.
        overrides: Settings of the command line.

    Raises:
        SettingsError: The file is no plan, or none can be made.
    """
    if path is None:
        return None, workers, overrides
    if path == AUTO:
        plan, workers = _make_plan(recipe, workers, overrides), None
    else:
        plan = Plan.load(path)
    given = dict(overrides)
    for name, value in plan.list_pairs():
        if given.get(name, value) != value:
            typer.echo(f"--{name} {given[name]} is trained in place of the plan's {value}, of which its prediction is")
    return plan, workers or plan.num_workers, [*plan.list_pairs(), *overrides]


def _make_plan(recipe: str | None, workers: int | None, overrides: Sequence[tuple[str, str]]) -> Plan:
    """Profile a recipe on this machine, and plan it with that; both show what they find."""
    if recipe is None:
        raise SettingsError(
            "--plan auto must be of a run that begins, with a recipe and without torchrun, but this one does not; "
            "make a plan first (paceline plan RECIPE), and give its file"
        )
    options = [word for name, value in overrides for word in (f"--{name}", value)]
    with TemporaryDirectory(prefix="paceline-plan-") as folder:
        profile, plan = f"{folder}/profile.json", f"{folder}/plan.json"
        most = [] if workers is None else ["--workers", str(workers)]
        _run("profile", [recipe, "--out", profile, *most, *options])
        most = [] if workers is None else ["--num_ranks", str(workers)]
        _run("plan", [recipe, "--profile", profile, "--out", plan, *most, *options])
        return Plan.load(Path(plan))


def _run(command: str, arguments: Sequence[str]) -> None:
    """Run another command of Paceline, and print what it says but where its file is."""
    words = [sys.executable, "-m", "paceline", command, *arguments]
    with cleaning_up_when_asked():
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        try:
            with process.stdout:
                for line in process.stdout:
                    if not line.startswith("written: "):
                        typer.echo(line, nl=False)
        finally:
            code = end_process(process, asks=sys.exc_info()[0] is not None)
    if code:
        raise SettingsError(
            f"a recipe must be profiled and planned for --plan auto, but `paceline {command}` ended with {code} as it "
            "says above; train without --plan"
        )


def keep_plan(directory: Path, plan: Plan | None, *, is_changed: bool = False) -> None:
    """Put a plan beside a run, which its steps are then compared with.

    Args:
        directory: Directory of the run.
        plan: The plan; None: that of before, if there was one.
        is_changed: Whether other settings than before go on, of which a plan of before says nothing.
    """
    if plan is not None:
        plan.save(directory / FILE)
        typer.echo(f"plan: {plan.words}, for {plan.machines.words}; a step is predicted to take {_interval(plan)}")
    elif is_changed:
        (directory / FILE).unlink(missing_ok=True)


def _interval(plan: Plan) -> str:
    predicted = plan.predicted
    return f"{predicted.step_s:.3g} s ({predicted.step_s_low:.3g} to {predicted.step_s_high:.3g})"
