"""The process that workers are forked from: it imports torch and Paceline for all of them, once."""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
from pathlib import Path
from typing import Literal

from paceline.launch.signals import STOP_SIGNALS

_PRELOADED = ["paceline.launch.preloaded"]

START_METHOD: Literal["forkserver", "spawn"] = "forkserver" if sys.platform == "linux" else "spawn"
"""Start method of workers: forks of torch are safe on Linux only."""


def prepare_to_fork() -> None:
    """Start that process, unless it runs; called before torch is imported here, both import it at the same time.

    A signal to the whole process group (a closed terminal, `timeout`, Slurm) must not end it: it alone learns how
    workers end. Signals are blocked there, and in each worker until `unblock_signals`, so that none is lost.
    """
    if START_METHOD != "forkserver":
        return
    multiprocessing.set_forkserver_preload(_PRELOADED)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        multiprocessing.resource_tracker.ensure_running()  # it unblocks some of them here
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def find_server() -> int:
    """Return the number of the process that workers are forked from; 0 if there is none."""
    return getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None) or 0


def find_end(server: int) -> str:
    """Return how the process that workers are forked from has ended, in words; empty while it runs, or if it is 0."""
    if not server:
        return ""
    try:
        found = os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # another process's child, or another one was started, as that had ended
        return "" if _is_alive(server) else "ended"
    if found is None:
        return ""
    is_exit = found.si_code == os.CLD_EXITED
    return f"exited with code {found.si_status}" if is_exit else f"was killed by {signal.Signals(found.si_status).name}"


def _is_alive(process: int) -> bool:
    """Return whether a process that is no child of this one exists and has not ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return False
    return state not in ("Z", "X")


def unblock_signals() -> None:
    """Let signals reach this process, which was forked: one that asks to stop ends it, unless it is ignored here."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
