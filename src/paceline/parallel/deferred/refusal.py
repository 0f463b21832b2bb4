"""Why a model must be built whole, in a sentence that a log can end with."""

from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from paceline.errors import PacelineError

_MEANINGS = {
    "Cannot access data pointer": "it reads or writes a tensor's memory past torch's operators",
    "Attempted to call": "it reads or writes a tensor's memory past torch's operators",
}
"""Reasons, by what torch's errors begin with."""


class UndeferrableError(PacelineError):
    """A construction that cannot be recorded, so that the model must be built whole."""


def explain(error: Exception, what: Any = None) -> UndeferrableError:
    """Return the error that says why a construction that raised `error`, in an operator, cannot be recorded."""
    if isinstance(error, UndeferrableError):
        return error
    first_line = str(error).strip().partition("\n")[0]
    for beginning, meaning in _MEANINGS.items():
        if first_line.startswith(beginning):
            return UndeferrableError(meaning)
    operator = f"the operator {what}" if what is not None else "it"
    if isinstance(error, DynamicOutputShapeException | DataDependentOutputException):
        return UndeferrableError(f"{operator} makes a result whose size depends on values")
    return UndeferrableError(f"{operator} raises {type(error).__name__} while the model is built: {first_line}")


def forget(error: BaseException) -> None:
    """Drop the tracebacks of an error and of what it follows from, whose frames keep local variables alive."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]
