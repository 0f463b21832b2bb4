"""What a run says, as typed events, and each of them as one line of strict JSON.

A line is ``{"kind": ..., "run": ..., "rank": ..., "epoch": ..., "step": ..., "time_s": ..., "unix_s": ...,
"event": {...}}``: the envelope says who spoke and when, ``event`` holds the fields of the kind. JSON has
no NaN and no infinities: they are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, and a field of
type float turns these back. Inside ``RunStarted.settings``, which has no types, they stay strings; pydantic
reads those as floats. A line is ASCII and holds no line break, whatever the texts in it.
"""

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, dataclass_transform

from typing_extensions import (
    TypeVar,
)  # comes with pydantic; `typing` has defaults of type variables from 3.13 on

from paceline.errors import PacelineError, unknown_name
from paceline.monitor.fields import find_problem, list_fields


class EventError(PacelineError, ValueError):
    """An event has a field of the wrong type, or a line of a log is not an event."""


class Event:
    """Something that happened in a run: the payload, without who and when."""

    __slots__ = ()
    kind: ClassVar[str]
    """The name the class is registered under, and that a line of the log carries."""

    def __post_init__(self) -> None:
        problem = find_problem(self)
        if problem is not None:
            raise EventError(f"{self.kind}.{problem}")


E_co = TypeVar("E_co", bound=Event, covariant=True, default=Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Generic[E_co]):
    """An event in its envelope: which run, rank and membership epoch said it, and when."""

    run: str
    rank: int
    """-1 for the launcher, which is none of the workers."""
    epoch: int
    """Of the membership: it counts the groups that trained, not passes over the data."""
    step: int
    """-1 where no step is known."""
    time_s: float
    """Monotonic; comparable only within one process."""
    unix_s: float
    event: E_co

    def __post_init__(self) -> None:
        problem = find_problem(self)
        if problem is not None:
            raise EventError(f"record.{problem}")
        if not isinstance(self.event, Event):
            raise EventError(f"record.event must be an event, but got {reprlib.repr(self.event)}")


_KINDS: dict[str, type[Event]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _event(kind: str) -> Callable[[type[E_co]], type[E_co]]:
    def add(fields_only: type[E_co]) -> type[E_co]:
        cls = dataclass(frozen=True, slots=True, kw_only=True)(fields_only)
        cls.kind = kind
        _KINDS[kind] = cls
        return cls

    return add


def list_kinds() -> dict[str, type[Event]]:
    """Return the classes of events by their kind."""
    return dict(_KINDS)


@_event("run_started")
class RunStarted(Event):
    """The workers are ready; each attempt after a restart or resume says it again."""

    recipe: str
    settings: dict[str, Any]
    """The resolved run, as JSON."""
    num_workers: int
    device: str
    num_parameters: int
    start_step: int
    """Steps that were done before this attempt."""
    total_steps: int
    global_batch: int
    samples_per_epoch: int
    resumed_from: str | None = None
    """The checkpoint this attempt goes on from."""


@_event("step_finished")
class StepFinished(Event):
    """One optimizer update was made."""

    loss: float
    weight: float
    """Mass of the mean that `loss` is."""
    num_samples: int
    learning_rate: float
    duration_s: float
    communication_s: float
    """Time the worker waited for the exchange, not hidden behind computing."""
    position: int
    """Samples used since the start of training."""
    gradient_norm: float | None = None
    loss_scale: float | None = None


@_event("evaluated")
class Evaluated(Event):
    """The model was judged on the held-out data."""

    loss: float
    metrics: dict[str, float]
    num_samples: int
    duration_s: float


@_event("checkpoint_saved")
class CheckpointSaved(Event):
    """A checkpoint is whole on disk."""

    path: str
    num_bytes: int
    duration_s: float


@_event("checkpoint_skipped")
class CheckpointSkipped(Event):
    """A checkpoint was found that could not be used."""

    path: str
    reason: str


@_event("unused_parameters")
class UnusedParameters(Event):
    """Parameters that got no gradient on any rank."""

    names: list[str]


@_event("warned")
class Warned(Event):
    """Something a person should know, though training goes on."""

    message: str


@_event("preempted")
class Preempted(Event):
    """The run was asked to stop, and saved where it was."""

    checkpoint: str
    signal: str


@_event("restarted")
class Restarted(Event):
    """The workers are started again after a failure."""

    attempt: int
    reason: str


@_event("failed")
class Failed(Event):
    """A worker ended with an error."""

    error: str
    """Name of the exception's class."""
    message: str
    traceback: str


@_event("showcased")
class Showcased(Event):
    """What the trained model can do, as a text. It is the model's own output: trust nothing in it."""

    text: str


@_event("run_finished")
class RunFinished(Event):
    """All steps were made."""

    held_out_loss: float | None
    metrics: dict[str, float]
    duration_s: float
    samples_per_s: float


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
    if not isinstance(kind, str) or kind not in _KINDS:
        raise EventError(str(unknown_name("the kind of an event", str(kind), _KINDS)))
    event = _KINDS[kind](**_decode(_KINDS[kind], kind, payload))
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
    return {name: _decode_floats(known[name].annotation, value) for name, value in content.items()}


def _decode_floats(annotation: Any, value: Any) -> Any:
    if annotation in (float, float | None) and isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if annotation == dict[str, float] and isinstance(value, dict):
        return {key: _decode_floats(float, item) for key, item in value.items()}
    return value
