"""What the exit code of `paceline train` says."""

import enum


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
    """A signal asked to stop; a checkpoint is saved and a new start goes on from it."""
