"""What the exit code of `paceline train` says, and the end of a process with one."""

import atexit
import enum
import os
import sys
from typing import NoReturn


class ExitCode(enum.IntEnum):
    """Exit codes; those from 64 on are sysexits.h's."""

    FINISHED = 0
    FAILED = 1
    """Code raised an error that is not Paceline's."""
    REFUSED = 2
    """Paceline said what is wrong; the same start would end the same way."""
    PEERS_LOST = 69
    """Another worker died or stopped answering; a new start can go on."""
    PREEMPTED = 75
    """A signal asked to stop; what was trained is saved, and a new start goes on from there."""


def leave(code: int) -> NoReturn:
    """End this process with an exit code, after all that was registered for its end.

    Python would then take torch apart object by object, which costs a second of each process.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
