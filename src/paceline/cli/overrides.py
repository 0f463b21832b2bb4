"""Overrides of a settings object from the command line: ``--optimizer.learning_rate 3e-4``."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from paceline.errors import SettingsError, unknown_name
from paceline.registry import Family, Settings, explain, find_variant

S = TypeVar("S", bound=Settings)


class OverridesCommand(TyperCommand):
    """A command that takes any ``--field value`` beside its own options, and finds them in ``context.args``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the overrides out, each with its value, before the rest is parsed."""
        own = {name for parameter in self.params for name in parameter.opts} | {"--help"}
        flags = {name for parameter in self.params if getattr(parameter, "is_flag", False) for name in parameter.opts}
        mine: list[str] = []
        overrides: list[str] = []
        waiting = list(args)
        while waiting:
            word = waiting.pop(0)
            is_override = word.startswith("--") and word.partition("=")[0] not in own
            (overrides if is_override else mine).append(word)
            if "=" not in word and word.startswith("--") and word not in {*flags, "--help"} and waiting:
                (overrides if is_override else mine).append(waiting.pop(0))
        super().parse_args(ctx, mine)
        ctx.args = overrides
        return overrides


def parse_pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return (dotted path, value) of each ``--path value`` or ``--path=value``.

    Raises:
        SettingsError: Something is no option, or has no value.
    """
    pairs = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise SettingsError(
                f"an override must look like --field value, but got {word!r}; see `paceline train --help`"
            )
        path, separator, value = word[2:].partition("=")
        if not separator:
            if not waiting or waiting[0].startswith("--"):
                raise SettingsError(f"--{path} must have a value, but none follows; write --{path} VALUE")
            value = waiting.pop(0)
        pairs.append((path.replace("-", "_"), value))
    return pairs


def apply_overrides(settings: S, pairs: Iterable[tuple[str, str]]) -> S:
    """Return `settings` with each (dotted path, value) put in and everything checked again.

    The value of a field that takes variants is a variant's name; the variant's own fields come after a dot.

    Raises:
        SettingsError: A field does not exist, or a value does not fit its type.
    """
    document = settings.model_dump()
    # A variant is chosen before its fields are set, in whichever order they were written.
    for path, value in sorted(pairs, key=lambda pair: pair[0].count(".")):
        _set(type(settings), document, path.split("."), path, value)
    try:
        return type(settings).model_validate(document)
    except ValidationError as error:
        raise SettingsError(explain(error)) from error


def _set(cls: type[Settings], document: dict[str, Any], parts: list[str], path: str, value: str) -> None:
    name, *rest = parts
    if name not in cls.model_fields:
        raise unknown_name(f"the field --{path}", name, cls.model_fields)
    field = cls.model_fields[name]
    if not rest:
        document[name] = _parse(field, path, value, document.get(name))
        return
    default = field.get_default(call_default_factory=True, validated_data={})
    child = document.setdefault(name, default.model_dump() if isinstance(default, Settings) else default)
    child_class = settings_class(field)
    if child_class is not None and isinstance(child, dict):
        if issubclass(child_class, Family):
            child_class = find_variant(child_class, child["name"])
        _set(child_class, child, rest, path, value)
    elif isinstance(child, dict) and len(rest) == 1:
        document[name] = {**child, rest[0]: _from_json(value)}
    else:
        raise SettingsError(f"--{path} must name a field, but {name} has no fields of its own; give --{name} a value")


def _parse(field: FieldInfo, path: str, value: str, present: Any) -> Any:
    family = settings_class(field)
    if family is not None and issubclass(family, Family):
        find_variant(family, value)
        is_present = isinstance(present, dict) and present.get("name") == value
        return present if is_present else {"name": value}
    adapter: TypeAdapter[Any] = TypeAdapter(field.annotation or str)
    # "none" means none wherever none is possible, also where any text is.
    candidates = (None, value) if value.lower() == "none" else (value, _from_json(value))
    refused = None
    for candidate in candidates:
        try:
            return adapter.validate_python(candidate)
        except ValidationError as error:
            refused = refused if refused and candidate is not value else error
    assert refused is not None
    lines = (line.removeprefix("settings") for line in explain(refused).splitlines())
    # A rule of pydantic's begins with " must be"; one of our own is a sentence by itself.
    raise SettingsError("\n".join(f"--{path}{line if line.startswith(' ') else f': {line}'}" for line in lines))


def _from_json(value: str) -> Any:
    if value.lower() == "none":
        return None
    try:
        return json.loads(value)
    except ValueError:
        return value


def settings_class(field: FieldInfo) -> type[Settings] | None:
    """Return the class of settings that a field takes; None where it takes none."""
    if get_origin(field.annotation) is tuple:  # of any number of settings: given as JSON, all at once
        return None
    candidates = [field.annotation, *get_args(field.annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Settings)), None)
