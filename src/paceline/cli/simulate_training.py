"""`paceline simulate training`: rows that describe training steps in, answers out."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.clusters import read_json
from paceline.errors import SettingsError, storing

if TYPE_CHECKING:
    from paceline.simulator.training import Row


def simulate_training(
    spec: Path | None, calibrate: Path | None, json_file: Path | None, profile: Path | None = None
) -> None:
    """Price the rows of `spec`, corrected by the measured rows of `calibrate`; print them, and write `json_file`.

    Raises:
        SettingsError: A file is missing or not in the form of the contract.
    """
    from paceline.simulator.training import read_rows

    if spec is None:
        raise SettingsError(
            "--spec must be given where training has no recipe, but is not; name a recipe, or a JSON file of rows"
        )
    rows = read_rows(read_json(spec, "--spec"), str(spec), measured=False)
    answers = _answer(rows, read_measured(calibrate), profile)
    if json_file is not None:
        with storing(json_file):
            json_file.write_text(json.dumps(answers, indent=1) + "\n")
    _print(answers["rows"])


def _answer(rows: "list[Row]", measured: "list[Row]", profile: Path | None) -> dict[str, Any]:
    from paceline.simulator.training import answer_rows

    if profile is None:
        return answer_rows(rows, measured)
    from paceline.cli.profile import read_profile
    from paceline.simulator.training.profiled import answer_profiled

    return answer_profiled(rows, measured, read_profile(profile))


def read_measured(calibrate: Path | None) -> "list[Row]":
    """Return the measured rows of a file; none without one.

    Raises:
        SettingsError: The file is missing or not in the form of the contract.
    """
    from paceline.simulator.training import read_rows

    return [] if calibrate is None else read_rows(read_json(calibrate, "--calibrate"), str(calibrate), measured=True)


def _print(answers: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "row", "step, s", "90 %", "memory, GB", "90 %", "energy, kJ", "90 %", "most of it", "basis", "assumed", box=None
    )
    for answer in answers:
        if answer["error"] is None:
            numbers = [
                cell
                for name, unit in (("step_s", 1), ("memory_bytes", 1e9), ("energy_j", 1e3))
                for cell in _interval(answer, name, unit)
            ]
            share = f"{answer['bound']} {answer['terms'][answer['bound']] / answer['step_s']:.0%}"
            assumed = ", ".join(answer["assumed"]) or "-"
            table.add_row(answer["id"], *numbers, share, answer["basis"], assumed)
    console = Console()
    if not console.is_terminal:
        console.width = 180
    console.print(table, markup=False)
    for answer in answers:
        if answer["error"] is not None:
            typer.echo(f"{answer['id']} cannot be priced: {answer['error']}")


def _interval(answer: dict[str, Any], name: str, unit: float) -> tuple[str, str]:
    """Return a number of an answer, and its interval."""
    from paceline.monitor.formatting import number

    value, low, high = (number(answer[end] / unit) for end in (name, f"{name}_low", f"{name}_high"))
    return value, f"{low} to {high}"
