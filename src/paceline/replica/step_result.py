"""What one update did."""

from dataclasses import dataclass, field

from paceline.replica.times import StepTimes


@dataclass(frozen=True)
class StepResult:
    """What one update did. Where gradients are summed over all workers it is the same on each, but for the times."""

    loss: float
    """Mean over the samples of all workers whose gradients were summed, or that met, in this step."""
    weight: float
    """Mass of those samples, or tokens."""
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
