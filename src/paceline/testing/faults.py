"""Failures that are written down before they happen: ``faults.kill(rank=1, step=7)``.

A script of faults is given to every worker of a test, and each calls `strike` at the start of each of its steps.
"""

import os
import signal
import time
from collections.abc import Iterable
from typing import Any, Literal

from paceline.registry import Settings


class Fault(Settings):
    """Something that happens to one rank at the start of one step."""

    kind: Literal["kill", "freeze", "delay", "fail"]
    rank: int
    step: int
    duration_s: float = 0.0
    """Of a delay."""
    message: str = ""
    """Of the error of a failure."""


class ScriptedError(Exception):
    """What a rank raises that is told to `fail`."""


def kill(*, rank: int, step: int) -> Fault:
    """Return the fault of a process that is gone at once, as after SIGKILL or a loss of power."""
    return Fault(kind="kill", rank=rank, step=step)


def freeze(*, rank: int, step: int) -> Fault:
    """Return the fault of a process that is there and does nothing any more (SIGSTOP)."""
    return Fault(kind="freeze", rank=rank, step=step)


def delay(*, rank: int, step: int, duration_s: float) -> Fault:
    """Return the fault of a rank that is alive and late by `duration_s`."""
    return Fault(kind="delay", rank=rank, step=step, duration_s=duration_s)


def fail(*, rank: int, step: int, message: str) -> Fault:
    """Return the fault of a rank whose own code raises `ScriptedError`."""
    return Fault(kind="fail", rank=rank, step=step, message=message)


def strike(script: Iterable[Fault | dict[str, Any]], *, rank: int, step: int) -> None:
    """Let happen what `script` (faults, or their JSON) holds for `rank` at `step`.

    Raises:
        ScriptedError: The rank was told to fail.
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
