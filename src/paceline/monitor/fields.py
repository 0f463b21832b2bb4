"""What the fields of an event may hold, by their annotation."""

import reprlib
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, NamedTuple


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or _is_int(value)


_RULES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("a string", lambda value: isinstance(value, str)),
    str | None: ("a string or None", lambda value: value is None or isinstance(value, str)),
    int: ("an integer of 64 bits", _is_int),
    int | None: ("an integer of 64 bits or None", lambda value: value is None or _is_int(value)),
    float: ("a number", _is_float),
    float | None: ("a number or None", lambda value: value is None or _is_float(value)),
    list[str]: (
        "a list of strings",
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    ),
    list[int]: (
        "a list of integers of 64 bits",
        lambda value: isinstance(value, list) and all(_is_int(item) for item in value),
    ),
    list[float]: (
        "a list of numbers",
        lambda value: isinstance(value, list) and all(_is_float(item) for item in value),
    ),
    dict[str, float]: (
        "numbers by name",
        lambda value: (
            isinstance(value, dict) and all(isinstance(key, str) and _is_float(item) for key, item in value.items())
        ),
    ),
    dict[str, Any]: (
        "a JSON object",
        lambda value: isinstance(value, dict) and all(isinstance(key, str) for key in value),
    ),
}


class Field(NamedTuple):
    """A field of a dataclass, and what it may hold."""

    annotation: Any
    required: bool
    rule: str
    holds: Callable[[Any], bool]


_FOUND: dict[Any, dict[str, Field]] = {}


def list_fields(cls: Any) -> dict[str, Field]:
    """Return the fields of a dataclass by name, without those whose annotation says nothing about JSON."""
    if cls not in _FOUND:
        _FOUND[cls] = {
            field.name: Field(field.type, field.default is MISSING, *_RULES[field.type])
            for field in fields(cls)
            if field.type in _RULES
        }
    return _FOUND[cls]


def find_problem(value: Any) -> str | None:
    """Return what is wrong with the first wrong field of a dataclass's instance, or None if all are right."""
    for name, field in list_fields(type(value)).items():
        if not field.holds(getattr(value, name)):
            return f"{name} must be {field.rule}, but got {reprlib.repr(getattr(value, name))}"
    return None
