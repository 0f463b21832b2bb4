"""Facts that a coordinator is told, and actions that it answers with."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

End: TypeAlias = Literal["done", "killed", "gave_up", "failed"]
"""End of a process: the run is over for it; a signal or code of others ended it; it cannot go on without its peers;
or it met an error that it would meet again."""


def host_of(name: str) -> str:
    """Return the name of the other machine that a worker is on; empty for the supervisor's own."""
    return name.partition("@")[2]


@dataclass(frozen=True)
class View:
    """One epoch of membership, as a worker sees it."""

    epoch: int
    rank: int
    """Rank of the worker. Rank 0 has the most advanced whole state, and sends it, unless places are fixed."""
    size: int
    names: tuple[str, ...]
    """Stable names of the workers, by rank."""
    previous: tuple[int | None, ...]
    """Ranks in the epoch before, by rank; None for a new worker, without state."""
    step: int
    """Updates of the most advanced state; -1 if no worker has one, so that the newest checkpoint is loaded."""
    reason: str
    """Reason of the change in words: who was lost, joined or left."""


@dataclass(frozen=True)
class Ready:
    """A worker that was started is there, without state, and waits to be taken in."""

    name: str
    obstacle: str = ""
    """Reason why workers of this run cannot go on in another group; empty if they can."""
    fixed: str = ""
    """Reason why there must always be as many workers, each of which has a place of its own; empty if not."""


@dataclass(frozen=True)
class Voted:
    """A worker of `epoch` has stopped, and waits for the next one."""

    name: str
    epoch: int
    step: int
    """Number of updates of its state."""
    is_whole: bool = True
    """Whether the state is that after `step` updates; if not, an update was broken off in the middle."""
    lost: str = ""
    """Way in which it lost its peers; empty if it has stopped at a step boundary, as asked."""
    accused: tuple[str, ...] = ()
    """Workers that hang by its verdict."""


@dataclass(frozen=True)
class Died:
    """A worker's process has ended."""

    name: str
    end: End
    reason: str


@dataclass(frozen=True)
class Silent:
    """A worker stands still."""

    name: str
    reason: str


@dataclass(frozen=True)
class LeaveAsked:
    """A worker is to leave at a step boundary."""

    name: str
    within_s: float | None = None
    """Time that the supervisor gives it; None for any."""


@dataclass(frozen=True)
class Scaled:
    """The number of workers that is wanted has changed."""

    target: int


@dataclass(frozen=True)
class Offered:
    """Another machine offers workers, which are wanted in addition."""

    host: str
    """Name of the machine, the last part of its workers' names."""
    num_workers: int


@dataclass(frozen=True)
class Withdrawn:
    """The workers of another machine are to leave at a step boundary, and nobody replaces them."""

    host: str


@dataclass(frozen=True)
class HostLost:
    """Another machine no longer answers, or its workers are no longer wanted: they count as dead."""

    host: str
    reason: str


@dataclass(frozen=True)
class StopAsked:
    """All workers were asked to stop: nobody is started or taken in any more."""


@dataclass(frozen=True)
class AllEnded:
    """All processes have ended after `RestartAll`."""

    step: int
    """Number of updates that the run has reached, also before; -1 if none."""
    reason: str
    """Reason why they ended."""


Fact: TypeAlias = (
    Ready | Voted | Died | Silent | LeaveAsked | Scaled | Offered | Withdrawn | HostLost | StopAsked | AllEnded
)


@dataclass(frozen=True)
class Announce:
    """Tell the workers of the next epoch, and those that are no longer in it."""

    view: View
    """View of rank 0; the others' differ in the rank."""


@dataclass(frozen=True)
class StartWorker:
    """Start a process, unless one of this name was started before."""

    name: str
    slot: int
    """Lowest free place on its machine, by which it chooses its GPU."""


@dataclass(frozen=True)
class Kill:
    """End a process at once."""

    name: str
    reason: str


@dataclass(frozen=True)
class AskForBoundary:
    """Ask the workers of an epoch to stop at a step boundary that they agree on, and to vote there."""

    epoch: int


@dataclass(frozen=True)
class RestartAll:
    """End all processes, then say `AllEnded`: the newest checkpoint is the state to go on from, if anything can."""

    reason: str


@dataclass(frozen=True)
class GiveUp:
    """Start nothing any more: restarts bring no progress."""

    reason: str


@dataclass(frozen=True)
class Finished:
    """All processes have ended, and none needs to be started."""


Action: TypeAlias = Announce | StartWorker | Kill | AskForBoundary | RestartAll | GiveUp | Finished
