"""What an event is: a checked record of something that happened in a run, known by its kind."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Generic, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import TypeVar  # comes with pydantic; `typing` has defaults from 3.13 on

from paceline.errors import PacelineError, unknown_name
from paceline.registry import explain

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _read_non_finite(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer of 64 bits."""
Float = Annotated[float, BeforeValidator(_read_non_finite)]
"""A float, or its name if JSON has none for it: nan, inf or -inf."""


class EventError(PacelineError, ValueError):
    """An event has a field of the wrong type, or a line of a log is not an event."""


class Event:
    """Something that happened in a run: the payload, without rank and time."""

    __slots__ = ()
    kind: ClassVar[str]
    """Name that the class is registered under; the `kind` of a line in the log."""


T = TypeVar("T")
E_co = TypeVar("E_co", bound=Event, covariant=True, default=Event)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _checked(fields_only: type[T]) -> type[T]:
    """Make a dataclass that checks its fields, and raises an `EventError` for a wrong one."""
    config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
    cls: Any = dataclass(frozen=True, slots=True, kw_only=True, config=config)(fields_only)
    check = cls.__init__

    def check_fields(self: T, /, **given: Any) -> None:
        try:
            check(self, **given)
        except ValidationError as error:
            raise EventError(f"{getattr(cls, 'kind', 'record')}: {explain(error)}") from error

    cls.__init__ = check_fields
    made: type[T] = cls
    return made


@_checked
class Record(Generic[E_co]):
    """An event in its envelope: run, rank and membership epoch that wrote it, and the time."""

    run: str
    rank: Int
    """Rank of the worker; -1 for the launcher."""
    epoch: Int
    """Number of the membership, which counts groups of workers, not passes over the data."""
    step: Int
    """Number of the step; -1 if there is none."""
    time_s: Float
    """Monotonic time; comparable within one process only."""
    unix_s: Float
    event: E_co


_KINDS: dict[str, type[Event]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def event(kind: str) -> Callable[[type[E_co]], type[E_co]]:
    """Make a class of fields an event class of this kind."""

    def add(fields_only: type[E_co]) -> type[E_co]:
        cls = _checked(fields_only)
        cls.kind = kind
        _KINDS[kind] = cls
        return cls

    return add


def list_fields(cls: Any) -> dict[str, Any]:
    """Return the annotations of an event class's fields, by name."""
    return {field.name: field.type for field in fields(cls)}


def list_kinds() -> dict[str, type[Event]]:
    """Return the event classes by kind."""
    return dict(_KINDS)


def find_kind(kind: str) -> type[Event]:
    """Return the event class of a kind.

    Raises:
        EventError: There is no such kind; the log may be of another version.
    """
    if kind not in _KINDS:
        raise EventError(str(unknown_name("the kind of an event", kind, _KINDS)))
    return _KINDS[kind]
