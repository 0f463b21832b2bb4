"""Training from the first step, or the newest checkpoint, to the last."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch

from paceline.comm.group import Group
from paceline.comm.torch_group import is_lost_peer
from paceline.data import Batch, IterableSource, Source, derive_seed
from paceline.errors import CommunicationError, DataError, NonFiniteError, SettingsError
from paceline.monitor.events import BatchChanged, Evaluated, ModelGrown, Preempted, RunFinished, Showcased, StoppedEarly
from paceline.monitor.log import EventLog
from paceline.parallel.local import local
from paceline.replica.named_tensors import capture_objects
from paceline.replica.state import capture
from paceline.replica.step_result import StepResult
from paceline.schedules import NoiseScaleBatch
from paceline.sync.synchroniser import SampleDispatcher, WorkerContext
from paceline.training.best import BestSoFar
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.growth import grow_module, grow_optimizer
from paceline.training.log_events import log_delays, log_failure, log_saved, log_step
from paceline.training.run import Run
from paceline.training.training import Training, build_model, build_replica, make_rates, set_up


def train(run: Run, directory: Path, group: Group, log: EventLog, *, recipe: str, world: Group | None = None) -> bool:
    """Train `run` in `directory`, going on from its newest valid checkpoint if it has one.

    Every worker calls it. SIGTERM, SIGINT and SIGHUP make all workers stop after the step they are in, with a
    checkpoint.

    Returns:
        True when the last step is done, False when a signal ended it before.
    """
    training = None
    try:
        training = set_up(run, directory, group, log, recipe, world)
        # A second signal must not end the process while the saver still writes.
        stopping = training.membership.stopping_on_signals(may_interrupt=False)
        with stopping, training.saver or nullcontext(), _explaining(training):
            is_done = _run_steps(training) and _finish(training)
        training.replica.close()
        return is_done
    except (Exception, SystemExit) as error:  # code of the user's may call sys.exit
        log_failure(log, error, step=training.step if training else -1)
        raise
    finally:
        if training is not None:
            training.store.close()


def serve(run: Run, world: Group, log: EventLog) -> None:
    """Be one of the processes of `world` that only serve, until the workers have left.

    Signals are for the workers, who leave once they have saved.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        module = build_model(run, run.open_data(), world)
        optimizer = run.optimizer.build(module)
        num_workers = world.size - run.sync.num_server_processes
        run.sync.serve(WorkerContext(module, optimizer, world, run.seed, world), num_workers)
    except (Exception, SystemExit) as error:
        log_failure(log, error)
        raise


def _run_steps(training: Training) -> bool:
    """Run steps to the last one; return False if a signal ended it before."""
    training.is_over = training.step >= training.num_steps or bool(training.best.end_reason)
    if training.is_over:
        return True
    try_evaluation(training)
    training.began_s = training.step_began_s = time.perf_counter()
    if training.replica.dispatcher is not None:
        return _run_at_own_pace(training, training.replica.dispatcher)
    maybe_grow(training)
    for batch in training.loader:
        with training.probe.watching(training.replica, batch):
            result = train_step(training, batch, training.step)
        if result is None:
            continue
        training.step += 1
        log_step(training, result, batch.interval.num_samples)
        for event in training.load_balancer.end_step(training.step, result.times):
            training.log_event(event)
        measure_noise(training, result, batch.interval.num_samples)
        if (measured := training.probe.end_step(training.replica)) is not None:
            training.log_event(measured)
        do_after_step(training, stop=result.stop)
        if training.is_over or result.stop:
            return training.is_over
        maybe_grow(training)
        log_batch_change(training)
        training.step_began_s = time.perf_counter()
    raise AssertionError("a loader never ends")


def _run_at_own_pace(training: Training, dispatcher: SampleDispatcher) -> bool:
    """Let each worker take what nobody has; all come together to evaluate, to save and at the end.

    A step is done when a global batch of samples is, by whomever.
    """
    run, loader, group = training.run, training.loader, training.replica.group
    began_at = loader.position
    while not training.is_over:
        dispatcher.set_boundary(loader.order.position_of(next_boundary(training, training.step), run.global_batch))
        for batch in loader:
            result = train_step(training, batch, loader.order.step_of(batch.interval.start, run.global_batch))
            if result is None:
                continue
            training.step = loader.order.step_of(batch.interval.stop, run.global_batch)
            log_step(training, result, batch.interval.num_samples)
            training.step_began_s = time.perf_counter()
        position = group.gather_documents(loader.position, name="position")[0]
        loader.move_to(position)
        training.num_samples = position - began_at
        training.step = loader.order.step_of(position, run.global_batch)
        stop = dispatcher.is_stopping
        do_after_step(training, stop=stop)
        if stop and not training.is_over:
            return False
    return True


def _finish(training: Training) -> bool:
    """Evaluate the trained model and say that the run is done; False if a signal came meanwhile."""
    duration_s = time.perf_counter() - training.began_s if training.began_s else 0.0
    held_out = training.splits.held_out
    step, evaluation = training.evaluation or (-1, None)
    if held_out is not None and step != training.step:
        evaluation = evaluate_held_out(training, held_out)
    if training.best.is_kept and training.best.step == training.step and training.saver is not None:
        training.store.mark_best(training.store.list_checkpoints()[0])  # also if it was saved before it was judged
    if evaluation is None and held_out is not None:
        newest = training.store.list_checkpoints()[0]
        training.log_event(
            Preempted(
                checkpoint=str(newest), signal=training.membership.stop_requested_by or "a signal to another rank"
            )
        )
        return False
    shard = training.replica.shard
    with shard.replicated_inputs() as can_run:
        if can_run and (shard.world.rank == 0 or not shard.is_whole) and isinstance(held_out, Source):
            text = training.run.loss.showcase(training.replica.module, held_out)
            if text:
                training.log_event(Showcased(text=text))
    training.log_event(
        RunFinished(
            held_out_loss=evaluation.loss if evaluation is not None else None,
            metrics=evaluation.metrics if evaluation is not None else {},
            duration_s=duration_s,
            samples_per_s=training.num_samples / duration_s if duration_s else 0.0,
        )
    )
    return True


@contextmanager
def _explaining(training: Training) -> Iterator[None]:
    """Say which rank lost others where torch, not a group of ours, carries what the ranks of a layout exchange."""
    try:
        yield
    except RuntimeError as error:
        if training.run.layout.is_plain or not is_lost_peer(error):
            raise
        world = training.replica.shard.world
        raise CommunicationError(
            f"rank {world.rank} of {world.size} lost others of its layout after step {training.step}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def train_step(training: Training, batch: Batch, step: int) -> StepResult | None:
    """Train on a micro-batch of `step`, and return what the update did if it was the step's last."""
    run, replica = training.run, training.replica
    # Each micro-batch has a random stream of its own, which needs no state to resume.
    stream = (step, *replica.shard.random_stream) if replica.dispatcher is None else batch.interval
    torch.manual_seed(derive_seed(run.seed, *stream, training.num_micro_batches) >> 1)
    training.num_micro_batches += 1
    with training.load_balancer.computing(batch.num_samples), replica.shard.forward_context():
        if replica.shard.pipeline is not None:
            timed = run.timeline_interval > 0 and batch.last and (training.step + 1) % run.timeline_interval == 0
            replica.backward_through(batch, run.loss.loss_of_output, last=batch.last, timed=timed)
        else:
            loss = run.loss.loss(replica, batch)
            if training.noise is not None:
                training.noise.watch(loss.mean, batch.num_samples)
            replica.backward(loss.mean, weight=loss.weight, last=batch.last)
    if not batch.last:
        return None
    training.num_micro_batches = 0
    training.rates.set(step, training.loader.batch_at(batch.interval.start))
    result = replica.update()
    training.loader.ack(batch)
    training.num_samples += batch.interval.num_samples
    return result


def measure_noise(training: Training, result: StepResult, num_samples: int) -> None:
    """Measure the gradient noise of a step of `num_samples`, and let the batch follow it where it does."""
    run, loader = training.run, training.loader
    measured = training.noise.end_step(training.step, result, num_samples) if training.noise is not None else None
    if measured is None:
        return
    training.log_event(measured)
    if isinstance(run.batch_schedule, NoiseScaleBatch):
        chosen = run.batch_schedule.choose(measured.noise_scale, loader.newest_batch, run.global_batch)
        if chosen != loader.newest_batch:
            loader.change_batch(chosen)


def log_batch_change(training: Training) -> None:
    """Log another global batch, where the step to come has one."""
    batch = training.loader.global_batch
    if batch != training.global_batch:
        training.global_batch = batch
        training.log_event(BatchChanged(global_batch=batch, start=training.loader.position))


def maybe_grow(training: Training) -> None:
    """Replace the replica by one of a deeper model, where the step to come is one to grow at. All workers call it.

    Raises:
        SettingsError: The model is deeper already than it should be, as it was saved by a run that grew earlier.
    """
    run, old, depth = training.run, training.replica, training.model.layer_stack
    if depth is None or not run.growth.steps:
        return
    first = run.model.layer_stack
    assert first is not None
    num_layers = run.growth.depth_at(training.step, first.num_layers)
    if num_layers == depth.num_layers:
        return
    if num_layers < depth.num_layers:
        raise SettingsError(
            f"a model must not become shallower, but it has {depth.num_layers} layers and growth gives it {num_layers} "
            f"at step {training.step}; resume with the growth that the run was started with"
        )
    state, feedback = old.state.document(), old.state.feedback()
    old.close()
    training.model = training.model.with_depth(num_layers)
    module = build_model(run, training.splits, old.shard.world, training.model)
    new = build_replica(run, module, training.splits, old.shard.world)
    grow_module(old.module, new.module, depth, run.growth.method)
    grow_optimizer((old.module, old.optimizer), (new.module, new.optimizer), depth, run.growth.method)
    new.state.load_document(state)
    if feedback:
        new.state.load_feedback([feedback if rank == new.group.rank else {} for rank in range(new.group.size)])
    training.replica = new
    training.rates = make_rates(run, new, training.num_steps, training.rates)
    if training.noise is not None:
        training.noise.use(new.module)
    num_parameters = sum(parameter.numel() for parameter in new.module.parameters())
    training.log_event(ModelGrown(num_layers=num_layers, num_parameters=num_parameters, method=run.growth.method))


def next_boundary(training: Training, step: int) -> int:
    """Return the first step after `step` at whose end all workers come together."""
    run = training.run
    intervals = [interval for interval in (run.evaluate_interval, run.checkpoint_interval) if interval]
    return min([(step // interval + 1) * interval for interval in intervals] + [training.num_steps])


def do_after_step(training: Training, *, stop: bool) -> None:
    """Evaluate and save where it is time, and save where some worker was asked to `stop`."""
    run, step = training.run, training.step
    if next_boundary(training, step - 1) == step:
        log_delays(training)
    is_last = step == training.num_steps
    held_out = training.splits.held_out
    is_due = run.evaluate_interval and step % run.evaluate_interval == 0 and not is_last and not stop
    if held_out is not None and (is_due or (is_last and training.best.is_used)):
        evaluate_held_out(training, held_out)
    is_best = training.best.is_kept and training.best.step == step
    end_reason = "" if is_last else training.best.end_reason
    training.is_over = is_last or bool(end_reason)
    if stop and not is_last:
        path = save_checkpoint(training, wait=True)
        if not _end_if_agreed(training):
            training.log_event(
                Preempted(checkpoint=path, signal=training.membership.stop_requested_by or "a signal to another rank")
            )
    elif training.is_over or is_best or (run.checkpoint_interval and step % run.checkpoint_interval == 0):
        save_checkpoint(training, wait=training.is_over, is_best=is_best)
        if end_reason:
            training.log_event(StoppedEarly(reason=end_reason))
    elif training.saver is not None:
        log_saved(training, training.saver.finished())


def _end_if_agreed(training: Training) -> bool:
    """Let the training be over where its own code, and no signal, has stopped it on all workers."""
    membership, mine = training.membership, training.end_reason
    reported = {"end": mine, "signal": membership.stop_requested_by if membership.stop_requested_by != mine else ""}
    everybody = training.replica.shard.world.gather_documents(reported, name="why to stop")
    if any(theirs["signal"] for theirs in everybody):
        return False
    training.is_over, membership.stop_requested_by, membership.is_stopping = True, "", False
    training.log_event(StoppedEarly(reason=next(theirs["end"] for theirs in everybody if theirs["end"])))
    return True


def save_checkpoint(training: Training, *, wait: bool, is_best: bool = False) -> str:
    """Start a checkpoint of the state after `training.step` updates, and with `wait` finish it."""
    replica = training.replica
    replica.flush()
    for name, parameter in replica.module.named_parameters():
        if not torch.isfinite(local(parameter)).all():
            raise NonFiniteError(
                f"parameters must be finite to be saved, but at step {training.step} {name} is not; resume from the "
                "checkpoint before with a lower learning rate, or with clip_norm, which finds the step at once"
            )
    tensors, document = capture(replica)
    more, objects = capture_objects({"rates": training.rates})
    tensors |= more
    document |= objects | {
        "step": training.step,
        "recipe": training.recipe,
        "run": training.run.model_dump(mode="json"),
        "spec": asdict(training.splits.train.spec),
        "loader": training.loader.state_dict(),
        "best": training.best.state(),
        "num_layers": depth.num_layers if (depth := training.model.layer_stack) is not None else None,
        "noise": training.noise.state() if training.noise is not None else None,
    }
    path = ""
    if training.saver is not None:
        training.saver.start(tensors, document, training.step, is_best=is_best)
        log_saved(training, training.saver.finished())
        if wait and (saved := training.saver.wait()):
            log_saved(training, [saved])
            path = str(saved.path)
    if wait:
        replica.shard.world.barrier(name="checkpoint")
    return path


def evaluate_held_out(training: Training, held_out: Source | IterableSource) -> Evaluation | None:
    """Evaluate; None if a signal came meanwhile. Where parameters are averaged, both they and averages are judged."""
    training.replica.flush()
    evaluation = _evaluate(training, held_out, averaged=training.run.ema is not None)
    plain = _evaluate(training, held_out, averaged=False) if training.run.ema is not None else None
    if evaluation is None or (training.run.ema is not None and plain is None):
        return None
    if not evaluation.weight:
        raise DataError(
            f"held-out data must have something that counts in the loss, but its {evaluation.num_samples} samples "
            "have nothing; see to their targets"
        )
    training.evaluation = (training.step, evaluation)
    training.log_event(
        Evaluated(
            loss=evaluation.loss,
            metrics=evaluation.metrics,
            num_samples=evaluation.num_samples,
            duration_s=evaluation.duration_s + (plain.duration_s if plain is not None else 0.0),
            is_best=training.best.note(evaluation, training.step),
            unaveraged={"loss": plain.loss} | plain.metrics if plain is not None else None,
        )
    )
    return evaluation


def _evaluate(training: Training, held_out: Source | IterableSource, *, averaged: bool) -> Evaluation | None:
    run = training.run
    num_workers = training.replica.shard.data_parallel_group.size
    return evaluate(
        training.replica,
        run.loss,
        held_out,
        metrics=run.metrics,
        batch_size=max(1, run.global_batch // num_workers // run.num_micro_batches),
        max_samples=run.evaluate_samples,
        averaged=averaged,
        is_stopped=lambda: bool(training.membership.stop_requested_by),
    )


def try_evaluation(training: Training) -> None:
    """Judge a sample a worker before the first step, so that metrics of a person's own fail then, if they do.

    Raises:
        SettingsError: They are none, or what `keep_best` names is not among them.
    """
    run, held_out = training.run, training.splits.held_out
    if training.step or held_out is None or (run.metrics is None and not training.best.is_used):
        return
    most = training.replica.shard.data_parallel_group.size
    tried = evaluate(training.replica, run.loss, held_out, metrics=run.metrics, batch_size=1, max_samples=most)
    if tried is not None:
        BestSoFar(run.keep_best, run.stop_after).note(tried, 0)
