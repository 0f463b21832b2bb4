"""The typed events of a run."""

from typing import Any

from pydantic import Field

from paceline.monitor.data_events import DataRead as DataRead
from paceline.monitor.data_events import ReadersChosen as ReadersChosen
from paceline.monitor.event import Event as Event
from paceline.monitor.event import EventError as EventError
from paceline.monitor.event import Float as Float
from paceline.monitor.event import Int as Int
from paceline.monitor.event import Record as Record
from paceline.monitor.event import event
from paceline.monitor.event import find_kind as find_kind
from paceline.monitor.event import list_fields as list_fields
from paceline.monitor.event import list_kinds as list_kinds
from paceline.monitor.plan_events import PlanCompared as PlanCompared
from paceline.monitor.usage_events import BudgetSpent as BudgetSpent
from paceline.monitor.usage_events import ResourcesUsed as ResourcesUsed


@event("run_started")
class RunStarted(Event):
    """The workers are ready; written again by each attempt after a restart or resume."""

    recipe: str
    settings: dict[str, Any]
    """Resolved run, as JSON."""
    num_workers: Int
    device: str
    num_parameters: Int
    start_step: Int
    """Number of steps done before this attempt."""
    total_steps: Int
    global_batch: Int
    samples_per_epoch: Int
    resumed_from: str | None = None
    """Checkpoint that this attempt resumes from."""


@event("step_finished")
class StepFinished(Event):
    """One optimizer update is done."""

    loss: Float
    weight: Float
    """Weight of the mean that `loss` is."""
    num_samples: Int
    learning_rate: Float
    duration_s: Float
    communication_s: Float
    """Time that the worker waited for the exchange, not hidden behind computing."""
    position: Int
    """Number of samples used since the start of training."""
    gradient_norm: Float | None = None
    loss_scale: Float | None = None
    wire_bytes: Int | None = None
    """Bytes that this worker sent for the step; None if not counted."""
    data_s: Float = 0.0
    """Time that the worker waited for the step's data."""


@event("bucket_exchanged")
class BucketExchanged(Event):
    """Times of one bucket's exchange in a sampled step, on the worker that wrote the event.

    Each worker writes one for each of its buckets, and then `StepTimed` once. Times count from the beginning of the
    step's forward; if gradients are applied in the next forward, those of the step before are below 0.
    """

    bucket: Int
    """Number of the bucket, in launch order."""
    first_parameter: str
    num_parameters: Int
    num_bytes: Int
    """Size of its gradients, before any codec."""
    wire_bytes: Int
    """Bytes that this worker sent for it."""
    ready_s: Float
    """Time when its last gradient was ready."""
    began_s: Float
    """Time when its exchange began; before that it was queued."""
    ended_s: Float
    """Time when its exchange ended; if that is unknown, when the wait for it ended."""
    landed_s: Float
    """Time when its gradients were handed to the optimizer."""
    waited_s: Float
    """Time that the worker waited for it."""


@event("bucket_size_chosen")
class BucketSizeChosen(Event):
    """The size of gradient buckets, chosen after the first steps."""

    bucket_bytes: Int
    reason: str
    """Numbers that it was chosen by, in words."""


@event("step_timed")
class StepTimed(Event):
    """Times of a sampled step, on the worker that wrote the event, after its buckets.

    Times count from the beginning of forward, on the host's clock. With gradient accumulation forward and backward
    are those of the last micro-batch, and everything before counts as forward.
    """

    began_unix_s: Float
    """Time of day at the beginning of forward, by which the workers are aligned."""
    forward_ended_s: Float
    backward_began_s: Float
    backward_ended_s: Float
    duration_s: Float
    """Duration until the end of the update."""
    waited_s: Float
    """Time that the worker waited for the exchange of all buckets, and of the step's weight."""
    optimizer_began_s: Float | None = None
    """Time when the optimizer began; None if it updated parameters bucket by bucket, on arrival."""
    optimizer_ended_s: Float | None = None


@event("pipeline_measured")
class PipelineMeasured(Event):
    """Work of one pipeline rank in a sampled step; each rank writes its own.

    The lists have one item for each operation, in the order of execution.
    """

    order: str
    """Name of the pipeline order."""
    ranks: list[Int]
    """Ranks of the pipeline, from the first stage's on."""
    num_micro_batches: Int
    stages_per_rank: Int
    formula: Float | None
    """Idle share of the step by the order's own formula, for stages and passes of equal cost; None if there is no
    formula."""
    began_unix_s: Float
    """Time of day at the beginning of the first operation, by which the ranks are aligned. Times count from it."""
    works: list[str]
    """Kind of each operation: forward, backward, or, if backward is split, inputs and weights."""
    stages: list[Int]
    micro_batches: list[Int]
    began_s: list[Float]
    ended_s: list[Float]


@event("memory_estimated")
class MemoryEstimated(Event):
    """Memory of a step on each rank, from a rehearsal before the run started; omitted if there is plenty of memory."""

    peak_bytes: Int
    """Peak size of tensors."""
    bytes_of: dict[str, Float]
    """Size by purpose of the tensors."""
    available_bytes: Int
    """Memory available to a rank."""


@event("memory_measured")
class MemoryMeasured(Event):
    """Memory of a step, measured on rank 0; with a layout that shares the model, on the rank that needs the most."""

    peak_bytes: Int
    """Peak size of tensors."""
    bytes_of: dict[str, Float]
    """Size by purpose of the tensors; empty if torch's allocator measured, which does not know it."""
    of_rank: Int = 0
    """Rank that was measured."""
    beside_bytes: Int = 0
    """Memory of its process beside tensors, at the end of the step: Python, torch, buffers of connections and what the
    allocator has not given back. Pages of libraries that processes share count in part. 0 if unknown, as with GPUs."""


@event("slow_worker")
class SlowWorker(Event):
    """A worker computes much slower than the others; written once per start for each slow worker."""

    slow_rank: Int
    factor: Float
    """Ratio of its computing time per sample to the median of the others."""
    samples_per_s: Float
    """Speed while it computes, without waiting."""
    others_samples_per_s: Float


@event("anomaly_found")
class AnomalyFound(Event):
    """A loss or a gradient norm is not finite, or far above those before."""

    quantity: str
    """Loss or gradient norm; or gradient, where one is not finite."""
    value: Float
    median: Float | None = None
    """Median of the steps before."""
    limit: Float | None = None
    """Value above which it counts as a spike."""
    reaction: str
    """Reaction to it: report for nothing but this event; skip, roll_back or stop."""
    message: str = ""
    """Ranks and places where it was found, if they are known."""


@event("rolled_back")
class RolledBack(Event):
    """Training went back to a checkpoint, and makes the steps since again, without the updates that led astray."""

    checkpoint: str
    from_step: Int
    """Number of steps that had been done."""
    skipped_steps: list[Int]
    """Steps whose updates are skipped."""


@event("replicas_healed")
class ReplicasHealed(Event):
    """Replicas had become different, and took the state of the majority."""

    ranks: list[Int]
    """Ranks that differed."""
    source_rank: Int
    """Rank whose state they took."""
    difference: str
    """First difference, in words."""


@event("bad_sample_found")
class BadSampleFound(Event):
    """A sample could not be read; a worker writes it once for each."""

    sample: Int
    """Index of the sample in the data."""
    path: str
    """File or shard of the sample, if it is known."""
    key: str
    """Name of the sample in it, if it has one."""
    reason: str
    action: str
    """Reaction to it: skip or replace."""


@event("resource_low")
class ResourceLow(Event):
    """Memory or disk space of a host runs out; written once until there is enough again."""

    host: str
    resource: str
    """Memory or disk."""
    available_bytes: Int
    needed_bytes: Int
    """Size below which the event is written."""
    message: str


@event("shares_changed")
class SharesChanged(Event):
    """The workers' shares of a global batch follow their speed from a position on."""

    shares: list[Int]
    """Samples of a whole global batch, by rank."""
    start: Int
    """Number of samples used since the start of training at which they take effect."""
    samples_per_s: list[Float]
    """Speed of each rank while it computes; NaN for one that computed nothing."""


@event("gradient_noise_measured")
class GradientNoiseMeasured(Event):
    """Noise of the gradients: moving averages over steps."""

    noise_scale: Float | None
    """Samples at which a step's gradient has as much signal as noise; None if it is too large to be measured."""
    trace: Float
    """Variance of a single sample's gradient, summed over all parameters."""
    squared_norm: Float
    """Squared norm of the true gradient; an estimate, which may be negative if noise dominates."""
    num_steps: Int
    """Number of steps since the last measurement."""


@event("batch_changed")
class BatchChanged(Event):
    """Steps have another number of samples from here on."""

    global_batch: Int
    """Samples over all workers."""
    start: Int
    """Number of samples used since the start of training at which it takes effect."""
    rate_factor: Float = 1.0
    """Factor of learning rates by the scaling of the optimizer, or of the batch policy, for that number of samples."""


@event("codec_changed")
class CodecChanged(Event):
    """Codec auto encodes with another codec from the next step on."""

    codec: str
    """Name of the codec."""
    before: str
    codec_of: str
    """Input of the codec: gradient or step."""
    reason: str
    """Measured speed of the link, and predicted step times, the best first."""


@event("model_grown")
class ModelGrown(Event):
    """The model has become deeper or wider."""

    num_layers: Int | None
    num_parameters: Int
    method: str
    """Initialisation of the new layers or units."""
    width: Int | None = None


@event("experts_used")
class ExpertsUsed(Event):
    """Use of experts by the tokens of all workers, since it was logged last or the run began.

    The lists have one item for each mixture-of-experts layer.
    """

    layers: list[str]
    """Names of the layers."""
    counts: list[list[Int]]
    """Number of tokens that each expert took."""
    num_dropped: list[Int]
    """Number of times that a token's expert had no room for it."""


@event("staleness_measured")
class StalenessMeasured(Event):
    """Age of the parameters that workers computed their gradients from, where they go at their own pace."""

    delays: list[Int]
    """Delays since the run began, in updates of others between a worker's pull and its push; with ad_psgd, in averages
    between the parameters of a gradient and its use."""
    counts: list[Int]
    """Number of pushes with each of these delays."""
    mean: Float | None = None
    """Mean delay since the measurement before; None without a push."""
    largest: Int | None = None
    """Largest delay since the measurement before."""
    num_dropped: Int
    """Number of pushes that came too late to count."""


@event("consensus_measured")
class ConsensusMeasured(Event):
    """Distance of workers from what is evaluated and saved, where a rule lets their parameters differ."""

    distance: Float
    """Root mean square over workers of the distance of their parameters from the consensus, to the consensus's norm."""


@event("evaluated")
class Evaluated(Event):
    """The model was evaluated on the held-out data."""

    loss: Float
    metrics: dict[str, Float]
    num_samples: Int
    duration_s: Float
    is_best: bool = False
    """Whether the evaluation is the best so far; only if `keep_best` or `stop_after` needs it."""
    unaveraged: dict[str, Float] | None = None
    """Loss and metrics of the parameters as they are, where the others are of their moving averages."""


@event("checkpoint_saved")
class CheckpointSaved(Event):
    """A checkpoint is complete on disk."""

    path: str
    num_bytes: Int
    """Bytes that were written."""
    duration_s: Float
    shared_bytes: Int = 0
    """Bytes of files that it shares with earlier checkpoints, where it is incremental."""
    lost_ranks: list[Int] = Field(default_factory=list)
    """Ranks whose last work is not in it: asynchronous workers that were lost, so that the others saved and stopped."""


@event("checkpoint_interval_chosen")
class CheckpointIntervalChosen(Event):
    """The steps between checkpoints were chosen so that checkpoints and failures lose the least time."""

    interval: Int
    """Steps from one checkpoint to the next."""
    save_s: Float
    """Time for which a checkpoint stops training."""
    step_s: Float
    """Time of a step."""
    failures_per_day: Float


@event("state_copied")
class StateCopied(Event):
    """The state was copied into the memory of peers."""

    part_bytes: Int
    """Size of the largest rank's part of the state."""
    memory_bytes: Int
    """Memory that copies and parity take on that rank."""
    duration_s: Float


@event("checkpoint_skipped")
class CheckpointSkipped(Event):
    """A checkpoint could not be used."""

    path: str
    reason: str


@event("unused_parameters")
class UnusedParameters(Event):
    """Parameters that got no gradient on any rank."""

    names: list[str]


@event("warned")
class Warned(Event):
    """A problem that does not stop training."""

    message: str


@event("preempted")
class Preempted(Event):
    """The run was asked to stop, and saved a checkpoint."""

    checkpoint: str
    signal: str


@event("stopped_early")
class StoppedEarly(Event):
    """The training ends before its last step, as it was told to: it is finished, and saved."""

    reason: str


@event("restarted")
class Restarted(Event):
    """The workers are started again after a failure."""

    attempt: Int
    """Number of the restart in the run, from 1."""
    reason: str


@event("workers_changed")
class WorkersChanged(Event):
    """Workers were lost, or joined or left, and training goes on from memory."""

    num_workers: Int
    names: list[str]
    """Name of each worker, by rank."""
    reason: str
    num_sent: Int
    """Number of workers that were sent the state of rank 0; the others have kept theirs."""
    duration_s: Float
    """Time on rank 0 from the end of the step before to the beginning of the next."""
    lost: str = ""
    """Words on what is lost with workers that have gone, such as residuals of a codec; empty if nothing is."""
    repaired: str = ""
    """Words on what was changed in the state of the rule, so that it fits the present workers; empty if nothing was."""


@event("failed")
class Failed(Event):
    """A worker ended with an error."""

    error: str
    """Name of the exception's class."""
    message: str
    traceback: str
    place: str = ""
    """Innermost line of the user's own code that the exception came through, as ``file:line``; empty if none."""


@event("showcased")
class Showcased(Event):
    """Sample output of the trained model, as text. The model wrote it: do not trust it."""

    text: str


@event("run_finished")
class RunFinished(Event):
    """All steps are done."""

    held_out_loss: Float | None
    metrics: dict[str, Float]
    duration_s: Float
    samples_per_s: Float
