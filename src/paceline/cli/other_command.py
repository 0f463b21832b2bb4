"""Commands of Paceline that one of them runs, each in a process and a session of its own."""

import os
import signal
import subprocess
from typing import Any

_END_S = 60.0
"""Time in which a command ends that is asked to."""


def end_process(process: "subprocess.Popen[Any]", *, asks: bool = True) -> int:
    """Wait until a command of Paceline and its workers end, and return its exit code.

    Args:
        process: The command, in a session of its own.
        asks: Whether to ask it to end, by a signal at which it leaves, and to end it by force where it does not.
    """
    if asks and process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(_END_S if asks else None)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()
