"""`--plan`: the settings of a plan under those of the command line, and its prediction beside the run."""

from pathlib import Path

import typer

from paceline.planner.plan_file import Plan
from paceline.training.forecast import FILE


def use_plan(
    path: Path | None, workers: int | None, overrides: list[tuple[str, str]]
) -> tuple[Plan | None, int | None, list[tuple[str, str]]]:
    """Return the plan in a file, and what it makes of the number of workers and of overrides, which stay above it.

    Raises:
        SettingsError: The file is no plan.
    """
    if path is None:
        return None, workers, overrides
    plan = Plan.load(path)
    given = dict(overrides)
    for name, value in plan.list_pairs():
        if given.get(name, value) != value:
            typer.echo(f"--{name} {given[name]} is trained in place of the plan's {value}, of which its prediction is")
    return plan, workers or plan.num_workers, [*plan.list_pairs(), *overrides]


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
