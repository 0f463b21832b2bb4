"""State of a training that stays while workers come and go: settings, model, log, checkpoints, and progress."""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from paceline.checkpoint import AsyncSaver, Checkpoint, CheckpointStore, SavedState
from paceline.checkpoint.mirror import CheckpointMirror
from paceline.comm.group import Group
from paceline.data import Source, Splits
from paceline.data.bad_samples import BadSampleCount
from paceline.errors import CheckpointError
from paceline.monitor.events import CheckpointSkipped, StepFinished
from paceline.monitor.log import EventLog
from paceline.parallel.deferred import Construction
from paceline.parallel.mixture_of_experts import list_mixtures
from paceline.parallel.parallelize import find_shard, parallelize
from paceline.replica.checks import Precision
from paceline.sync.synchroniser import Delays
from paceline.training.best import BestSoFar
from paceline.training.building import build_shared, check_inputs, read_sample
from paceline.training.compiling import NO_COMPILER, compile_blocks
from paceline.training.evaluate import Evaluation, check_samples
from paceline.training.forecast import PlanWatch
from paceline.training.initial import load_slices
from paceline.training.loss_trial import check_loss
from paceline.training.model import Model, ModelSize, resize
from paceline.training.rehearsal import count_samples, save_activations, save_optimizer
from paceline.training.repeated_healing import RepeatedHealing
from paceline.training.run import Run


@dataclass
class Training:
    """Lasting state of a training on one worker; the state of the present workers is in a `Session`."""

    run: Run
    recipe: str
    directory: Path
    splits: Splits
    model: Model
    """Model settings of the run, with the present number of layers."""
    module: nn.Module
    """Module that is trained; with a layout, this rank's part of it."""
    optimizer: torch.optim.Optimizer
    num_parameters: int
    """Number of parameters of the whole model."""
    store: CheckpointStore
    log: EventLog
    num_steps: int
    """Number of updates of the whole training."""
    best: BestSoFar
    step: int = 0
    resumed_from: str | None = None
    began_s: float = 0.0
    num_samples: int = 0
    """Number of samples used since this start."""
    end_reason: str = ""
    """Reason for which this worker wants the training to end early; the others may not know it yet."""
    evaluation: Evaluation | None = None
    """Latest evaluation since this start."""
    evaluated_step: int = 0
    """Step of the latest evaluation, or that of the resume if none was due there any more."""
    delays: Delays = field(default_factory=lambda: Delays({}, 0))
    """Delays of gradients as logged last, on rank 0."""
    delays_step: int = 0
    """Step of that log."""
    least_distance: float | None = None
    """Least distance of workers from their consensus since this start."""
    has_drifted: bool = False
    """Whether the log has warned that workers drift apart."""
    has_experts: bool = False
    """Whether the model has mixture-of-experts layers of ours, whose use is balanced and counted."""
    about_building: str = ""
    """Reason for which every rank of a layout built the whole model; empty if none did."""
    about_initial: str = ""
    """Message about the initial weights, on rank 0, such as those that do not fit."""
    is_over: bool = False
    """Whether the training has ended."""
    saver: AsyncSaver | None = None
    """Saver of the worker that saves, if it outlives a session."""
    outlives_workers: bool = False
    """Whether the training goes on in memory when its workers change."""
    is_loading: bool = False
    """Whether this worker is being sent the state of another one, so that its own is not whole."""
    newest_steps: deque[tuple[int, StepFinished]] = field(default_factory=lambda: deque(maxlen=100))
    """Newest steps of this worker, by number, which it logs if a lost first worker has not."""
    over_budget: str = ""
    """Sentence on the budget that has ended the training; empty if it has not."""
    repeated_healing: RepeatedHealing = field(default_factory=RepeatedHealing)
    """Count of how often this worker was healed."""
    saved_step: int = -1
    """Step of the latest checkpoint since this start, which may still be written."""
    plan_watch: PlanWatch | None = None
    """Comparison of steps with the plan of the run; None if it has none."""
    held_out_bad: BadSampleCount = field(init=False)
    """Count of held-out samples that could not be read."""

    def __post_init__(self) -> None:
        self.held_out_bad = BadSampleCount(self.run.bad_samples)

    @property
    def keeps_saver(self) -> bool:
        """Whether the saver outlives a session: not where ranks of a layout write together."""
        return self.outlives_workers and self.run.layout.is_plain


def start_training(
    run: Run, directory: Path, group: Group, log: EventLog, recipe: str, *, is_resumed: bool = True
) -> tuple[Training, SavedState | None]:
    """Return a training of a new model, and on rank 0 the newest valid checkpoint in `directory` or None.

    Args:
        run: The run.
        directory: Directory of the run.
        group: The workers, or all ranks of the layout.
        log: Log of this worker.
        recipe: Path of the recipe.
        is_resumed: Whether to look for a checkpoint and the initial weights; else `find_start` does it later.
    """
    splits = run.open_data()
    if isinstance(splits.held_out, Source):
        check_samples(len(splits.held_out))
    mirror = CheckpointMirror(run.checkpoint_url) if run.checkpoint_url is not None and group.rank == 0 else None
    store = CheckpointStore(directory / "checkpoints", run.keep_checkpoints, run.incremental_checkpoints, mirror)
    checkpoint: SavedState | None = _find_checkpoint(store, log) if group.rank == 0 and is_resumed else None
    if is_resumed:
        checkpoint = run.peer_memory.recall(directory, group, checkpoint, log)
    model = _find_model(run, checkpoint, group)
    module, construction, about_building = build_shared(run, splits, group, model)
    initial = run.initial if group.rank == 0 and checkpoint is None and is_resumed else None
    matched = initial.match(module) if initial is not None else None
    if matched is not None and construction is None:
        matched.load_into(module)  # the others are sent what rank 0 has
    num_parameters = count_parameters(module)
    has_experts = any(list_mixtures(module))
    module, optimizer = prepare(run, module, splits, group, construction)
    if is_resumed and run.initial is not None and construction is not None:
        load_slices(matched, module, group)
    training = Training(
        run,
        recipe,
        directory,
        splits,
        model,
        module,
        optimizer,
        num_parameters,
        store,
        log,
        num_steps=run.count_steps(splits),
        best=BestSoFar(run.keep_best, run.stop_after),
        has_experts=has_experts,
        about_building=about_building,
        about_initial=matched.about if matched is not None else "",
        plan_watch=PlanWatch.read(directory),
    )
    return training, checkpoint


def rebuild(training: Training, group: Group) -> None:
    """Replace the module and the optimizer by new ones, without state, among the ranks of `group`.

    New ranks call `start_training` instead, without a resume.
    """
    run, splits = training.run, training.splits
    module, construction, _ = build_shared(run, splits, group, training.model)
    training.module, training.optimizer = prepare(run, module, splits, group, construction)


def find_start(training: Training) -> SavedState | None:
    """Return the newest valid checkpoint, on rank 0; without one, load the run's initial weights, if it has any."""
    checkpoint, initial = _find_checkpoint(training.store, training.log), training.run.initial
    if checkpoint is None and initial is not None:
        matched = initial.match(training.module)
        matched.load_into(training.module)
        training.about_initial = matched.about
    return checkpoint


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters of a whole model."""
    return sum(parameter.numel() for parameter in module.parameters())


def prepare(
    run: Run, module: nn.Module, splits: Splits, group: Group, construction: Construction | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Lay a new `module` over the ranks of `group`, apply the run's memory settings, and build its optimizer.

    Args:
        run: The run.
        module: Module that `build_model` returned.
        splits: Training and held-out data.
        group: The workers, or all ranks of the layout.
        construction: Construction of a module without memory.
    """
    sample = read_sample(run, splits, group.device)
    check_inputs(run, module, sample)
    save_activations(run, module, splits, max(1, group.size // run.layout.ranks_of_worker), group.device)
    # A worker that has a whole model builds it before it knows the others, whose number may change.
    layout = run.layout.model_copy(update={"data": None}) if run.layout.is_plain else run.layout
    module = parallelize(
        module,
        layout,
        group=group,
        tensor_plan=run.tensor_plan,
        pipeline=run.pipeline,
        sharded_codec=run.sharded_codec,
        sample=sample,
        construction=construction,
        gather_dtype=choose_gather_dtype(run.precision, group.device),
        num_samples=count_samples(run, max(1, group.size // run.layout.ranks_of_worker)),
    )
    check_loss(run, splits, find_shard(module, group))
    if run.compiler != NO_COMPILER:
        compile_blocks(module, run.compiler)
    return module, save_optimizer(run, run.optimizer.build(module))


def choose_gather_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """Return the dtype in which sharded parameters are gathered: on GPUs that of a forward in bf16.

    On CPUs, and in fp16, it is the parameters' own; fp16 could not hold all of them.
    """
    return torch.bfloat16 if precision == "bf16" and device.type != "cpu" else None


def _find_checkpoint(store: CheckpointStore, log: EventLog) -> Checkpoint | None:
    def skip(path: Path, reason: str) -> None:
        log.write(CheckpointSkipped(path=str(path), reason=reason), step=0)

    checkpoint = store.find_newest_valid(skip)
    if checkpoint is None and (damaged := store.list_checkpoints()):
        raise CheckpointError(
            f"one checkpoint must be whole, but all {len(damaged)} in {store.directory} are damaged; "
            "move them away to start again"
        )
    return checkpoint


def _find_model(run: Run, checkpoint: SavedState | None, group: Group) -> Model:
    """Return the run's model in the size of rank 0's `checkpoint`."""
    if not run.growth.steps:
        return run.model
    document = checkpoint.read_document() if checkpoint is not None else {}
    saved = [document.get("num_layers"), document.get("width")]
    return resize(run.model, ModelSize(*group.gather_documents(saved, name="saved size")[0]))
