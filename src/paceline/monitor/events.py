"""What a run says, as typed events."""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, dataclass_transform

from typing_extensions import (
    TypeVar,
)  # comes with pydantic; `typing` has defaults of type variables from 3.13 on

from paceline.errors import PacelineError, unknown_name
from paceline.monitor.fields import find_problem


class EventError(PacelineError, ValueError):
    """An event has a field of the wrong type, or a line of a log is not an event."""


class Event:
    """Something that happened in a run: the payload, without who and when."""

    __slots__ = ()
    kind: ClassVar[str]
    """The name the class is registered under, and that a line of the log carries."""

    def __post_init__(self) -> None:
        problem = find_problem(self)
        if problem is not None:
            raise EventError(f"{self.kind}.{problem}")


E_co = TypeVar("E_co", bound=Event, covariant=True, default=Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Generic[E_co]):
    """An event in its envelope: which run, rank and membership epoch said it, and when."""

    run: str
    rank: int
    """-1 for the launcher, which is none of the workers."""
    epoch: int
    """Of the membership: it counts the groups that trained, not passes over the data."""
    step: int
    """-1 where no step is known."""
    time_s: float
    """Monotonic; comparable only within one process."""
    unix_s: float
    event: E_co

    def __post_init__(self) -> None:
        problem = find_problem(self)
        if problem is not None:
            raise EventError(f"record.{problem}")
        if not isinstance(self.event, Event):
            raise EventError(f"record.event must be an event, but got {reprlib.repr(self.event)}")


_KINDS: dict[str, type[Event]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _event(kind: str) -> Callable[[type[E_co]], type[E_co]]:
    def add(fields_only: type[E_co]) -> type[E_co]:
        cls = dataclass(frozen=True, slots=True, kw_only=True)(fields_only)
        cls.kind = kind
        _KINDS[kind] = cls
        return cls

    return add


def list_kinds() -> dict[str, type[Event]]:
    """Return the classes of events by their kind."""
    return dict(_KINDS)


def find_kind(kind: str) -> type[Event]:
    """Return the class of events of that kind.

    Raises:
        EventError: There is none; it may be of another version.
    """
    if kind not in _KINDS:
        raise EventError(str(unknown_name("the kind of an event", kind, _KINDS)))
    return _KINDS[kind]


@_event("run_started")
class RunStarted(Event):
    """The workers are ready; each attempt after a restart or resume says it again."""

    recipe: str
    settings: dict[str, Any]
    """The resolved run, as JSON."""
    num_workers: int
    device: str
    num_parameters: int
    start_step: int
    """Steps that were done before this attempt."""
    total_steps: int
    global_batch: int
    samples_per_epoch: int
    resumed_from: str | None = None
    """The checkpoint this attempt goes on from."""


@_event("step_finished")
class StepFinished(Event):
    """One optimizer update was made."""

    loss: float
    weight: float
    """Mass of the mean that `loss` is."""
    num_samples: int
    learning_rate: float
    duration_s: float
    communication_s: float
    """Time the worker waited for the exchange, not hidden behind computing."""
    position: int
    """Samples used since the start of training."""
    gradient_norm: float | None = None
    loss_scale: float | None = None
    wire_bytes: int | None = None
    """What this worker put on the wire for the step; None where it was not counted."""


@_event("bucket_exchanged")
class BucketExchanged(Event):
    """How the exchange of one bucket went that landed in a step that was sampled, on the worker that says it.

    Each worker says it for each of its buckets, and then `StepTimed` once. Moments count from the begin of the
    step's forward; where gradients land in the next forward, those of the step before are below 0.
    """

    bucket: int
    """Its number, in the order in which buckets leave."""
    first_parameter: str
    num_parameters: int
    num_bytes: int
    """Of its gradients, before any codec."""
    wire_bytes: int
    """What this worker put on the wire for it."""
    ready_s: float
    """Its last gradient was there."""
    began_s: float
    """Its exchange began; before that it stood in the queue."""
    ended_s: float
    """Its exchange was done; where that cannot be seen, the moment at which waiting for it ended."""
    landed_s: float
    """It was waited for and handed to the optimizer."""
    waited_s: float
    """How long the worker stood still for it."""


@_event("step_timed")
class StepTimed(Event):
    """Where the time of a step that was sampled went, on the worker that says it, after its buckets.

    Moments count from the begin of forward, on the host's clock. With gradient accumulation forward and backward
    are those of the last micro-batch, and all before it counts as forward.
    """

    began_unix_s: float
    """The time of day at the begin of forward: it lines up the workers."""
    forward_ended_s: float
    backward_began_s: float
    backward_ended_s: float
    duration_s: float
    """Until the end of the update."""
    waited_s: float
    """How long the worker stood still for the exchange of all buckets, and of the step's mass."""
    optimizer_began_s: float | None = None
    """None where parameters were updated bucket by bucket, as these landed."""
    optimizer_ended_s: float | None = None


@_event("pipeline_measured")
class PipelineMeasured(Event):
    """What one rank of a pipeline computed in a step that was sampled; each rank says it for itself.

    The lists have one item for each piece of work, in the order in which they were done.
    """

    order: str
    """In which the ranks work."""
    ranks: list[int]
    """Those of the pipeline, from the first stage's on."""
    num_micro_batches: int
    stages_per_rank: int
    formula: float | None
    """Idle part of the step by the order's own formula, for stages and passes of equal cost; None where none is
    known."""
    began_unix_s: float
    """The time of day at the begin of the first: it lines up the ranks. Moments count from it."""
    works: list[str]
    """forward; backward; or where that is parted, inputs and weights."""
    stages: list[int]
    micro_batches: list[int]
    began_s: list[float]
    ended_s: list[float]


@_event("memory_estimated")
class MemoryEstimated(Event):
    """What a step needs on each rank, by a rehearsal before the run started; not said where it fits by far."""

    peak_bytes: int
    """Of tensors, at the worst moment."""
    bytes_of: dict[str, float]
    """By what they are for."""
    available_bytes: int
    """What a rank may have."""


@_event("memory_measured")
class MemoryMeasured(Event):
    """What a step needed on rank 0."""

    peak_bytes: int
    """Of tensors, at the worst moment."""
    bytes_of: dict[str, float]
    """By what they are for; empty where torch's allocator counted, which does not know it."""


@_event("slow_worker")
class SlowWorker(Event):
    """A worker computes much slower than the others; of each worker that is found slow it is said once a start."""

    slow_rank: int
    factor: float
    """How many times longer it computes for a sample than the median of the others."""
    samples_per_s: float
    """While it computes: waiting is not in it."""
    others_samples_per_s: float


@_event("shares_changed")
class SharesChanged(Event):
    """The parts of a global batch that workers take follow their speed from a position on."""

    shares: list[int]
    """Samples of a whole global batch, by rank."""
    start: int
    """Samples used since the start of training, at which they come into force."""
    samples_per_s: list[float]
    """By rank, while they compute; NaN of one that computed nothing."""


@_event("gradient_noise_measured")
class GradientNoiseMeasured(Event):
    """How noisy gradients are: moving averages of what single steps say."""

    noise_scale: float | None
    """Samples at which a step's gradient is as much signal as noise; None where it is too large to be told."""
    trace: float
    """Variance of a single sample's gradient, summed over all parameters."""
    squared_norm: float
    """Of the true gradient; an estimate, so that it may be negative where noise is all there is."""
    num_steps: int
    """Since the measurement before."""


@_event("batch_changed")
class BatchChanged(Event):
    """Steps take another number of samples from here on."""

    global_batch: int
    """Over all workers."""
    start: int
    """Samples used since the start of training, at which it comes into force."""


@_event("model_grown")
class ModelGrown(Event):
    """The model has become deeper."""

    num_layers: int
    num_parameters: int
    method: str
    """What the new layers begin with."""


@_event("staleness_measured")
class StalenessMeasured(Event):
    """How old the parameters were that workers computed their pushes from, since the run began."""

    delays: list[int]
    """In updates of others between a worker's pull and its push."""
    counts: list[int]
    """Pushes with each of these delays."""
    num_dropped: int
    """Pushes that came too late to count."""


@_event("evaluated")
class Evaluated(Event):
    """The model was judged on the held-out data."""

    loss: float
    metrics: dict[str, float]
    num_samples: int
    duration_s: float


@_event("checkpoint_saved")
class CheckpointSaved(Event):
    """A checkpoint is whole on disk."""

    path: str
    num_bytes: int
    duration_s: float


@_event("checkpoint_skipped")
class CheckpointSkipped(Event):
    """A checkpoint was found that could not be used."""

    path: str
    reason: str


@_event("unused_parameters")
class UnusedParameters(Event):
    """Parameters that got no gradient on any rank."""

    names: list[str]


@_event("warned")
class Warned(Event):
    """Something a person should know, though training goes on."""

    message: str


@_event("preempted")
class Preempted(Event):
    """The run was asked to stop, and saved where it was."""

    checkpoint: str
    signal: str


@_event("restarted")
class Restarted(Event):
    """The workers are started again after a failure."""

    attempt: int
    reason: str


@_event("failed")
class Failed(Event):
    """A worker ended with an error."""

    error: str
    """Name of the exception's class."""
    message: str
    traceback: str
    place: str = ""
    """Innermost line of the user's own code that the exception came through, as ``file:line``; empty where none is."""


@_event("showcased")
class Showcased(Event):
    """What the trained model can do, as a text. It is the model's own output: trust nothing in it."""

    text: str


@_event("run_finished")
class RunFinished(Event):
    """All steps were made."""

    held_out_loss: float | None
    metrics: dict[str, float]
    duration_s: float
    samples_per_s: float
