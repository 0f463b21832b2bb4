"""Processes of this machine that find each other as torchrun's do, watched until all have ended."""

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from paceline.comm.control import ControlAccess, ControlServer
from paceline.comm.torch_group import HOST_ADDRESS
from paceline.launch.exit_codes import ExitCode
from paceline.launch.forking import START_METHOD, prepare_to_fork, unblock_signals
from paceline.launch.signals import StopRequest

ACCESS_FILE = "control.json"
_FULL_BYTES = 64 * 1024
"""Free space below which a disk is told of as full."""
GRACE_S = 40.0
"""Time that the others have to end by themselves after one has failed."""


@dataclass
class Ended:
    """How processes ended, by rank."""

    values: dict[int, Any] = field(default_factory=dict)
    """Return values of the function, by rank."""
    exit_codes: dict[int, int] = field(default_factory=dict)
    """Minus the signal where one ended it."""
    ended_here: set[int] = field(default_factory=set)
    """Ranks that were ended because others had failed."""

    @property
    def failures(self) -> dict[int, int]:
        """Exit codes of those that failed by themselves."""
        return {rank: code for rank, code in self.exit_codes.items() if code and rank not in self.ended_here}


class ProcessesError(RuntimeError):
    """Processes failed; what they said is in their output."""


def run_in_processes(num_processes: int, function: Callable[..., Any], *arguments: Any) -> dict[int, Any]:
    """Run a function in processes here, whose output is this one's, and return what it returned, by rank.

    Raises:
        ProcessesError: One of them failed.
        SystemExit: A signal asked to stop.
    """
    with StopRequest() as stop:
        ended = watch_processes(num_processes, function, *arguments, stop=stop)
    if stop.number:
        raise SystemExit(128 + stop.number)
    if len(ended.values) < num_processes:
        codes = ", ".join(f"rank {rank} ended with {code}" for rank, code in sorted(ended.exit_codes.items()))
        raise ProcessesError(f"every process must return, but {codes}; read what they printed")
    return ended.values


def watch_processes(num_processes: int, function: Callable[..., Any], *arguments: Any, stop: StopRequest) -> Ended:
    """Run a function in processes here until all have ended; where one fails, the others are told to end.

    On Linux they are forked from a process that has imported torch and Paceline for them, and for those started later.

    Args:
        num_processes: Number of processes.
        function: Function of each process, at the top of a module.
        arguments: Arguments of the function.
        stop: Signals to this process, which are handed on; whoever is asked to stop has all the time it needs.
    """
    prepare_to_fork()
    context: Any = multiprocessing.get_context(START_METHOD)
    server = ControlServer()
    ended = Ended()
    processes: list[BaseProcess] = []
    receivers: dict[int, Connection] = {}
    stop.hand_on = lambda number: _signal(processes, ended, number)
    try:
        for rank in range(num_processes):
            receivers[rank], sender = context.Pipe(duplex=False)
            start = (make_environment(rank, num_processes, server.access), sender, function, arguments)
            process = context.Process(target=_be_rank, args=start, name=f"rank {rank}")
            process.start()
            sender.close()
            processes.append(process)
        if stop.number:  # those that were started after it came have not heard of it
            stop.hand_on(stop.number)
        _watch(processes, receivers, ended)
        return ended
    finally:
        stop.hand_on = lambda _: None
        for process in processes:
            process.kill()
            process.join()
        server.close()


def _watch(processes: list[BaseProcess], receivers: dict[int, Connection], ended: Ended) -> None:
    """Wait until all have ended, and note how."""
    deadline_s: float | None = None
    while running := [rank for rank in range(len(processes)) if rank not in ended.exit_codes]:
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        wait([*receivers.values(), *(processes[rank].sentinel for rank in running)], timeout_s)
        for rank in running:
            exit_code = processes[rank].exitcode  # asked first: what was sent before the end is there then
            _receive(rank, receivers, ended)
            if exit_code is not None:
                ended.exit_codes[rank] = exit_code
        left = [rank for rank in running if rank not in ended.exit_codes]
        if deadline_s is None and any(code not in _GOOD_CODES for code in ended.exit_codes.values()):
            deadline_s = time.monotonic() + GRACE_S
            ended.ended_here |= set(left)
            for rank in left:
                processes[rank].terminate()
        elif deadline_s is not None and time.monotonic() >= deadline_s:
            for rank in left:
                processes[rank].kill()


_GOOD_CODES = (ExitCode.FINISHED, ExitCode.PREEMPTED, ExitCode.BUDGET_SPENT)


def _receive(rank: int, receivers: dict[int, Connection], ended: Ended) -> None:
    """Take what a rank returned, if it has."""
    if rank in receivers and receivers[rank].poll():
        with receivers.pop(rank) as receiver, contextlib.suppress(EOFError):  # it ends without a message
            ended.values[rank] = receiver.recv()


def _signal(processes: list[BaseProcess], ended: Ended, number: int) -> None:
    """Send a signal to those that run. It is called in a handler: to ask how they are would disturb who asks now."""
    for rank, process in enumerate(processes):
        if rank not in ended.exit_codes and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def make_environment(rank: int, size: int, access: ControlAccess, address: str = "") -> dict[str, str]:
    """Return the variables of torchrun's environment for a rank.

    Args:
        rank: Rank of the process.
        size: Number of ranks of this machine.
        access: Access to the store.
        address: Address of this machine for connections to ranks on others; empty if there are no others.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": access.host,
        "MASTER_PORT": str(access.port),
        **access.environment(),
        **({HOST_ADDRESS: address} if address else {}),
    }


def _be_rank(
    environment: dict[str, str], sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    prepare_rank(environment)
    sender.send(function(*arguments))


def describe_exit(name: str, code: int, folder: Path) -> str:
    """Return how a process ended, in words; where it said nothing, a full disk may be why.

    Args:
        name: Name of the process.
        code: Exit code of the process, minus the signal where one ended it.
        folder: Folder into which it wrote.
    """
    if code < 0:
        return f"{name} was killed by {signal.Signals(-code).name}"
    words = f"{name} exited with code {code}"
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < _FULL_BYTES:
            words += f"; the disk of {folder} is full"
    return words


def prepare_rank(environment: dict[str, str], output: Path | None = None) -> None:
    """Make this process, which was forked for it, a rank, whose output is in a folder if one is given."""
    multiprocessing.set_start_method(None, force=True)  # what the rank starts shall start as it does elsewhere
    gc.freeze()  # a collection need not look through all that was imported, which takes 0.3 s
    if output is not None:
        for descriptor, kind in ((1, "out"), (2, "err")):
            _redirect(descriptor, output / f"rank{environment['RANK']}.{kind}")
        faulthandler.enable()  # native code that aborts says where
        sys.stdout, sys.stderr = _open_output(1, "strict"), _open_output(2, "backslashreplace")
    os.environ.update(environment)
    unblock_signals()


class _OutputFile(io.FileIO):
    """Output of a worker: what a full disk has no room for is lost, and an error of nobody who prints."""

    _lost: str = ""
    """Reason why something is missing here; empty if nothing is."""

    def write(self, data: Any, /) -> int | None:  # type: ignore[override]
        try:
            if self._lost:
                super().write(f"\n---- output is missing here: {self._lost} ----\n".encode())
                self._lost = ""
            return super().write(data)
        except OSError as error:
            self._lost = str(error)
            return memoryview(data).nbytes


def _open_output(descriptor: int, errors: str) -> io.TextIOWrapper:
    """Return a stream whose lines can be read while the process runs, and are not lost with it."""
    buffer = io.BufferedWriter(_OutputFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding="utf-8", errors=errors, line_buffering=True)


def _redirect(descriptor: int, path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    if os.fstat(file).st_size:
        os.write(file, time.strftime("\n---- started again, %Y-%m-%d %H:%M:%S ----\n").encode())
    os.dup2(file, descriptor)
    os.close(file)
