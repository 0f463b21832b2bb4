"""What a rank posts in its heartbeat."""

from dataclasses import dataclass, field

from paceline.errors import CommunicationError, PeerTimeoutError


@dataclass
class Heartbeat:
    """A rank's state, posted four times a second."""

    host: str
    pid: int
    beat: int = 0
    """Number of posts so far; if it stands still, so does the process."""
    begun: int = 0
    begun_name: str = ""
    waiting: int = 0
    """Sequence number of the operation that the rank waits in; 0 while it computes, or `MESSAGE`."""
    waiting_since_s: float = 0.0
    last_words: str = ""
    """Reason why the rank stopped, if it could post one."""
    recent: list[tuple[int, str]] = field(default_factory=list)
    """The last operations that it has begun, each with its number."""
    host_key: str = ""
    """Key of the host's processes, which see each other's numbers."""
    started: int = 0
    """Time when the process started, in ticks since boot."""
    waits: bool = False
    """Whether the process waits in an operation of any of its groups."""
    step: int = -1
    """Number of updates done; -1 before the first phase of a step."""
    phase: str = ""
    num_steps: int = 0
    """Number of updates since the process began to train."""
    still_s: float = 0.0
    """Time in the present phase."""
    longest_s: float = 0.0
    """Longest phase so far that was not one of waiting, saving or evaluating."""
    longest_silence_s: float = 0.0
    """Longest time between two posts."""
    progress: str = ""
    """Path by which processes of the host read step and phase."""
    stacks: str = ""
    """File that gets the stacks of the process when it is asked for them."""
    line: str = ""
    """Line of the user's code that it is at, once it has noticed by itself that it stands still."""

    @property
    def has_failed(self) -> bool:
        """Whether the rank has ended, and not because it had finished."""
        return self.last_words not in ("", FINISHED)

    @property
    def has_lost_peers(self) -> bool:
        """Whether the rank has ended because others did: it is not the cause."""
        return self.last_words.startswith((CommunicationError.__name__, PeerTimeoutError.__name__))

    def describe_begun(self) -> str:
        """Return the operation that it has begun last, in words."""
        return f"operation {self.begun} {self.begun_name!r}" if self.begun else "no operation"


MESSAGE = -1
"""In place of its number: a message, which has none, in a group that has begun no operation yet."""
FINISHED = "it has finished"
"""Last words of a rank that left without an error."""
