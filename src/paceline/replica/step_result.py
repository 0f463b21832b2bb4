"""Result of one update, and the times of its step."""

import warnings
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BucketTimes:
    """Times of one bucket, by `time.perf_counter`."""

    index: int
    parameters: list[str]
    num_bytes: int
    wire_bytes: int
    """Bytes that this worker sent for the bucket, as the codec estimates them."""
    ready_s: float
    """Time at which its last gradient was ready."""
    began_s: float
    """Time at which its exchange began."""
    ended_s: float
    landed_s: float
    """Time at which the worker had received it."""
    waited_s: float
    """Time that the worker waited for it: a duration."""


@dataclass(frozen=True)
class BucketChoice:
    """A chosen bucket size."""

    bucket_bytes: int
    reason: str
    """Numbers that it was chosen by, in words."""


@dataclass
class StepTimes:
    """Times of one step, by `time.perf_counter`; 0 for events that have not happened."""

    began_s: float = 0.0
    """Time at which forward began, or backward if forward ran elsewhere."""
    backward_began_s: float = 0.0
    backward_ended_s: float = 0.0
    optimizer_began_s: float = 0.0
    optimizer_ended_s: float = 0.0
    ended_s: float = 0.0
    buckets: list[BucketTimes] = field(default_factory=list)
    """Buckets applied in the step; if they are applied in the next forward, those of the step before."""
    bucket_choice: BucketChoice | None = None
    """Choice of the bucket size that was made after the step, once in a training."""


@dataclass(frozen=True)
class StepResult:
    """Result of one update. If gradients are summed over all workers it is the same on each, except for the times."""

    loss: float
    """Mean loss over the workers whose gradients were summed in this step, or over all workers at a sync step."""
    weight: float
    """Number of samples, or tokens, in the loss."""
    gradient_norm: float | None
    """Global gradient norm before clipping; None without clipping."""
    communication_s: float
    """Time that this worker waited for the exchange, without the part hidden behind backward."""
    skipped: bool
    """Whether fp16 overflowed and parameters stayed unchanged."""
    stop: bool
    """Whether all workers stop here, since one of them asked for it."""
    newly_unused: list[str]
    """Parameters that no worker used, each reported once; reported a step later if gradients are applied in
    the next forward."""
    wire_bytes: int = 0
    """Bytes that this worker sent, by the exchanges' own estimates."""
    times: StepTimes = field(default_factory=StepTimes)
    """Times of the step; buckets applied in the next forward are those of the step before."""


class UnusedParametersWarning(UserWarning):
    """Parameters had no gradient on any rank."""


def warn_of_unused(names: list[str], step: int, where: str) -> None:
    """Warn of parameters without a gradient; `where` says on which ranks."""
    warnings.warn(
        f"{len(names)} parameters had no gradient at step {step} {where} and stay as they are: "
        f"{', '.join(names)}; freeze them with requires_grad=False if that is intended",
        UnusedParametersWarning,
        stacklevel=4,
    )
