"""Saves that are killed between any two calls of the file system, one after the other.

    python tools/faults/saves.py

A process is forked for each call: it saves a checkpoint, and is killed just before the call, or after half of what it
writes. The newest whole checkpoint must then be the old one or the new one, with each byte in its place, and the next
save must work.
"""

import argparse
import builtins
import io
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import CheckpointStore

_NAMES = [f"t{number}" for number in range(6)]
_CALLS = ("fsync", "rename", "link", "unlink", "mkdir", "rmdir", "open", "close", "ftruncate", "pwrite", "scandir")


@dataclass
class SavesOutcome:
    """What came of it."""

    num_calls: int = 0
    """Calls of a save."""
    num_killed: int = 0
    """Saves that were killed."""
    num_new: int = 0
    """Saves of them whose checkpoint was nevertheless the newest whole one."""


class _HalfWritten(io.FileIO):
    """A file whose writes are counted, and of which half is there when the process is killed."""

    def __init__(self, path: Any, mode: str, count: Callable[[], bool]) -> None:
        super().__init__(path, mode.replace("b", ""))
        self._count = count

    def write(self, content: Any) -> int:
        """Write, if this call is not the last."""
        content = memoryview(content).cast("B")
        if self._count():
            super().write(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(content)


def kill_saves(directory: Path, incremental: int) -> SavesOutcome:
    """Kill a save before each of its calls, and check what is left.

    Raises:
        AssertionError: A checkpoint was lost, or one that is not whole was taken for one.
    """
    outcome = SavesOutcome()
    step = 1
    _save(directory, step, incremental)
    while True:
        pid = os.fork()
        if not pid:
            try:
                _arm(outcome.num_calls)
                _save(directory, step + 1, incremental)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL), f"a save before call {outcome.num_calls} ended with code {code}"
        found = _check(directory)
        if code == 0:
            assert found == step + 1, f"a finished save of step {step + 1} was lost: {found} is the newest"
            return outcome
        assert found in (step, step + 1), f"killed before call {outcome.num_calls}, step {found} is the newest"
        outcome.num_calls, outcome.num_killed = outcome.num_calls + 1, outcome.num_killed + 1
        outcome.num_new += found == step + 1
        step = found


def _save(directory: Path, step: int, incremental: int) -> None:
    """Save twice: with `incremental` the second is one."""
    with CheckpointStore(directory, keep=2, incremental=incremental) as store:
        store.find_newest_valid(lambda path, why: None)
        tensors = {name: torch.full((300,), float(step)) for name in _NAMES} | {"frozen": torch.zeros(30_000)}
        store.save(tensors, {"step": step}, step)
        if incremental:
            store.save(tensors, {"step": step}, step)


def _check(directory: Path) -> int:
    """Return the step of the newest whole checkpoint."""
    checkpoint = CheckpointStore(directory).find_newest_valid(lambda path, why: None)
    assert checkpoint is not None, "no checkpoint is left"
    checkpoint.verify()
    tensors = {name: torch.zeros(300) for name in _NAMES}
    checkpoint.load(tensors, strict=False)
    assert all((tensor == checkpoint.step).all() for tensor in tensors.values())
    assert checkpoint.read_document() == {"step": checkpoint.step}
    return checkpoint.step


def _arm(last: int) -> None:
    """Kill this process before the call of this number, of those that touch files."""
    number, lock, real_os_open = iter(range(last + 1)), threading.Lock(), os.open

    def is_last() -> bool:
        with lock:
            return next(number, last) == last

    def count(real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            is_read = real is real_os_open and arguments[1] & os.O_ACCMODE == os.O_RDONLY  # changes nothing
            if not is_read and is_last():
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return called

    for name in _CALLS:
        setattr(os, name, count(getattr(os, name)))
    real_open = builtins.open

    def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if is_last():
            os.kill(os.getpid(), signal.SIGKILL)
        if "x" not in mode and "w" not in mode:
            return real_open(path, mode, *arguments, **options)
        return _HalfWritten(path, mode, is_last)

    builtins.open = opened


def main() -> int:
    """Kill saves of full and of incremental checkpoints."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    for incremental in (0, 3):
        with tempfile.TemporaryDirectory() as directory:
            print(f"incremental {incremental}: {kill_saves(Path(directory), incremental)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
