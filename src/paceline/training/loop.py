"""Training from the first step, or the newest checkpoint, to the last."""

import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from paceline.checkpoint import AsyncSaver, Checkpoint, CheckpointStore, SavedCheckpoint
from paceline.comm.group import Group
from paceline.data import Batch, Loader, Splits, derive_seed
from paceline.errors import CheckpointError, NonFiniteError
from paceline.monitor.events import (
    CheckpointSaved,
    CheckpointSkipped,
    Evaluated,
    Event,
    Failed,
    Preempted,
    RunFinished,
    RunStarted,
    Showcased,
    StalenessMeasured,
    StepFinished,
    UnusedParameters,
)
from paceline.monitor.log import EventLog
from paceline.sync.synchroniser import Desk, Site
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.replica import Replica, StepResult
from paceline.training.run import Run
from paceline.training.shares import Pacing
from paceline.training.state import capture, restore
from paceline.training.timeline import tell_timeline

_SEEDING = threading.Lock()  # workers that are threads share torch's generator


@dataclass
class Training:
    """The parts of a training under way on one worker."""

    run: Run
    recipe: str
    directory: Path
    replica: Replica
    loader: Loader
    splits: Splits
    store: CheckpointStore
    saver: AsyncSaver | None
    """On rank 0, which writes for all."""
    log: EventLog
    pacing: Pacing
    step: int = 0
    resumed_from: str | None = None
    began_s: float = 0.0
    num_samples: int = 0
    """Since this start."""
    stopped_by: str = ""
    step_began_s: float = 0.0
    num_micro_batches: int = 0
    """Of the step under way."""

    def tell(self, event: Event) -> None:
        """Write what all workers know, once."""
        if self.replica.group.rank == 0:
            self.log.write(event, step=self.step)


def train(run: Run, directory: Path, group: Group, log: EventLog, *, recipe: str, world: Group | None = None) -> bool:
    """Train `run` in `directory`, going on from its newest valid checkpoint if it has one.

    Every worker calls it. SIGTERM, SIGINT and SIGHUP make all workers stop after the step they are in, with a
    checkpoint.

    Returns:
        True when the last step is done, False when a signal ended it before.
    """
    training = None
    try:
        training = _set_up(run, directory, group, log, recipe, world)
        with training.saver or nullcontext(), _stop_on_signal(training):
            is_done = _run_steps(training) and _finish(training)
        training.replica.close()
        return is_done
    except (Exception, SystemExit) as error:  # code of the user's may call sys.exit
        tell_failure(log, error, step=training.step if training else -1)
        raise
    finally:
        if training is not None:
            training.store.close()


def tell_failure(log: EventLog, error: BaseException, step: int = -1) -> None:
    """Write to the log how this worker failed; step -1 is before the first."""
    trace = "".join(traceback.format_exception(error))
    log.write(Failed(error=type(error).__name__, message=str(error), traceback=trace), step=step)


def serve(run: Run, world: Group, log: EventLog) -> None:
    """Be one of the processes of `world` that only serve, until the workers have left.

    Signals are for the workers, who leave once they have saved.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        module, optimizer = _build(run, run.data.open(), world)
        num_workers = world.size - run.sync.num_server_processes
        run.sync.serve(Site(module, optimizer, world, run.seed, world), num_workers)
    except (Exception, SystemExit) as error:
        tell_failure(log, error)
        raise


def _build(run: Run, splits: Splits, group: Group) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer, the same on every process."""
    with _SEEDING:
        torch.manual_seed(run.seed)
        module = run.model.build(splits.train.spec).to(group.device)
    return module, run.optimizer.build(module)


def _set_up(run: Run, directory: Path, group: Group, log: EventLog, recipe: str, world: Group | None) -> Training:
    splits = run.data.open()
    module, optimizer = _build(run, splits, group)
    replica = Replica(
        module,
        optimizer,
        group=group,
        sync=run.sync,
        precision=run.precision,
        clip_norm=run.clip_norm,
        bucket_bytes=run.bucket_bytes,
        landing=run.landing,
        hash_interval=run.hash_interval,
        seed=run.seed,
        world=world,
    )
    loader = Loader(
        splits.train,
        run.global_batch,
        group=group,
        seed=run.seed,
        shares=run.fixed_shares,
        num_micro_batches=run.num_micro_batches,
        num_processes=run.num_data_processes,
        claims=replica.desk,
    )
    if replica.desk is not None:
        replica.desk.hand_out(loader.take, loader.note)
    store = CheckpointStore(directory / "checkpoints", keep=run.keep_checkpoints)
    saver = AsyncSaver(store) if group.rank == 0 else None
    pacing = Pacing(
        loader,
        None if run.sync.is_asynchronous else group,
        interval=run.speed_interval,
        is_following=run.shares == "measured",
    )
    training = Training(run, recipe, directory, replica, loader, splits, store, saver, log, pacing)
    _resume(training)
    training.tell(
        RunStarted(
            recipe=recipe,
            settings=run.model_dump(mode="json"),
            num_workers=group.size,
            device=str(group.device),
            num_parameters=sum(parameter.numel() for parameter in module.parameters()),
            start_step=training.step,
            total_steps=run.num_steps,
            global_batch=run.global_batch,
            samples_per_epoch=len(splits.train),
            resumed_from=training.resumed_from,
        )
    )
    return training


def _resume(training: Training) -> None:
    def skip(path: Path, reason: str) -> None:
        training.tell(CheckpointSkipped(path=str(path), reason=reason))

    replica = training.replica
    checkpoint: Checkpoint | None = None
    if replica.group.rank == 0:
        checkpoint = training.store.find_newest_valid(skip)
        if checkpoint is None and (damaged := training.store.list_checkpoints()):
            raise CheckpointError(
                f"one checkpoint must be whole, but all {len(damaged)} in {training.store.directory} are damaged; "
                "move them away to begin again"
            )
    document = restore(checkpoint, replica)
    if document is None:
        return
    training.loader.load_state_dict(document["loader"])
    if training.run.shares == "measured":
        training.loader.load_shares(document["loader"])
    training.step = document["step"]
    training.resumed_from = document["path"] = str(checkpoint.path) if checkpoint else ""


def _run_steps(training: Training) -> bool:
    """Run steps to the last one; return False if a signal ended it before."""
    run = training.run
    if training.step >= run.num_steps:
        return True
    training.began_s = training.step_began_s = time.perf_counter()
    if training.replica.desk is not None:
        return _run_at_own_pace(training, training.replica.desk)
    for batch in training.loader:
        result = _learn(training, batch, training.step)
        if result is None:
            continue
        training.step += 1
        _tell_step(training, result, batch.interval.num_samples)
        for event in training.pacing.end_step(training.step, result.times):
            training.tell(event)
        _do_after_step(training, stop=result.stop)
        if result.stop and training.step < run.num_steps:
            return False
        if training.step == run.num_steps:
            return True
        training.step_began_s = time.perf_counter()
    raise AssertionError("a loader never ends")


def _run_at_own_pace(training: Training, desk: Desk) -> bool:
    """Let each worker take what nobody has; all come together to evaluate, to save and at the end.

    A step is done when a global batch of samples is, by whomever.
    """
    run, loader, group = training.run, training.loader, training.replica.group
    began_at = loader.position
    while training.step < run.num_steps:
        desk.set_boundary(loader.order.position_of(_next_meeting(run, training.step), run.global_batch))
        for batch in loader:
            result = _learn(training, batch, loader.order.step_of(batch.interval.start, run.global_batch))
            if result is None:
                continue
            training.step = loader.order.step_of(batch.interval.stop, run.global_batch)
            _tell_step(training, result, batch.interval.num_samples)
            training.step_began_s = time.perf_counter()
        position = group.gather_documents(loader.position, name="position")[0]
        loader.move_to(position)
        training.num_samples = position - began_at
        training.step = loader.order.step_of(position, run.global_batch)
        stop = desk.is_stopping
        _do_after_step(training, stop=stop)
        if stop and training.step < run.num_steps:
            return False
    return True


def _next_meeting(run: Run, step: int) -> int:
    """Return the first step after `step` at whose end all workers come together."""
    intervals = [interval for interval in (run.evaluate_interval, run.checkpoint_interval) if interval]
    return min([(step // interval + 1) * interval for interval in intervals] + [run.num_steps])


def _learn(training: Training, batch: Batch, step: int) -> StepResult | None:
    """Learn from a micro-batch of `step`, and return what the update did if it was the step's last."""
    run, replica = training.run, training.replica
    # Each micro-batch has a random stream of its own, which needs no state to resume.
    stream = (step, replica.group.rank) if replica.desk is None else batch.interval
    torch.manual_seed(derive_seed(run.seed, *stream, training.num_micro_batches) >> 1)
    training.num_micro_batches += 1
    with training.pacing.computing(batch.num_samples):
        loss = run.objective.loss(replica, batch)
        replica.backward(loss.mean, weight=loss.weight, last=batch.last)
    if not batch.last:
        return None
    training.num_micro_batches = 0
    for group in replica.optimizer.param_groups:
        group["lr"] = run.optimizer.learning_rate * run.schedule.factor(step, run.num_steps)
    result = replica.update()
    training.loader.ack(batch)
    training.num_samples += batch.interval.num_samples
    return result


def _tell_step(training: Training, result: StepResult, num_samples: int) -> None:
    training.tell(
        StepFinished(
            loss=result.loss,
            weight=result.weight,
            num_samples=num_samples,
            learning_rate=training.replica.optimizer.param_groups[0]["lr"],
            gradient_norm=result.gradient_norm,
            duration_s=time.perf_counter() - training.step_began_s,
            communication_s=result.communication_s,
            position=training.loader.position,
            loss_scale=training.replica.loss_scale,
            wire_bytes=result.wire_bytes,
        )
    )
    interval = training.run.timeline_interval
    if interval and training.step % interval == 0:
        for event in tell_timeline(result):
            training.log.write(event, step=training.step)
    if result.newly_unused:
        training.tell(UnusedParameters(names=result.newly_unused))


def _do_after_step(training: Training, *, stop: bool) -> None:
    run, step = training.run, training.step
    if _next_meeting(run, step - 1) == step:
        _tell_delays(training)
    is_last = step == run.num_steps
    if run.evaluate_interval and step % run.evaluate_interval == 0 and not is_last and not stop:
        _evaluate(training)
    if stop and not is_last:
        path = _save(training, wait=True)
        training.tell(Preempted(checkpoint=path, signal=training.stopped_by or "a signal to another rank"))
    elif is_last or (run.checkpoint_interval and step % run.checkpoint_interval == 0):
        _save(training, wait=is_last)
    elif training.saver is not None:
        _tell_saved(training, training.saver.finished())


def _tell_delays(training: Training) -> None:
    delays = training.replica.count_delays() if training.replica.group.rank == 0 else None
    if delays is not None:
        ages, counts = zip(*sorted(delays.counts.items()), strict=True) if delays.counts else ((), ())
        training.tell(StalenessMeasured(delays=list(ages), counts=list(counts), num_dropped=delays.num_dropped))


def _save(training: Training, *, wait: bool) -> str:
    """Start a checkpoint of the state after `training.step` updates, and with `wait` finish it."""
    replica = training.replica
    replica.flush()
    for name, parameter in replica.module.named_parameters():
        if not torch.isfinite(parameter).all():
            raise NonFiniteError(
                f"parameters must be finite to be saved, but at step {training.step} {name} is not; resume from the "
                "checkpoint before with a lower learning rate, or with clip_norm, which finds the step at once"
            )
    tensors, document = capture(replica)
    document |= {
        "step": training.step,
        "recipe": training.recipe,
        "run": training.run.model_dump(mode="json"),
        "loader": training.loader.state_dict(),
    }
    path = ""
    if training.saver is not None:
        training.saver.start(tensors, document, training.step)
        _tell_saved(training, training.saver.finished())
        if wait and (saved := training.saver.wait()):
            _tell_saved(training, [saved])
            path = str(saved.path)
    if wait:
        replica.group.barrier(name="checkpoint")
    return path


def _tell_saved(training: Training, saved: list[SavedCheckpoint]) -> None:
    for checkpoint in saved:
        training.tell(
            CheckpointSaved(path=str(checkpoint.path), num_bytes=checkpoint.num_bytes, duration_s=checkpoint.duration_s)
        )


def _evaluate(training: Training) -> Evaluation | None:
    """Evaluate; None if a signal came meanwhile."""
    run = training.run
    training.replica.flush()
    evaluation = evaluate(
        training.replica,
        run.objective,
        training.splits.held_out,
        batch_size=max(1, run.global_batch // training.replica.group.size // run.num_micro_batches),
        max_samples=run.evaluate_samples,
        is_stopped=lambda: bool(training.stopped_by),
    )
    if evaluation is not None:
        training.tell(
            Evaluated(
                loss=evaluation.loss,
                metrics=evaluation.metrics,
                num_samples=evaluation.num_samples,
                duration_s=evaluation.duration_s,
            )
        )
    return evaluation


def _finish(training: Training) -> bool:
    """Evaluate the trained model and say that the run is done; False if a signal came meanwhile."""
    duration_s = time.perf_counter() - training.began_s if training.began_s else 0.0
    evaluation = _evaluate(training)
    if evaluation is None:
        newest = training.store.list_checkpoints()[0]
        training.tell(Preempted(checkpoint=str(newest), signal=training.stopped_by or "a signal to another rank"))
        return False
    if training.replica.group.rank == 0:
        text = training.run.objective.showcase(training.replica.module, training.splits.held_out)
        if text:
            training.tell(Showcased(text=text))
    training.tell(
        RunFinished(
            held_out_loss=evaluation.loss,
            metrics=evaluation.metrics,
            duration_s=duration_s,
            samples_per_s=training.num_samples / duration_s if duration_s else 0.0,
        )
    )
    return True


@contextmanager
def _stop_on_signal(training: Training) -> Iterator[None]:
    """Turn SIGTERM, SIGINT and SIGHUP into a request to stop after the step under way. Threads cannot; they do not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        training.stopped_by = signal.Signals(number).name
        training.replica.request_stop()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
