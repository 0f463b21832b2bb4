"""A training under way on one worker: its parts, how they are set up, and how they go on from a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint import AsyncSaver, Checkpoint, CheckpointStore
from paceline.comm.group import Group
from paceline.comm.membership import Membership
from paceline.data import Batch, Interval, IterableSource, Loader, Splits
from paceline.data.datasets import SEEDING
from paceline.data.order import Dispatcher
from paceline.errors import CheckpointError, SettingsError
from paceline.monitor.events import CheckpointSkipped, Event, RunStarted, Warned
from paceline.monitor.log import EventLog
from paceline.parallel.parallelize import parallelize
from paceline.replica.named_tensors import restore_objects
from paceline.replica.replica import Replica
from paceline.replica.state import restore
from paceline.training.best import BestSoFar
from paceline.training.compiling import NO_COMPILER, compile_blocks
from paceline.training.evaluate import Evaluation
from paceline.training.load_balancing import LoadBalancer
from paceline.training.memory_probe import MemoryProbe
from paceline.training.model import Model
from paceline.training.noise_scale import NO_CLIPPING, NoiseMeter
from paceline.training.rates import Rates
from paceline.training.rehearsal import check_batch_norm_sizes, save_activations, save_optimizer
from paceline.training.run import Run


@dataclass
class Training:
    """The parts of a training under way on one worker."""

    run: Run
    recipe: str
    directory: Path
    model: Model
    """The run's, with as many layers as it has by now."""
    replica: Replica
    loader: Loader
    splits: Splits
    store: CheckpointStore
    saver: AsyncSaver | None
    """On rank 0, which writes for all."""
    log: EventLog
    load_balancer: LoadBalancer
    noise: NoiseMeter | None
    """Where the gradient noise scale is measured."""
    probe: MemoryProbe
    rates: Rates
    """Learning rates of the replica's optimizer."""
    num_steps: int
    """Of the whole training."""
    best: BestSoFar
    step: int = 0
    resumed_from: str | None = None
    began_s: float = 0.0
    num_samples: int = 0
    """Since this start."""
    step_began_s: float = 0.0
    num_micro_batches: int = 0
    """Of the step under way."""
    global_batch: int = 0
    """Samples of the step to come, as they were told last."""
    end_reason: str = ""
    """Why this worker wants the training to end before its last step; the others may not know yet."""
    evaluation: tuple[int, Evaluation] | None = None
    """The last one, and the step after which it was."""
    is_over: bool = False
    """Whether no step is to come."""

    @property
    def membership(self) -> Membership:
        """What belongs to the workers."""
        return self.replica.membership

    def log_event(self, event: Event) -> None:
        """Write what all workers know, once, and call back whoever wants to know it."""
        rank = self.replica.shard.world.rank
        if rank == 0:
            self.log.write(event, step=self.step)
        for callback in self.run.callbacks:
            if rank == 0 or callback.all_workers:
                callback.call(event, TrainingView(self))


class TrainingView:
    """What a callback may know of a training, and ask of it."""

    def __init__(self, training: Training) -> None:
        self._training = training

    @property
    def run(self) -> Run:
        """Settings of the run."""
        return self._training.run

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return self._training.directory

    @property
    def step(self) -> int:
        """Updates done."""
        return self._training.step

    @property
    def num_steps(self) -> int:
        """Updates of the whole training."""
        return self._training.num_steps

    @property
    def rank(self) -> int:
        """This process's number."""
        return self._training.replica.shard.world.rank

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._training.replica.shard.data_parallel_group.size

    @property
    def module(self) -> nn.Module:
        """The module that is trained, or this rank's part of it; it is to be looked at, not changed."""
        return self._training.replica.module

    def request_stop(self, reason: str = "a callback asked for it") -> None:
        """Ask all workers to end the training after a step; it is then evaluated and finished as after its last one."""
        self._training.end_reason = self._training.end_reason or reason
        self._training.membership.request_stop(reason)


def build_model(run: Run, splits: Splits, group: Group, model: Model | None = None) -> nn.Module:
    """Return the model, the same on every process; `model` is in place of the run's own, where that has grown."""
    with SEEDING:
        torch.manual_seed(run.seed)
        return (model or run.model).build(splits.train.spec).to(group.device)


def build_replica(run: Run, module: nn.Module, splits: Splits, group: Group, world: Group | None = None) -> Replica:
    """Return the replica of a new `module`, with a new optimizer.

    Args:
        run: Settings of all that it is made of.
        module: As `build_model` made it.
        splits: What it learns from.
        group: The workers, or all ranks of the layout.
        world: See `Replica`.
    """
    save_activations(run, module, splits, max(1, group.size // run.layout.ranks_of_worker), group.device)
    module = parallelize(
        module,
        run.layout,
        group=group,
        tensor_plan=run.tensor_plan,
        pipeline=run.pipeline,
        sharded_codec=run.sharded_codec,
        sample=_read_sample(splits, group.device),
    )
    if run.compiler != NO_COMPILER:
        compile_blocks(module, run.compiler)
    # A norm is reported only where it is bounded.
    clip_norm = NO_CLIPPING if run.clip_norm is None and run.noise_interval else run.clip_norm
    return Replica(
        module,
        save_optimizer(run, run.optimizer.build(module)),
        group=group,
        sync=run.sync,
        precision=run.precision,
        clip_norm=clip_norm,
        bucket_bytes=run.bucket_bytes,
        landing=run.landing,
        ema=run.ema,
        batch_norm=run.batch_norm,
        hash_interval=run.hash_interval,
        seed=run.seed,
        world=world,
    )


def make_rates(run: Run, replica: Replica, num_steps: int, before: Rates | None = None) -> Rates:
    """Return the learning rates of a new replica, which go on from those `before`."""
    rates = Rates(replica.optimizer, run.optimizer, run.schedule, num_steps)
    if before is not None:
        rates.load_state_dict(before.state_dict())
    return rates


def _read_sample(splits: Splits, device: torch.device) -> Any:
    """Return a model's inputs of one sample."""
    return Batch(splits.train.read_first(), 1, Interval(0, 1)).to(device).inputs


def set_up(run: Run, directory: Path, group: Group, log: EventLog, recipe: str, world: Group | None) -> Training:
    """Return a training that is ready to go on, from the newest valid checkpoint in `directory` if there is one."""
    splits = run.open_data()
    store = CheckpointStore(directory / "checkpoints", keep=run.keep_checkpoints)
    checkpoint = _find_checkpoint(store, log) if group.rank == 0 else None
    model = _find_model(run, checkpoint, group)
    module = build_model(run, splits, group, model)
    misfits = ""
    if run.initial is not None and group.rank == 0 and checkpoint is None:
        misfits = run.initial.load_into(module)  # the others are sent what rank 0 has
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    replica = build_replica(run, module, splits, group, world)
    loader = make_loader(
        run, splits, replica.shard.data_parallel_group, split=replica.shard.split_context, dispatcher=replica.dispatcher
    )
    if replica.dispatcher is not None:
        replica.dispatcher.set_source(loader.claim_next, loader.mark_used)
    saver = AsyncSaver(store) if group.rank == 0 else None
    load_balancer = LoadBalancer(
        loader,
        None if run.sync.is_asynchronous or not run.layout.is_plain else group,
        interval=run.speed_interval,
        is_following=run.shares == "measured",
    )
    noise = None
    if run.noise_interval:
        noise = NoiseMeter(module, group, interval=run.noise_interval, num_parts=run.num_micro_batches)
    num_steps = run.count_steps(splits)
    training = Training(
        run,
        recipe,
        directory,
        model,
        replica,
        loader,
        splits,
        store,
        saver,
        log,
        load_balancer,
        noise,
        probe=MemoryProbe(is_on=group.rank == 0),
        rates=make_rates(run, replica, num_steps),
        num_steps=num_steps,
        best=BestSoFar(run.keep_best, run.stop_after),
    )
    _resume(training, checkpoint)
    check_batch_norm_sizes(run, splits, loader)
    training.global_batch = loader.global_batch
    training.log_event(
        RunStarted(
            recipe=recipe,
            settings=run.model_dump(mode="json"),
            num_workers=replica.shard.data_parallel_group.size,
            device=str(group.device),
            num_parameters=num_parameters,
            start_step=training.step,
            total_steps=num_steps,
            global_batch=training.global_batch,
            samples_per_epoch=0 if isinstance(splits.train, IterableSource) else len(splits.train),
            resumed_from=training.resumed_from,
        )
    )
    if misfits:
        training.log_event(Warned(message=f"initial weights do not fit the model in all, the rest is new; {misfits}"))
    if splits.held_out is None:
        if training.best.is_used:
            raise SettingsError(
                "keep_best and stop_after must come with held-out data, but there is none; return (train, held_out)"
            )
        training.log_event(
            Warned(message="the data has no held-out part, so that nothing is evaluated; return (train, held_out)")
        )
    return training


def make_loader(
    run: Run,
    splits: Splits,
    workers: Group,
    *,
    split: Callable[[Batch], Batch] | None = None,
    dispatcher: Dispatcher | None = None,
) -> Loader:
    """Return the loader of a run's training data.

    Args:
        run: The run.
        splits: Its data.
        workers: The ranks that take different samples.
        split: See `Loader`.
        dispatcher: See `Loader`.

    Raises:
        SettingsError: The settings do not fit each other, the data or the number of workers.
    """
    schedule = run.batch_schedule
    if schedule.smallest(run.global_batch) < workers.size:
        raise SettingsError(
            f"global_batch must be at least the number of workers, but batch_schedule {schedule.name} may take it to "
            f"{schedule.smallest(run.global_batch)} with {workers.size} workers; start fewer, or keep it larger"
        )
    return Loader(
        splits.train,
        run.global_batch,
        group=workers,
        num_epochs=run.num_epochs,
        collate_fn=splits.train.collate if isinstance(splits.train, IterableSource) else None,
        drop_last=run.drop_last or splits.drop_last,
        join_epochs=run.join_epochs,
        split=split,
        seed=run.seed,
        shuffle=splits.shuffle,
        shares=run.fixed_shares,
        num_micro_batches=run.num_micro_batches,
        num_processes=run.num_data_processes or splits.num_processes,
        dispatcher=dispatcher,
        changes=schedule.plan(run.global_batch, run.count_steps(splits)),
        adds_micro_batches=schedule.adds_micro_batches,
    )


def _find_checkpoint(store: CheckpointStore, log: EventLog) -> Checkpoint | None:
    def skip(path: Path, reason: str) -> None:
        log.write(CheckpointSkipped(path=str(path), reason=reason), step=0)

    checkpoint = store.find_newest_valid(skip)
    if checkpoint is None and (damaged := store.list_checkpoints()):
        raise CheckpointError(
            f"one checkpoint must be whole, but all {len(damaged)} in {store.directory} are damaged; "
            "move them away to begin again"
        )
    return checkpoint


def _find_model(run: Run, checkpoint: Checkpoint | None, group: Group) -> Model:
    """Return the run's model with as many layers as rank 0's `checkpoint` has."""
    if not run.growth.steps:
        return run.model
    saved = checkpoint.read_document().get("num_layers") if checkpoint is not None else None
    num_layers = group.gather_documents(saved, name="saved depth")[0]
    return run.model.with_depth(num_layers) if num_layers else run.model


def _resume(training: Training, checkpoint: Checkpoint | None) -> None:
    run, loader = training.run, training.loader
    document = restore(checkpoint, training.replica)
    if document is None:
        return
    loader.load_state_dict(document["loader"])
    if run.shares == "measured":
        loader.load_shares(document["loader"])
    if run.batch_schedule.noise_interval and document["run"]["batch_schedule"]["name"] == run.batch_schedule.name:
        loader.load_batches(document["loader"])
    restore_objects(checkpoint, {"rates": training.rates}, training.replica.shard.world)
    training.best.load(document.get("best", {}))
    if training.noise is not None and document.get("noise"):
        training.noise.load(document["noise"])
    training.step = document["step"]
    training.resumed_from = document["path"] = str(checkpoint.path) if checkpoint else ""
