"""What a run says, as typed events."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Generic, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import TypeVar  # comes with pydantic; `typing` has defaults from 3.13 on

from paceline.errors import PacelineError, unknown_name
from paceline.registry import explain

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _read_non_finite(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer of 64 bits."""
Float = Annotated[float, BeforeValidator(_read_non_finite)]
"""A float, or its name where JSON has none: nan, inf or -inf."""


class EventError(PacelineError, ValueError):
    """An event has a field of the wrong type, or a line of a log is not an event."""


class Event:
    """Something that happened in a run: the payload, without who and when."""

    __slots__ = ()
    kind: ClassVar[str]
    """The name the class is registered under, and that a line of the log carries."""


T = TypeVar("T")
E_co = TypeVar("E_co", bound=Event, covariant=True, default=Event)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _checked(fields_only: type[T]) -> type[T]:
    """Make a dataclass that checks its fields, and raises an `EventError` where one is wrong."""
    config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
    cls: Any = dataclass(frozen=True, slots=True, kw_only=True, config=config)(fields_only)
    check = cls.__init__

    def check_fields(self: T, /, **given: Any) -> None:
        try:
            check(self, **given)
        except ValidationError as error:
            raise EventError(f"{getattr(cls, 'kind', 'record')}: {explain(error)}") from error

    cls.__init__ = check_fields
    made: type[T] = cls
    return made


@_checked
class Record(Generic[E_co]):
    """An event in its envelope: which run, rank and membership epoch said it, and when."""

    run: str
    rank: Int
    """-1 for the launcher, which is none of the workers."""
    epoch: Int
    """Of the membership: it counts the groups that trained, not passes over the data."""
    step: Int
    """-1 where no step is known."""
    time_s: Float
    """Monotonic; comparable only within one process."""
    unix_s: Float
    event: E_co


_KINDS: dict[str, type[Event]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _event(kind: str) -> Callable[[type[E_co]], type[E_co]]:
    def add(fields_only: type[E_co]) -> type[E_co]:
        cls = _checked(fields_only)
        cls.kind = kind
        _KINDS[kind] = cls
        return cls

    return add


def list_fields(cls: Any) -> dict[str, Any]:
    """Return the annotations of the fields of a kind of event, by name."""
    return {field.name: field.type for field in fields(cls)}


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
    num_workers: Int
    device: str
    num_parameters: Int
    start_step: Int
    """Steps that were done before this attempt."""
    total_steps: Int
    global_batch: Int
    samples_per_epoch: Int
    resumed_from: str | None = None
    """The checkpoint this attempt goes on from."""


@_event("step_finished")
class StepFinished(Event):
    """One optimizer update was made."""

    loss: Float
    weight: Float
    """Weight of the mean that `loss` is."""
    num_samples: Int
    learning_rate: Float
    duration_s: Float
    communication_s: Float
    """Time the worker waited for the exchange, not hidden behind computing."""
    position: Int
    """Samples used since the start of training."""
    gradient_norm: Float | None = None
    loss_scale: Float | None = None
    wire_bytes: Int | None = None
    """What this worker put on the wire for the step; None where it was not counted."""


@_event("bucket_exchanged")
class BucketExchanged(Event):
    """How the exchange of one bucket went that landed in a step that was sampled, on the worker that says it.

    Each worker says it for each of its buckets, and then `StepTimed` once. Moments count from the begin of the
    step's forward; where gradients land in the next forward, those of the step before are below 0.
    """

    bucket: Int
    """Its number, in the order in which buckets leave."""
    first_parameter: str
    num_parameters: Int
    num_bytes: Int
    """Of its gradients, before any codec."""
    wire_bytes: Int
    """What this worker put on the wire for it."""
    ready_s: Float
    """Its last gradient was there."""
    began_s: Float
    """Its exchange began; before that it stood in the queue."""
    ended_s: Float
    """Its exchange was done; where that cannot be seen, the moment at which waiting for it ended."""
    landed_s: Float
    """It was waited for and handed to the optimizer."""
    waited_s: Float
    """How long the worker stood still for it."""


@_event("step_timed")
class StepTimed(Event):
    """Where the time of a step that was sampled went, on the worker that says it, after its buckets.

    Moments count from the begin of forward, on the host's clock. With gradient accumulation forward and backward
    are those of the last micro-batch, and all before it counts as forward.
    """

    began_unix_s: Float
    """The time of day at the begin of forward: it lines up the workers."""
    forward_ended_s: Float
    backward_began_s: Float
    backward_ended_s: Float
    duration_s: Float
    """Until the end of the update."""
    waited_s: Float
    """How long the worker stood still for the exchange of all buckets, and of the step's weight."""
    optimizer_began_s: Float | None = None
    """None where parameters were updated bucket by bucket, as these landed."""
    optimizer_ended_s: Float | None = None


@_event("pipeline_measured")
class PipelineMeasured(Event):
    """What one rank of a pipeline computed in a step that was sampled; each rank says it for itself.

    The lists have one item for each piece of work, in the order in which they were done.
    """

    order: str
    """In which the ranks work."""
    ranks: list[Int]
    """Those of the pipeline, from the first stage's on."""
    num_micro_batches: Int
    stages_per_rank: Int
    formula: Float | None
    """Idle part of the step by the order's own formula, for stages and passes of equal cost; None where none is
    known."""
    began_unix_s: Float
    """The time of day at the begin of the first: it lines up the ranks. Moments count from it."""
    works: list[str]
    """forward; backward; or where that is parted, inputs and weights."""
    stages: list[Int]
    micro_batches: list[Int]
    began_s: list[Float]
    ended_s: list[Float]


@_event("memory_estimated")
class MemoryEstimated(Event):
    """What a step needs on each rank, by a rehearsal before the run started; not said where it fits by far."""

    peak_bytes: Int
    """Of tensors, at the worst moment."""
    bytes_of: dict[str, Float]
    """By what they are for."""
    available_bytes: Int
    """What a rank may have."""


@_event("memory_measured")
class MemoryMeasured(Event):
    """What a step needed on rank 0."""

    peak_bytes: Int
    """Of tensors, at the worst moment."""
    bytes_of: dict[str, Float]
    """By what they are for; empty where torch's allocator counted, which does not know it."""


@_event("slow_worker")
class SlowWorker(Event):
    """A worker computes much slower than the others; of each worker that is found slow it is said once a start."""

    slow_rank: Int
    factor: Float
    """How many times longer it computes for a sample than the median of the others."""
    samples_per_s: Float
    """While it computes: waiting is not in it."""
    others_samples_per_s: Float


@_event("shares_changed")
class SharesChanged(Event):
    """The parts of a global batch that workers take follow their speed from a position on."""

    shares: list[Int]
    """Samples of a whole global batch, by rank."""
    start: Int
    """Samples used since the start of training, at which they come into force."""
    samples_per_s: list[Float]
    """By rank, while they compute; NaN of one that computed nothing."""


@_event("gradient_noise_measured")
class GradientNoiseMeasured(Event):
    """How noisy gradients are: moving averages of what single steps say."""

    noise_scale: Float | None
    """Samples at which a step's gradient is as much signal as noise; None where it is too large to be told."""
    trace: Float
    """Variance of a single sample's gradient, summed over all parameters."""
    squared_norm: Float
    """Of the true gradient; an estimate, so that it may be negative where noise is all there is."""
    num_steps: Int
    """Since the measurement before."""


@_event("batch_changed")
class BatchChanged(Event):
    """Steps take another number of samples from here on."""

    global_batch: Int
    """Over all workers."""
    start: Int
    """Samples used since the start of training, at which it comes into force."""


@_event("model_grown")
class ModelGrown(Event):
    """The model has become deeper."""

    num_layers: Int
    num_parameters: Int
    method: str
    """What the new layers begin with."""


@_event("staleness_measured")
class StalenessMeasured(Event):
    """How old the parameters were that workers computed their pushes from, since the run began."""

    delays: list[Int]
    """In updates of others between a worker's pull and its push."""
    counts: list[Int]
    """Pushes with each of these delays."""
    num_dropped: Int
    """Pushes that came too late to count."""


@_event("evaluated")
class Evaluated(Event):
    """The model was judged on the held-out data."""

    loss: Float
    metrics: dict[str, Float]
    num_samples: Int
    duration_s: Float
    is_best: bool = False
    """Whether it is the best so far; only where somebody wants to know."""
    unaveraged: dict[str, Float] | None = None
    """Loss and metrics of the parameters as they are, where the others are of their moving averages."""


@_event("checkpoint_saved")
class CheckpointSaved(Event):
    """A checkpoint is whole on disk."""

    path: str
    num_bytes: Int
    duration_s: Float


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


@_event("stopped_early")
class StoppedEarly(Event):
    """The training ends before its last step, as it was told to: it is finished, and saved."""

    reason: str


@_event("restarted")
class Restarted(Event):
    """The workers are started again after a failure."""

    attempt: Int
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

    held_out_loss: Float | None
    metrics: dict[str, Float]
    duration_s: Float
    samples_per_s: Float
