"""What one update did, and when the parts of its step happened."""

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


@dataclass(frozen=True)
class StepResult:
    """What one update did. Where gradients are summed over all workers it is the same on each, but for the times."""

    loss: float
    """Mean over the samples of all workers whose gradients were summed in this step, or of all at a sync step."""
    weight: float
    """Number of those samples, or of tokens."""
    gradient_norm: float | None
    """Global norm before clipping; None where nothing is clipped."""
    communication_s: float
    """Time this worker waited for the exchange; what backward hid is not in it."""
    skipped: bool
    """Whether fp16 overflowed and parameters stayed as they were."""
    stop: bool
    """Whether some worker has asked to stop here."""
    newly_unused: list[str]
    """Parameters that no worker used, and that were not told of before; found a step later where gradients land in
    the next forward."""
    wire_bytes: int = 0
    """What this worker sent, by the price of the exchanges."""
    times: StepTimes = field(default_factory=StepTimes)
    """When its parts happened; buckets that land in the next forward are those of the step before."""


class UnusedParametersWarning(UserWarning):
    """Parameters had no gradient on any rank."""
