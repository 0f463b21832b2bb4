"""Events of a run that is trained by a plan."""

from paceline.monitor.event import Event, Float, Int, event


@event("plan_compared")
class PlanCompared(Event):
    """Steps of a run beside what its plan predicted of one, on rank 0: after 8, 16, 32, ... steps, and at the end."""

    predicted_s: Float
    """Time of a step by the plan."""
    predicted_s_low: Float
    """Lower end of its 90 % interval."""
    predicted_s_high: Float
    """Upper end."""
    measured_s: Float
    """Median time of the newest steps, without the first of this start."""
    num_steps: Int
    """Number of steps that it is the median of."""
    is_within: bool
    """Whether the measured time lies in the interval."""
    machines: str
    """Machines that the plan is for, in words."""
    basis: str = ""
    """Origin of the prediction: specification, published, calibrated or profile."""
