"""`paceline recipes`: what can be trained, and every setting of it."""

import inspect
from typing import Annotated

import typer


def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe, or your own: file.py:function.")] = None,
) -> None:
    """List the recipes, or all settings of one: path, value, and what it means."""
    from paceline.recipes import RECIPES, find_recipe

    if name is None:
        for known in RECIPES:
            first_line = (inspect.getdoc(find_recipe(known)) or "").splitlines()[0]
            typer.echo(f"{known:16} {first_line}")
        typer.echo("\nTrain one with `paceline train NAME`; `paceline recipes NAME` lists its settings.")
        return
    from rich.console import Console
    from rich.table import Table

    from paceline.cli.prepare import make_run

    table = Table("override", "value", "meaning", box=None)
    for path, value, meaning in describe_settings(make_run(name, [])):
        table.add_row(f"--{path}", str(value), meaning)
    Console().print(table, markup=False)


def describe_settings(settings: object, prefix: str = "") -> list[tuple[str, object, str]]:
    """Return (dotted path, value, meaning) of every field, those of settings inside it too."""
    from paceline.cli.overrides import settings_class
    from paceline.registry import Family, Settings, describe_fields, list_variants

    assert isinstance(settings, Settings)
    rows: list[tuple[str, object, str]] = []
    for name, text in describe_fields(type(settings)).items():
        value = getattr(settings, name)
        meaning = " ".join(text.split())
        if isinstance(value, Family):
            family = settings_class(type(settings).model_fields[name])
            assert family is not None
            assert issubclass(family, Family)
            others = ", ".join(list_variants(family))
            rows.append((prefix + name, value.name, f"{meaning} One of: {others}."))
            rows += describe_settings(value, f"{prefix}{name}.")
        elif isinstance(value, Settings):
            rows += describe_settings(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, value, meaning))
    return rows
