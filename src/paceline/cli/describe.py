"""Lists of settings: option, type, value and meaning of each."""

import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import typer

from paceline.cli.overrides import settings_class
from paceline.functions import Function
from paceline.registry import Family, Settings, describe_fields, list_variants


class SettingRow(NamedTuple):
    """One setting that can be overridden."""

    path: str
    type: str
    value: str
    meaning: str


def print_settings(settings: Settings) -> None:
    """Print every setting, with its type, value and meaning."""
    width = shutil.get_terminal_size().columns - 1
    for row in describe_settings(settings):
        typer.echo(f"--{row.path} <{row.type}> [{row.value}]")
        if row.meaning:
            typer.echo(textwrap.fill(row.meaning, width, initial_indent="    ", subsequent_indent="    "))


def describe_settings(settings: Settings, prefix: str = "") -> list[SettingRow]:
    """Return a row for every field, including those of nested settings."""
    rows: list[SettingRow] = []
    for name, text in describe_fields(type(settings)).items():
        field = type(settings).model_fields[name]
        value, meaning = getattr(settings, name), " ".join(text.split())
        if isinstance(value, Family):
            family = settings_class(field)
            assert family is not None
            assert issubclass(family, Family)
            meaning = f"{meaning} One of: {', '.join(list_variants(family))}."
            rows.append(SettingRow(prefix + name, "name", value.name, meaning))
        elif isinstance(settings, Function) and name == "arguments":
            rows += _describe_arguments(settings, prefix + name)
        elif not isinstance(value, Settings):
            rows.append(SettingRow(prefix + name, describe_type(field.annotation), _describe_value(value), meaning))
        if isinstance(value, Settings):
            rows += describe_settings(value, f"{prefix}{name}.")
    return rows


def _describe_arguments(function: Function, prefix: str) -> list[SettingRow]:
    return [
        SettingRow(
            f"{prefix}.{name}",
            "JSON" if argument.hint is None else describe_type(argument.hint),
            _describe_value(argument.value),
            f"Argument of {function.path}{', which must be given' if argument.is_missing else ''}.",
        )
        for name, argument in function.list_arguments().items()
    ]


def describe_type(annotation: Any) -> str:
    """Return the values of an annotation, in words of the command line: ``int or none``, ``list of float``."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_type(inner[0])
    if origin is Literal:
        return " or ".join(str(value) for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(describe_type(one) for one in inner))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"{describe_type(inner[1])} by name"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"list of {describe_type(inner[0])}"
    if annotation is NoneType:
        return "none"
    name: str = annotation.__name__
    return {"str": "text", "Any": "JSON"}.get(name, name)


def _describe_value(value: object) -> str:
    """Return a value as the command line takes it."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, default=str)
