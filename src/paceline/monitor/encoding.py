"""Records as lines of strict JSON, and back.

A line is ``{"kind": ..., "run": ..., "rank": ..., "epoch": ..., "step": ..., "time_s": ..., "unix_s": ...,
"event": {...}}``: the envelope says who spoke and when, ``event`` holds the fields of the kind. JSON has
no NaN and no infinities: they are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, and a field of
type float turns these back. Inside ``RunStarted.settings``, which has no types, they stay strings; pydantic
reads those as floats. A line is ASCII and holds no line break, whatever the texts in it.
"""

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any

from paceline.monitor.events import EventError, Record, find_kind
from paceline.monitor.fields import list_fields


def to_json(record: Record) -> str:
    """Return `record` as one line of strict JSON, without the line break.

    Raises:
        EventError: Its settings hold something JSON cannot.
    """
    event = record.event
    line = {
        "kind": event.kind,
        "run": record.run,
        "rank": record.rank,
        "epoch": record.epoch,
        "step": record.step,
        "time_s": record.time_s,
        "unix_s": record.unix_s,
        "event": {name: getattr(event, name) for name in list_fields(type(event))},
    }
    try:
        return _ENCODER.encode(line)
    except (
        ValueError,
        TypeError,
        RecursionError,
    ):  # most often a NaN, which is looked for only now: it is rare
        try:
            return _ENCODER.encode(_name_non_finite(line))
        except (ValueError, TypeError, RecursionError) as error:
            raise EventError(f"{event.kind} must hold what JSON can, but: {error}") from error


def from_json(line: str) -> Record:
    """Return the record that `to_json` wrote as `line`.

    Raises:
        EventError: The line is not JSON, of no known kind, or has a missing, unknown or wrong field.
    """
    try:
        content = _DECODER.decode(line)
    except (ValueError, RecursionError) as error:
        raise EventError(f"a line of a log must be JSON, but got {reprlib.repr(line)}: {error}") from error
    if not isinstance(content, dict):
        raise EventError(f"a line of a log must be a JSON object, but got {reprlib.repr(line)}")
    kind, payload = content.pop("kind", None), content.pop("event", None)
    cls = find_kind(str(kind))
    event = cls(**_decode(cls, cls.kind, payload))
    return Record(event=event, **_decode(Record, "record", content))


_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _name_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: _name_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_name_non_finite(item) for item in value]
    return value


def _decode(cls: type[Any], what: str, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise EventError(f"{what} must be a JSON object, but got {reprlib.repr(content)}")
    known = list_fields(cls)
    missing = [name for name, field in known.items() if field.required and name not in content]
    unknown = [name for name in content if name not in known]
    if missing or unknown:
        raise EventError(f"{what} must have just its fields, but {missing=} and {unknown=}; is it of another version?")
    for name, value in content.items():
        if isinstance(value, str | dict | list):  # most fields are numbers, and as they should be
            content[name] = _decode_floats(known[name].annotation, value)
    return content


def _decode_floats(annotation: Any, value: Any) -> Any:
    if annotation in (float, float | None) and isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if annotation == dict[str, float] and isinstance(value, dict):
        return {key: _decode_floats(float, item) for key, item in value.items()}
    if annotation == list[float] and isinstance(value, list):
        return [_decode_floats(float, item) for item in value]
    return value
