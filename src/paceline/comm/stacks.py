"""Python stacks of processes that hang: written by native code on a signal, also where Python's lock is held."""

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.monitor.user_code import is_users, shorten

SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else 0
"""Signal that asks a process for its stacks: a real-time one, which schedulers and profilers leave alone."""
_PATIENCE_S = 0.5
_THREAD = re.compile(r"^(?:Current t|T)hread 0x.*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (\S+)$', re.MULTILINE)


@dataclass
class _Registered:
    file: IO[bytes] | None = None
    pid: int = 0


_registered = _Registered()


def register_stacks(path: Path | None = None) -> str:
    """Let other processes ask this one for its stacks, and return the path of the file that gets them.

    Args:
        path: File to append to; by default anonymous memory, unless a file was given before.
    """
    if not SIGNAL:
        return ""
    is_ours = _registered.file is not None and _registered.pid == os.getpid()
    if path is not None or not is_ours:
        descriptor = os.memfd_create("paceline-stacks") if path is None else -1
        file = open(descriptor if path is None else path, "ab", buffering=0)  # noqa: SIM115 - open as long as we live
        faulthandler.register(SIGNAL, file=file, all_threads=True)
        if is_ours and _registered.file is not None:
            _registered.file.close()
        _registered.file, _registered.pid = file, os.getpid()
    assert _registered.file is not None
    name = _registered.file.name
    return (
        name if isinstance(name, str) else str(name) if path else f"/proc/{os.getpid()}/fd/{_registered.file.fileno()}"
    )


def started_at(pid: int) -> int:
    """Return the time when a process started, in ticks since boot, which tells it from others of the same number; or 0.

    A process that has ended but was not awaited counts as gone.
    """
    fields = _read_status(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else 0


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP; False if its state is invisible, or a debugger holds it."""
    return _read_status(pid)[:1] == ["T"]


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, though its parent may not have noticed; False if its state is invisible."""
    return _read_status(pid)[:1] in (["Z"], ["X"])


def _read_status(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    except OSError:
        return []


def ask_for_line(pid: int, path: str, *, is_reading: bool) -> str:
    """Ask a process of this host for its stacks, and return the line of user code that it is at; empty if it is silent.

    Args:
        pid: The process.
        path: File that it writes its stacks to.
        is_reading: Whether the rank waits for data, which other threads of it read.
    """
    with contextlib.suppress(OSError):
        if not path or not _takes_signal(pid):
            return ""
        before = os.stat(path).st_size
        os.kill(pid, SIGNAL)
        deadline_s = time.monotonic() + _PATIENCE_S
        said = b""
        while time.monotonic() < deadline_s:
            with open(path, "rb") as file:
                file.seek(before)
                if (longer := file.read()) == said and said:
                    break  # complete: it has not grown
                said = longer
            time.sleep(0.02)
        return find_line(said.decode(errors="replace"), is_reading=is_reading)
    return ""


def find_own_line(*, is_reading: bool) -> str:
    """Return the line of user code that this process is at, and write its stacks to its file."""
    if _registered.file is not None:
        faulthandler.dump_traceback(_registered.file)
    main = threading.main_thread().ident
    threads = [
        [(one.filename, str(one.lineno), one.name) for one in reversed(traceback.extract_stack(frame))]
        for thread, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] == main)
        if thread != threading.get_ident()
    ]
    return _choose_line(threads, is_reading=is_reading)


def find_line(stacks: str, *, is_reading: bool) -> str:
    """Return the line of user code that a process is at, from the stacks that faulthandler wrote."""
    threads = [_FRAME.findall(stack) for stack in _THREAD.split(stacks)]  # the main thread comes last
    return _choose_line(threads, is_reading=is_reading)


def _choose_line(threads: Sequence[Sequence[tuple[str, str, str]]], *, is_reading: bool) -> str:
    """Return the innermost line of user code in the main thread, or in the one that reads data; else any line.

    Args:
        threads: File, line and function of the frames of each thread, the innermost first; the main thread is the last.
        is_reading: Whether the main thread waits for data.
    """
    lines = [next((frame for frame in frames if is_users(frame[0])), None) for frames in threads]
    others = [line for line in lines[:-1] if line is not None]
    found = others[0] if is_reading and others else lines[-1] if lines else None
    if found is None and threads and threads[-1]:
        found = threads[-1][0]
    return f"{shorten(found[0])}:{found[1]} in {found[2]}" if found is not None else ""


def _takes_signal(pid: int) -> bool:
    """Return whether a process has a handler for the signal, which would end it otherwise."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def find_host_of_processes() -> str:
    """Return a key that is equal for all processes that see each other's numbers: same boot, same PID namespace."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
