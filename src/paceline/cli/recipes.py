"""`paceline recipes`: the recipes, and every setting of one."""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.training.run import Run


def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe, or your own: file.py:function.")] = None,
) -> None:
    """List the recipes, or all settings of one: option, type, value and meaning."""
    from paceline.recipes import RECIPES, find_recipe

    if name is None:
        for known in RECIPES:
            first_line = (inspect.getdoc(find_recipe(known)) or "").splitlines()[0]
            typer.echo(f"{known:16} {first_line}")
        typer.echo("\nTrain one with `paceline train NAME`; `paceline recipes NAME` lists its settings.")
        return
    from paceline.cli.describe import print_settings
    from paceline.cli.prepare import make_run

    print_settings(make_run(name, []))


def find_run(arguments: Sequence[str]) -> "Run | None":
    """Return the run of the recipe that is the first argument of a command."""
    if not arguments:
        return None
    from paceline.cli.prepare import make_run

    return make_run(arguments[0], [])
