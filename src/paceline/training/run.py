"""A run: one complete configuration of a training."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, field_validator, model_validator

from paceline.comm.join import DEFAULT_TIMEOUT_S
from paceline.compression.codec import Codec
from paceline.data import BadSamples, Full, FunctionData, GlobalOrder, IterableSource, PackedText, Padding, SampleOrder
from paceline.data.augment import Augmentation
from paceline.data.augment.held_out import open_held_out
from paceline.data.base import Data, Source, Splits
from paceline.data.datasets import Collate
from paceline.data.order import choose_tail
from paceline.data.read_ahead import READ_AHEAD_BYTES
from paceline.errors import SettingsError
from paceline.functions import Function
from paceline.memory import Memory
from paceline.optim import AdamW, FunctionOptimizer, Optimizer
from paceline.parallel.batch_norm import BatchNormScope, check_batch_norm
from paceline.parallel.pipeline.settings import PipelineSettings
from paceline.registry import Settings
from paceline.replica.checks import Precision, check_hashing
from paceline.replica.landing import Landing, check_landing
from paceline.replica.virtual_workers import check_virtual_workers
from paceline.schedules import BatchPolicy, BatchSchedule, Constant, ConstantBatch, Cosine, FixedBatch, LearningRate
from paceline.sync import EveryStep, Rule
from paceline.sync.gossip import GossipRule
from paceline.topology import Site
from paceline.topology.layout import Layout
from paceline.training.anomalies import Anomalies
from paceline.training.best import part_measure
from paceline.training.budget import Budget
from paceline.training.callbacks import Callback
from paceline.training.compiling import NO_COMPILER, check_compiler_fits
from paceline.training.growth import Growth, check_growth
from paceline.training.initial import InitialWeights
from paceline.training.legality import check_division
from paceline.training.metrics import Metrics
from paceline.training.model import Model, check_documents, check_unequal
from paceline.training.noise_scale import check_noise
from paceline.training.objective import Objective, OnBatch
from paceline.training.state_in_memory import PeerMemorySettings


class Run(Settings):
    """Complete configuration of a training, except for the machines that it runs on."""

    model: Model
    """Model to train: settings of a model, or a function that returns a module."""
    data: Data
    """Training and held-out data: settings of data, or a function that returns torch data sets."""
    loss: Objective
    """Loss to minimise: its name, or a function (model, batch) or (output, batch) that returns it."""
    metrics: Metrics | None = None
    """Function (output, batch) or (model, batch) that returns metrics, evaluated with the loss on held-out data."""
    callbacks: tuple[Callback, ...] = ()
    """Functions (event, training) that are called with each event."""
    initial: InitialWeights | None = None
    """Initial weights of the model: a file, a folder of save_pretrained or the directory of a run; none for the
    model's own."""
    global_batch: int = Field(ge=1)
    """Samples per step, over all workers; where `batch_schedule` changes it, those of the first step."""
    num_steps: int | None = Field(default=None, ge=1, le=10**15)
    """Optimizer updates; give either this or `num_epochs`."""
    num_epochs: int | None = Field(default=None, ge=1, le=10**15)
    """Passes over the data set."""
    collate_fn: Collate | None = None
    """Function that makes a batch from a list of samples; by default tensors are stacked."""
    padding: Padding | None = None
    """Padding of samples to the longest of their batch, in place of `collate_fn`; none for samples of one size."""
    group_by_length: bool = False
    """Whether the samples of each global batch are sorted by length and dealt to workers and micro-batches so that each
    has little padding and a like number of tokens; for samples that are padded to the longest of their batch."""
    order: SampleOrder | None = None
    """Order of each epoch's samples: full, windows of shards, or sequential; by default full, or a DataLoader's own."""
    bad_samples: BadSamples = BadSamples()
    """Settings for samples that cannot be read: by default the first one stops the run."""
    drop_last: bool = False
    """Whether an epoch's last samples are dropped if they are too few for a full global batch."""
    join_epochs: bool = False
    """Whether an epoch's last samples, if too few for a full global batch, share one with the next epoch's first."""
    num_micro_batches: int = Field(default=1, ge=1)
    """Micro-batches per worker and step, over which gradients are accumulated to save memory."""
    num_virtual_workers: int | None = Field(default=None, ge=1)
    """Virtual workers, each with a fixed part of every global batch: weights are then the same bits on any number
    of workers, and however it changes. By default the real workers, whose number changes rounding and dropout."""
    optimizer: Optimizer = AdamW()
    """Optimizer of the parameters."""
    schedule: LearningRate = Cosine(warmup_steps=20)
    """Learning-rate schedule; constant by default with an optimizer of your own."""
    batch_schedule: BatchSchedule = ConstantBatch()
    """Schedule of the global batch size."""
    batch_policy: BatchPolicy = FixedBatch()
    """Global batch if the number of workers changes: fixed, or a fixed part per_worker with a learning-rate rule."""
    noise_scale_interval: int = Field(default=0, ge=0)
    """Steps from one measurement of the gradient noise scale to the next; 0 for none."""
    growth: Growth = Growth()
    """Steps at which the model becomes deeper during training, and the way it does; by default it keeps its depth."""
    sync: Rule = EveryStep()
    """Synchronisation rule of the workers."""
    layout: Layout = Layout()
    """Layout of the model and its samples over ranks; by default each rank has a whole model."""
    sharded_codec: Codec | None = None
    """Codec of the gradient sums over the sharded axis; the codec of `sync` is for those between replicas."""
    tensor_plan: dict[str, str] | None = None
    """Styles in which modules are split over the tensor axis, by patterns of their names; by default found."""
    pipeline: PipelineSettings = PipelineSettings()
    """Pipeline settings: how layers are split into stages, and the order in which stages run micro-batches."""
    memory: Memory = Memory()
    """Memory settings: how memory is saved, and whether a check before training makes sure that it is enough."""
    batch_norm: BatchNormScope = "local"
    """Samples that BatchNorm's statistics are of in training: each worker's own (local), or those of all (global)."""
    precision: Precision = "fp32"
    """Precision of the forward pass: fp32; bf16 under autocast; fp16 under autocast with loss scaling."""
    compiler: str = NO_COMPILER
    """Backend of torch.compile that compiles each block of the model, such as inductor; none for no compilation."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm; none for no clipping, the default with an optimizer of your own."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay of an exponential moving average of the parameters, such as 0.999, with which evaluation then runs; none
    for no average."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Random seed of initial weights, data order and dropout."""
    shares: tuple[float, ...] | Literal["measured"] | None = None
    """Shares of a global batch: one weight per worker, or measured, by each worker's speed; even by default."""
    speed_interval: int = Field(default=10, ge=3)
    """Steps from one measurement of each worker's speed to the next, which finds slow workers."""
    evaluate_interval: int = Field(default=100, ge=0)
    """Steps from one evaluation on held-out data to the next; 0 for one at the end only."""
    evaluate_samples: int | None = Field(default=None, ge=1)
    """Held-out samples per evaluation; all by default."""
    checkpoint_interval: Annotated[int, Field(ge=0)] | Literal["auto"] = 100
    """Steps from one checkpoint to the next; 0 for one at the end only; auto for what loses least time, by the measured
    cost of a checkpoint and the rate of failures."""
    failures_per_day: float | None = Field(default=None, gt=0)
    """Rate of failures for checkpoint_interval auto; by default what the run's log shows, from 1 a day on."""
    keep_checkpoints: int | None = Field(default=3, ge=1)
    """Number of newest checkpoints to keep; none for all."""
    checkpoint_url: str | None = None
    """Path or URL of a store, for this run alone, with copies of all checkpoints; a start anywhere takes the newest."""
    incremental_checkpoints: int = Field(default=0, ge=0)
    """Checkpoints between two full ones that write only what has changed since the one before; 0 for full ones alone.
    For models of which much stays as it is: frozen parts, embeddings of rare words."""
    peer_memory: PeerMemorySettings = PeerMemorySettings()
    """Copies of the state in the memory of other ranks' hosts, by default none."""
    keep_best: str | None = None
    """Measure of the best checkpoint, which is kept beside the newest: loss for the lowest held-out loss, or a metric
    with its direction, such as max:accuracy."""
    stop_after: int | None = Field(default=None, ge=1)
    """Evaluations without improvement, by the measure of `keep_best` or the loss, after which training ends."""
    budget: Budget = Budget()
    """Money, hours and energy that the run may use, over all its starts; none by default. When it is spent the run is
    saved, and ends with exit code 77."""
    site: Site = Site()
    """Prices, carbon and declared power of the hosts, for what a run costs; nothing of it changes what is trained."""
    hash_interval: int = Field(default=100, ge=0)
    """Steps from one comparison of all replicas to the next; each checkpoint is preceded by one too; 0 for none."""
    gradient_hash_interval: int = Field(default=0, ge=0)
    """Steps from one comparison of the summed gradients on all workers, before the update, to the next; 0 for none."""
    on_divergence: Literal["stop", "heal"] = "stop"
    """Reaction to replicas, or summed gradients, that differ: the run stops; or, from three workers on, those that are
    odd take what the majority has, without a layout."""
    bucket_bytes: int | None = Field(default=None, ge=1)
    """Size of the buckets that gradients are exchanged in, the first of 1 MiB at most; by default the codec's own if it
    has one, else 25 MiB on GPUs, and on CPUs what the first steps show to suit the network."""
    landing: Landing = "update"
    """Moment at which the optimizer applies gradients: at the update, each bucket at its arrival while others are still
    in transit, or in the next forward pass, just before each is needed."""
    keeps_step_copies: bool = False
    """Whether workers copy what a step changes before all of it is there (`landing` arrival, coded steps), so that it
    can be dropped when others are lost in it: else all start again. A copy of the optimizer's state a step, with
    `landing` arrival also of parameters."""
    timeline_interval: int = Field(default=20, ge=0)
    """Steps from one logged timeline to the next; 0 for none."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of each worker; by default its part of the host's cores. A different number changes rounding."""
    augment: tuple[Augmentation, ...] = ()
    """Operations on training samples, one after another: names such as flip, settings, or functions of a sample."""
    num_data_processes: Annotated[int, Field(ge=0)] | Literal["auto"] = 0
    """Processes with which a worker reads data; 0 for threads; auto for what the first steps show to be fast enough."""
    num_data_threads: int = Field(default=1, ge=1)
    """Threads of a worker that decode data, if no processes do; more than one only for data that allows it."""
    read_ahead_bytes: int = Field(default=READ_AHEAD_BYTES, ge=1)
    """Largest size of the data that a worker reads ahead; one step is read at least."""
    timeout_s: float = Field(default=DEFAULT_TIMEOUT_S, gt=0)
    """Time that workers wait for one another before an error names the missing ones."""
    anomalies: Anomalies = Anomalies()
    """Reactions to losses and gradients that are not finite, or far above those before."""
    hang_timeout_s: float | None = Field(default=None, gt=0)
    """Time without progress, while others wait for it, after which a worker counts as hanging and is given up. By
    default ten times its longest phase so far, at least 20 s (60 s for data), and 5 s if even its heartbeats stop."""

    @field_validator("callbacks", "augment", mode="before")
    @classmethod
    def _accept_one(cls, given: Any) -> Any:
        return given if isinstance(given, list | tuple) else (given,)

    @field_validator("keep_best")
    @classmethod
    def _check_measure(cls, measure: str | None) -> str | None:
        if measure is not None:
            part_measure(measure)
        return measure

    @model_validator(mode="wrap")
    @classmethod
    def _fill_in_defaults(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Take the defaults that follow from other fields, and do not count them among the fields that were given."""
        if not isinstance(value, Mapping):
            return handler(value)
        run = handler({**cls.derive_defaults(value), **value})
        run.model_fields_set.intersection_update(value)
        return run

    @classmethod
    def derive_defaults(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults by which an optimizer of the user's own trains as in his loop: not clipped, not scheduled."""
        given = values.get("optimizer")
        is_path = isinstance(given, str) and ":" in given
        is_function = callable(given) and not (isinstance(given, type) and issubclass(given, Optimizer))
        is_named = isinstance(given, Mapping) and given.get("name") == "function"
        if is_path or is_function or is_named or isinstance(given, FunctionOptimizer):
            return {"clip_norm": None, "schedule": Constant()}
        return {name: cls.model_fields[name].default for name in ("clip_norm", "schedule")}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        check_landing(
            self.landing,
            precision=self.precision,
            clip_norm=self.clip_norm,
            rule=self.sync,
            layout=self.layout,
            is_compiled=self.compiler != NO_COMPILER,
            is_noise_measured=self.noise_interval > 0,
            is_averaged=self.ema is not None,
        )
        check_compiler_fits(self.compiler, self.pipeline if self.layout.pipeline > 1 else None)
        check_division(self.layout, self.sync, self.sharded_codec, self.pipeline)
        if isinstance(self.data, PackedText):
            check_documents(self.model, self.layout)
        self.anomalies.check(self.sync, self.layout, self.landing)
        check_hashing(self.gradient_hash_interval, self.sync, self.layout, self.landing)
        check_batch_norm(self.batch_norm, self.sync, self.layout, is_noise_measured=self.noise_interval > 0)
        for name, function in (("loss", self.loss), ("metrics", self.metrics)):
            if self.layout.pipeline > 1 and isinstance(function, OnBatch) and function.takes_model:
                raise ValueError(
                    f"{name} must be a function (output, batch) where the layout has a pipeline, in which no rank has "
                    f"the whole model, but {function.path} takes the model; let it take what the model returns"
                )
        if self.shares == "measured" and not self.layout.is_plain:
            raise ValueError(
                "shares must be weights or none where ranks share a model, whose times say little, since each waits "
                f"for the others inside every step, but got {self.shares} with {self.layout}; give one weight per "
                "worker (--shares '[2, 1]'), or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if (self.num_steps is None) == (self.num_epochs is None):
            found = f"{self.num_steps} and {self.num_epochs}"
            advice = "give one" if self.num_steps is None else "set one to none"
            raise ValueError(f"either num_steps or num_epochs must be given, but got {found}; {advice}")
        if self.num_epochs is not None and not isinstance(self.batch_schedule, ConstantBatch):
            raise ValueError(
                f"num_steps must be given where batch_schedule changes the batch, but got num_epochs={self.num_epochs} "
                f"with {self.batch_schedule.name}; give num_steps instead (--num_steps N --num_epochs none)"
            )
        if self.num_epochs is not None and self.sync.is_asynchronous and not isinstance(self.sync, GossipRule):
            raise ValueError(
                f"num_steps must be given with sync {self.sync.name}, whose workers take samples at their own pace, "
                f"but got num_epochs={self.num_epochs}; give num_steps instead (--num_steps N --num_epochs none)"
            )
        if self.num_data_processes and self.num_data_threads > 1:
            found = f"{self.num_data_processes} and {self.num_data_threads}"
            raise ValueError(f"num_data_processes or num_data_threads must be left out, but got {found}; give one")
        if self.collate_fn is not None and not isinstance(self.data, FunctionData):
            raise ValueError(
                f"collate_fn must come with a function that returns data sets, but got data {self.data.name}, which "
                "makes its own batches; leave it out"
            )
        if self.padding is not None and self.collate_fn is not None:
            raise ValueError("padding or collate_fn must be left out, each of which makes batches; give one")
        check_unequal(self.data, self.padding, self.layout)
        self.budget.check(self.site)
        if self.stop_after is not None and not self.evaluate_interval:
            raise ValueError("evaluate_interval must be more than 0 with stop_after, which counts evaluations; give it")
        choose_tail(drop_last=self.drop_last, join_epochs=self.join_epochs)
        return self

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if self.shares == "measured" and self.sync.is_asynchronous:
            raise ValueError(
                f"shares must be weights or none with sync {self.sync.name}, whose workers take as much as they have "
                f"time for, but got {self.shares}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_virtual_workers(self) -> Self:
        check_virtual_workers(self.num_virtual_workers, self.sync, self.layout, self.landing, self.batch_norm)
        if self.num_virtual_workers is None:
            return self
        found = ""
        if self.num_threads is None:
            found = "no num_threads, whose default depends on the number of workers; give one (--num_threads 1)"
        elif self.num_micro_batches > 1 or self.batch_schedule.adds_micro_batches:
            found = (
                "more than one micro-batch of each; take more virtual workers (--num_micro_batches 1), and a "
                "batch_schedule with larger micro_batches"
            )
        elif self.shares is not None:
            found = f"shares {self.shares}, but all virtual workers have equal ones; leave shares out"
        elif self.noise_interval:
            found = "the gradient noise scale, which compares the gradients of real workers; leave it out"
        elif self.global_batch < self.num_virtual_workers:
            found = f"global_batch {self.global_batch}, too few samples for all; raise it"
        if found:
            raise ValueError(f"num_virtual_workers {self.num_virtual_workers} must fit other settings, but got {found}")
        return self

    @model_validator(mode="after")
    def _check_policy(self) -> Self:
        if isinstance(self.batch_policy, FixedBatch):
            return self
        found = ""
        if self.num_steps is None:
            found = "num_epochs, whose number of steps would change with the workers; give num_steps"
        elif not isinstance(self.batch_schedule, ConstantBatch):
            found = f"batch_schedule {self.batch_schedule.name}, which chooses the batch itself; leave one of them out"
        elif self.num_virtual_workers is not None:
            found = "num_virtual_workers, whose steps are the same on any number of workers; leave one of them out"
        elif self.optimizer.scaling != "none":
            found = f"optimizer.scaling {self.optimizer.scaling}; give the rule as batch_policy.scaling"
        if found:
            raise ValueError(f"batch_policy {self.batch_policy.name} must fit other settings, but got {found}")
        return self

    @model_validator(mode="after")
    def _check_changes(self) -> Self:
        self.batch_schedule.check(self.global_batch)
        if self.sync.is_asynchronous and not isinstance(self.batch_schedule, ConstantBatch):
            raise ValueError(
                f"batch_schedule must be constant with sync {self.sync.name}, whose workers step at their own pace, "
                f"but got {self.batch_schedule.name}; leave it out"
            )
        if self.sync.is_asynchronous and self.checkpoint_interval == "auto":
            raise ValueError(
                f"checkpoint_interval must be a number of steps with sync {self.sync.name}, whose workers step at "
                "their own pace and must know where they meet, but got auto; give a number"
            )
        wanted = self.batch_schedule.noise_interval
        if wanted and self.noise_scale_interval not in (0, wanted):
            raise ValueError(
                f"noise_scale_interval must be that of batch_schedule, {wanted}, but got {self.noise_scale_interval}; "
                "give one of them"
            )
        if self.memory.offloads_parameters and not self.layout.is_plain:
            raise ValueError(
                f"memory.offload parameters must come with a layout of data alone, but got {self.layout}; the other "
                "axes divide parameters already"
            )
        if self.memory.offloads_parameters and self.compiler != NO_COMPILER:
            raise ValueError(
                f"memory.offload parameters must come without a compiler, but got {self.compiler}, whose code knows "
                "where parameters are; leave one of them out"
            )
        if self.noise_interval:
            check_noise(self.sync, self.layout)
        if self.growth.steps and self.ema is not None:
            raise ValueError(f"ema must be none for a model that grows, but got {self.ema}; leave one of them out")
        if self.growth.steps:
            check_growth(self.growth, self.model, self.sync, self.layout)
        return self

    def open_data(self) -> Splits:
        """Open the data; every process gets the same data.

        Raises:
            DataError: The data is missing, empty, damaged or of the wrong type.
        """
        if isinstance(self.data, FunctionData):
            splits = self.data.open_with(self.collate_fn.call if self.collate_fn is not None else None)
        else:
            splits = self.data.open()
        if self.padding is not None:
            splits = splits.with_collate(self.padding)
        if isinstance(splits.held_out, Source):
            splits = replace(splits, held_out=open_held_out(splits.held_out, self.augment))
        return splits

    def count_steps(self, splits: Splits) -> int:
        """Return the number of updates, by the length of the data where `num_epochs` is given.

        Raises:
            SettingsError: The length of the data is unknown.
        """
        if self.num_epochs is None:
            assert self.num_steps is not None
            return self.num_steps
        source = splits.train
        if isinstance(source, IterableSource):
            raise SettingsError(
                "num_steps must be given for an iterable data set, whose length schedules cannot know before its end, "
                f"but got num_epochs={self.num_epochs}; give num_steps instead (--num_steps N --num_epochs none)"
            )
        if source.grows:
            raise SettingsError(
                "num_steps must be given for data that grows, whose epochs become longer, but got "
                f"num_epochs={self.num_epochs}; give num_steps instead (--num_steps N --num_epochs none)"
            )
        drops = self.drop_last or splits.drop_last
        if drops and self.global_batch > len(source):
            raise SettingsError(
                f"global_batch must be at most the data set's {len(source)} samples with drop_last, or nothing is "
                f"left, but got {self.global_batch}; lower it, or leave drop_last out"
            )
        num_samples = source.arrange(self.order or Full(), self.seed).num_samples
        tail = choose_tail(drop_last=drops, join_epochs=self.join_epochs)
        return GlobalOrder(num_samples, tail=tail).count_steps(self.num_epochs, self.global_batch)

    def check_functions(self) -> None:
        """Refuse functions that still miss an argument.

        Raises:
            SettingsError: An argument is missing; the message names it.
        """
        for name in type(self).model_fields:
            value = getattr(self, name)
            for function in value if isinstance(value, tuple) else (value,):
                if isinstance(function, Function):
                    function.check_complete(name)

    @property
    def noise_interval(self) -> int:
        """Steps from one measurement of the gradient noise scale to the next; 0 for none."""
        return self.noise_scale_interval or self.batch_schedule.noise_interval

    def fit_workers(self, num_workers: int) -> Self:
        """Return the run with the global batch and learning rates that its batch policy has for the workers."""
        policy = self.batch_policy
        if isinstance(policy, FixedBatch):
            return self
        scaled = {"scaling": policy.scaling, "base_batch": self.global_batch}
        changes = {
            "global_batch": policy.batch_of(self.global_batch, num_workers),
            "optimizer": self.optimizer.model_copy(update=scaled),
            "batch_policy": FixedBatch(),
        }
        return self.model_copy(update=changes)

    def count_parts(self, num_workers: int) -> int:
        """Return the number of micro-batches that each global batch is cut into, by workers or by virtual workers."""
        return self.num_virtual_workers or num_workers * self.num_micro_batches

    @property
    def fixed_shares(self) -> tuple[float, ...] | None:
        """Shares at the beginning of the run; None for even ones."""
        return None if self.shares == "measured" else self.shares

    def count_workers(self, num_processes: int) -> int:
        """Return the number of workers that `num_processes` processes make.

        Raises:
            SettingsError: The processes do not fit the layout; the message shows the arithmetic.
        """
        axes = self.layout.resolve(num_processes - self.sync.num_server_processes)
        return axes.size("data", "sharded", "expert")
