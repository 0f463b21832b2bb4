"""Records as lines of strict JSON, and back.

A line is ``{"kind": ..., "run": ..., "rank": ..., "epoch": ..., "step": ..., "time_s": ..., "unix_s": ...,
"event": {...}}``: the envelope says who wrote it and when, ``event`` holds the fields of the kind. JSON has
no NaN and no infinities: they are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, and a field of
type float turns these back. Inside ``RunStarted.settings``, which has no types, they stay strings; pydantic
reads those as floats. A line is ASCII and contains no line break, whatever its texts contain.
"""

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any

from paceline.monitor.events import EventError, Record, find_kind


def to_json(record: Record) -> str:
    """Return `record` as one line of strict JSON, without the line break.

    Raises:
        EventError: The record's settings hold a value that JSON cannot represent.
    """
    event: Any = record.event
    line = {
        "kind": event.kind,
        "run": record.run,
        "rank": record.rank,
        "epoch": record.epoch,
        "step": record.step,
        "time_s": record.time_s,
        "unix_s": record.unix_s,
        "event": {name: getattr(event, name) for name in event.__dataclass_fields__},
    }
    try:
        return _ENCODER.encode(line)
    except (ValueError, TypeError, RecursionError):  # most often a NaN: rare, so the search starts only now
        try:
            return _ENCODER.encode(_name_non_finite(line))
        except (ValueError, TypeError, RecursionError) as error:
            raise EventError(f"{event.kind} must hold JSON values only, but: {error}") from error


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
    cls, fields = find_kind(str(content.pop("kind", None))), content.pop("event", None)
    if not isinstance(fields, dict):
        raise EventError(f"{cls.kind} must be a JSON object, but got {reprlib.repr(fields)}")
    try:
        return Record(event=cls(**fields), **content)
    except TypeError as error:  # a name that is no Python argument
        raise EventError(f"{cls.kind} must have exactly its fields, but: {error}") from error


_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


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
