"""Runner of a contract's checks."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def run_checks(checks: Sequence[Callable[[T], str | None]], subject: T) -> list[str]:
    """Run `checks` on `subject`; return a line of each: ``passed: NAME`` or ``skipped: NAME (reason)``.

    Raises:
        AssertionError: A check failed; the message begins with its name.
    """
    lines = []
    for check in checks:
        try:
            reason = check(subject)
        except Exception as error:
            raise AssertionError(f"{check.__name__}: {str(error) or repr(error)}") from error
        lines.append(f"skipped: {check.__name__} ({reason})" if reason else f"passed: {check.__name__}")
    return lines
