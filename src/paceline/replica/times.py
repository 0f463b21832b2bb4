"""When the parts of a step happened on this worker: what timelines are drawn from."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BucketTimes:
    """One bucket's way, by `time.perf_counter`."""

    index: int
    parameters: list[str]
    num_bytes: int
    wire_bytes: int
    """What this worker put on the wire for it, by the price of its exchange."""
    ready_s: float
    """The last of its gradients was made."""
    began_s: float
    """Its exchange began."""
    ended_s: float
    piece_s: tuple[float, ...]
    """How long the exchange of each of its pieces took."""
    landed_s: float
    """The worker had it."""
    waited_s: float
    """How long the worker stood still for it: a duration."""


@dataclass
class StepTimes:
    """One step's parts, by `time.perf_counter`; 0 for what has not happened."""

    began_s: float = 0.0
    """Forward began, or backward where forward ran elsewhere."""
    backward_began_s: float = 0.0
    backward_ended_s: float = 0.0
    optimizer_began_s: float = 0.0
    optimizer_ended_s: float = 0.0
    ended_s: float = 0.0
    buckets: list[BucketTimes] = field(default_factory=list)
    """Those that landed in the step; where they land in the next forward, of the step before."""
