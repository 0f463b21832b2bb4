"""Scripted failures: ``faults.kill(rank=1, step=7)``.

A script of faults is given to every worker of a test, and each calls `strike` at the start of each of its steps.
"""

import os
import signal
import time
from collections.abc import Iterable
from typing import Any, Literal

from paceline.registry import Settings


class Fault(Settings):
    """A failure of one rank at the start of one step."""

    kind: Literal["kill", "freeze", "delay", "fail"]
    rank: int
    step: int
    duration_s: float = 0.0
    """Duration of a delay."""
    message: str = ""
    """Message of a `fail` error."""


class ScriptedError(Exception):
    """The error that `fail` raises on a rank."""


def kill(*, rank: int, step: int) -> Fault:
    """Return the fault of a process that ends at once, as after SIGKILL or a loss of power."""
    return Fault(kind="kill", rank=rank, step=step)


def freeze(*, rank: int, step: int) -> Fault:
    """Return the fault of a process that exists but no longer runs (SIGSTOP)."""
    return Fault(kind="freeze", rank=rank, step=step)


def delay(*, rank: int, step: int, duration_s: float) -> Fault:
    """Return the fault of a live rank that is late by `duration_s`."""
    return Fault(kind="delay", rank=rank, step=step, duration_s=duration_s)


def fail(*, rank: int, step: int, message: str) -> Fault:
    """Return the fault of a rank whose own code raises `ScriptedError`."""
    return Fault(kind="fail", rank=rank, step=step, message=message)


def strike(script: Iterable[Fault | dict[str, Any]], *, rank: int, step: int) -> None:
    """Execute the faults of `script` (faults, or their JSON) for `rank` at `step`.

    Raises:
        ScriptedError: The script has a failure for this rank and step.
    """
    for fault in map(Fault.model_validate, script):
        if (fault.rank, fault.step) != (rank, step):
            continue
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "delay":
                time.sleep(fault.duration_s)
            case "fail":
                raise ScriptedError(fault.message)
