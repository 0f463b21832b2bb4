"""What the exit code of `paceline train` says, and the end of a process with one."""

import atexit
import contextlib
import enum
import os
import sys
from typing import NoReturn

from pydantic import ValidationError

from paceline.errors import (
    BudgetError,
    CommunicationError,
    DivergenceError,
    MismatchError,
    NonFiniteError,
    PacelineError,
    SpikeError,
    StorageError,
)


class ExitCode(enum.IntEnum):
    """Exit codes; those from 64 on are sysexits.h's."""

    FINISHED = 0
    FAILED = 1
    """The training failed: an error in other code, replicas or operations that differ between ranks, a loss that is not
    finite, or a disk that is full or read-only."""
    REFUSED = 2
    """The input is wrong, and the message says what; the same start would end the same way."""
    PEERS_LOST = 69
    """Another worker died or stopped answering; a new start can go on."""
    PREEMPTED = 75
    """A signal asked to stop; what was trained is saved, and a new start goes on from there."""
    BUDGET_SPENT = 77
    """The budget of the run is spent; what was trained is saved, and a new start with more of it goes on from there."""


def find_exit_code(error: type[BaseException]) -> ExitCode:
    """Return the exit code of a process that a kind of error ends."""
    if issubclass(error, CommunicationError):
        return ExitCode.PEERS_LOST
    if issubclass(error, BudgetError):
        return ExitCode.BUDGET_SPENT
    if issubclass(error, DivergenceError | MismatchError | NonFiniteError | SpikeError | StorageError):
        return ExitCode.FAILED
    return ExitCode.REFUSED if issubclass(error, PacelineError | ValidationError) else ExitCode.FAILED


def leave(code: int) -> NoReturn:
    """End this process with an exit code, after all that was registered for its end.

    Python would then take torch apart object by object, which costs a second of each process.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # on a full disk
            stream.flush()
    os._exit(code)
