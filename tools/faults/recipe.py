"""The run of the fault campaign: a small language model some of whose workers are hit, each fault once.

The environment variable ``FAULTS`` names a folder. In its ``faults.json`` is a list of faults, each with a number, the
rank that is hit, a step, a phase and a kind; a worker that is hit leaves the file ``struck-NUMBER`` there, first.
"""

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import durable, saver, store
from paceline.comm.group import joined_group
from paceline.comm.progress import PROGRESS
from paceline.elastic.member import StoreMember
from paceline.recipes.transformer_lm import run as make_run
from paceline.replica import state
from paceline.training import Run

FOLDER = Path(os.environ["FAULTS"])
_FOR_EVER_S = 100_000


def strike(phase: str, step: int) -> None:
    """Hit this worker, if a fault of its rank is due in the phase and was not seen yet."""
    group = joined_group()
    rank = group.rank if group is not None else -1
    for fault in json.loads((FOLDER / "faults.json").read_text()):
        is_due = fault["phase"] == phase and step >= fault["step"]
        if is_due and fault["rank"] in (rank, -1) and _claim(fault["number"]):
            _KINDS[fault["kind"]]()


def _claim(number: int) -> bool:
    try:
        with open(FOLDER / f"struck-{number}", "x") as file:
            json.dump({"pid": os.getpid(), "unix_s": time.time()}, file)
        return True
    except FileExistsError:
        return False


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep() -> None:
    time.sleep(_FOR_EVER_S)


def _hold_interpreter() -> None:
    ctypes.PyDLL(None).sleep(_FOR_EVER_S)  # a call of PyDLL keeps the interpreter's lock


_KINDS: dict[str, Callable[[], None]] = {"kill": _kill, "stop": _stop, "sleep": _sleep, "hold": _hold_interpreter}


def _before(owner: Any, name: str, phase: str) -> None:
    """Strike before a function is called."""
    real = getattr(owner, name)

    def called(*arguments: Any, **options: Any) -> Any:
        strike(phase, PROGRESS.read().step)
        return real(*arguments, **options)

    setattr(owner, name, called)


def _arm() -> None:
    """Strike where phases begin."""
    enter, stamp = PROGRESS.enter, PROGRESS.stamp

    def entered(now_s: float, phase: bytes) -> None:
        enter(now_s, phase)
        strike(phase.decode(), PROGRESS.read().step)

    def stamped(step: int, now_s: float, phase: bytes) -> None:
        stamp(step, now_s, phase)
        strike(phase.decode(), step)

    PROGRESS.enter, PROGRESS.stamp = entered, stamped
    _before(StoreMember, "report_loss", "vote")
    _before(state, "restore", "heal")
    _before(saver.AsyncSaver, "_copy", "snapshot")
    _before(store, "write_file", "persist")
    _before(durable.os, "rename", "commit")


_arm()


def run() -> Run:
    """Return the run, small enough for hundreds of trainings."""
    torch.set_num_threads(1)
    return make_run()
