"""Training from the first step, or the newest checkpoint, to the last."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from paceline.comm.group import Group
from paceline.comm.membership import CHANGE
from paceline.comm.torch_group import is_lost_peer
from paceline.data import Batch, Source, derive_seed
from paceline.elastic.member import Evicted, Member
from paceline.errors import BudgetError, CommunicationError, SettingsError
from paceline.monitor.events import (
    BudgetSpent,
    ModelGrown,
    Preempted,
    RunFinished,
    Showcased,
    StoppedEarly,
    Warned,
)
from paceline.monitor.formatting import describe_size
from paceline.monitor.log import EventLog
from paceline.parallel.mismatch import explain_failure
from paceline.parallel.mixture_of_experts import balance_loss
from paceline.replica.step_result import StepResult
from paceline.schedules import NoiseScaleBatch
from paceline.sync.synchroniser import SampleDispatcher, WorkerContext
from paceline.training import guarded_step
from paceline.training.building import build_model
from paceline.training.growth import grow_module, grow_optimizer
from paceline.training.guarded_step import GoingBack, go_back
from paceline.training.held_out import evaluate_held_out, try_evaluation
from paceline.training.log_events import (
    log_bad_samples,
    log_delays,
    log_distance,
    log_failure,
    log_growth,
    log_routing,
    log_saved,
    log_step,
    log_stores,
    take_new_shards,
)
from paceline.training.model import resize, size_of
from paceline.training.reforming import start_alone, train_through_views
from paceline.training.reforming_layouts import LayoutMember
from paceline.training.run import Run
from paceline.training.saving import (
    is_evaluation_due,
    is_save_missing,
    keep_in_memory,
    save_checkpoint,
    save_what_lives,
)
from paceline.training.session import Session, build_replica, describe_batch, make_rates, open_session, watch_replica
from paceline.training.training import Training, count_parameters, prepare, start_training
from paceline.training.widening import widen_module, widen_optimizer


def train(
    run: Run,
    directory: Path,
    group: Group,
    log: EventLog,
    *,
    recipe: str,
    world: Group | None = None,
    member: Member | None = None,
) -> bool:
    """Train `run` in `directory`, going on from its newest valid checkpoint if it has one.

    Every worker calls it. SIGTERM, SIGINT and SIGHUP make all workers stop after the current step, with a checkpoint.

    Args:
        run: The run.
        directory: Directory of the run.
        group: The workers, or all ranks of the layout; with a `member` this worker alone, which then waits for a view.
        log: Log of this worker.
        recipe: Path of the recipe.
        world: See `Replica`.
        member: Connection to the supervisor of workers that may change, where `can_reform` says that they can.

    Returns:
        True when the last step is done, False when a signal ended it before.

    Raises:
        BudgetError: The budget is spent; a checkpoint is saved.
    """
    training = layout = None
    try:
        if member is not None and not run.layout.is_plain:
            layout = LayoutMember(run, directory, group, log, recipe, member)
            return _end(layout.train(_run_to_end), layout.training)
        if member is not None:
            training = start_alone(run, directory, group, log, recipe)
            return _end(train_through_views(training, member, _run_to_end), training)
        run = run.fit_workers(run.count_workers((world or group).size))
        training, checkpoint = start_training(run, directory, group, log, recipe)
        with open_session(training, group, world, checkpoint) as session, _explaining(session):
            try:
                has_ended = _run_to_end(session)
            except CommunicationError as error:
                save_what_lives(session, error)
                raise
        return _end(has_ended, training)
    except (BudgetError, Evicted):
        raise
    except (Exception, SystemExit) as error:  # code of the user's may call sys.exit
        failed = layout.training if layout is not None else training
        log_failure(log, error, step=failed.step if failed is not None and failed.began_s else -1)
        raise
    finally:
        if training is not None:
            training.store.close()


def _run_to_end(session: Session) -> bool:
    """Run steps and finish; return False if a signal, a change of workers or the budget ended it before."""
    return _run_steps(session) and _finish(session)


def _end(has_ended: bool, training: Training | None) -> bool:
    """Return whether a training has ended, unless its budget ended it."""
    if training is not None and training.over_budget:
        raise BudgetError(training.over_budget)
    return has_ended


def serve(run: Run, world: Group, log: EventLog) -> None:
    """Serve as one of the processes of `world` that only serve, until the workers have left.

    Signals are for the workers, which leave once they have saved.
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


def _run_steps(session: Session) -> bool:
    """Run steps to the last one; return False if a signal ended it before."""
    training = session.training
    training.is_over = training.step >= training.num_steps or bool(training.best.end_reason)
    if is_save_missing(training) and do_after_step(session, stop=False):
        return training.is_over
    if training.is_over:
        return True
    try_evaluation(session)
    log_growth(session)
    training.began_s = training.began_s or time.perf_counter()
    if is_evaluation_due(training) and do_after_step(session, stop=False):  # a signal had put it off
        return training.is_over
    session.step_began_s = time.perf_counter()
    if session.replica.dispatcher is not None:
        return _run_at_own_pace(session, session.replica.dispatcher)
    return _run_together(session)


def _run_together(session: Session) -> bool:
    """Run steps that all workers take; they may go back, and make some of them again."""
    while True:
        cause: Exception | None = None
        try:
            return _run_batches(session)
        except GoingBack as going:
            cause = going.__cause__ if isinstance(going.__cause__, Exception) else None
        go_back(session, cause)


def _run_batches(session: Session) -> bool:
    """Run steps that all workers take, from the loader's position on."""
    training = session.training
    maybe_grow(session)
    for batch in session.loader:
        try:
            with session.probe.watching(session.replica, batch):
                result = train_step(session, batch, training.step)
        except (CommunicationError, RuntimeError):  # the latter is torch's, where it connects ranks of a layout
            session.unfinished, session.loader.in_hand = batch, None  # or leaving the loop would count it as used
            raise
        if result is None:
            continue
        training.step = session.loader.step
        log_step(session, result, batch.interval.num_samples)
        log_bad_samples(session)
        for event in session.load_balancer.end_step(training.step, result.times):
            session.log_event(event)
        measure_noise(session, result, batch.interval.num_samples)
        if (measured := session.probe.end_step(session.replica)) is not None:
            session.log_event(measured)
        if do_after_step(session, stop=result.stop):
            return training.is_over
        if session.member is not None and session.member.change_is_pending():
            session.membership.request_stop(CHANGE)
        maybe_grow(session)
        take_new_shards(session)
        log_batch_change(session)
        session.step_began_s = time.perf_counter()
    raise AssertionError("a loader never ends")


def _run_at_own_pace(session: Session, dispatcher: SampleDispatcher) -> bool:
    """Let each worker claim samples at its own pace; all synchronise to evaluate, to save and at the end.

    A step is done when a global batch of samples is, on any workers.
    """
    training, run, loader, group = session.training, session.training.run, session.loader, session.replica.group
    began_at = loader.position - training.num_samples
    while True:
        take_new_shards(session, is_due=True)
        boundary = min(next_boundary(session, training.step), session.budget.next_step or training.num_steps)
        dispatcher.set_boundary(loader.order.position_of(boundary, run.global_batch))
        for batch in loader:
            try:
                result = train_step(session, batch, loader.order.step_of(batch.interval.start, run.global_batch))
            except CommunicationError:
                loader.in_hand = None  # or leaving the loop would count it as used
                raise
            if result is None:
                continue
            training.step = loader.order.step_of(batch.interval.stop, run.global_batch)
            log_step(session, result, batch.interval.num_samples)
            log_bad_samples(session)
            if session.member is not None and session.member.change_is_pending():
                session.membership.request_stop(CHANGE)
            session.step_began_s = time.perf_counter()
        if (lost := dispatcher.lost) is not None:
            raise lost
        position = group.gather_documents(loader.position, name="position")[0]
        loader.set_used([(0, position)])
        training.num_samples = position - began_at
        training.step = loader.order.step_of(position, run.global_batch)
        if do_after_step(session, stop=dispatcher.is_stopping):
            break
    return training.is_over


def _finish(session: Session) -> bool:
    """Evaluate the trained model and log that the run is done; False if a signal arrived meanwhile."""
    training = session.training
    duration_s = time.perf_counter() - training.began_s if training.began_s else 0.0
    held_out = training.splits.held_out
    evaluation = training.evaluation if training.evaluated_step == training.step else None
    if held_out is not None and evaluation is None:
        evaluation = evaluate_held_out(session, held_out)
    if training.best.is_kept and training.best.step == training.step and session.replica.shard.world.rank == 0:
        training.store.mark_best(training.store.list_checkpoints()[0])  # also if it was saved before it was evaluated
    if evaluation is None and held_out is not None:
        newest = training.store.list_checkpoints()[0]
        session.log_event(
            Preempted(checkpoint=str(newest), signal=session.membership.stop_requested_by or "a signal to another rank")
        )
        return False
    shard = session.replica.shard
    with shard.replicated_inputs() as can_run:
        if can_run and (shard.world.rank == 0 or not shard.is_whole) and isinstance(held_out, Source):
            text = training.run.loss.showcase(session.replica.module, held_out)
            if text:
                session.log_event(Showcased(text=text))
    session.log_event(
        RunFinished(
            held_out_loss=evaluation.loss if evaluation is not None else None,
            metrics=evaluation.metrics if evaluation is not None else {},
            duration_s=duration_s,
            samples_per_s=training.num_samples / duration_s if duration_s else 0.0,
        )
    )
    return True


@contextmanager
def _explaining(session: Session) -> Iterator[None]:
    """Name the rank that lost others, where torch connects ranks of a layout; find ranks that ran other operations."""
    training = session.training
    try:
        yield
    except (RuntimeError, CommunicationError) as error:
        mesh = session.replica.shard.mesh
        if mesh is None or not (isinstance(error, CommunicationError) or is_lost_peer(error)):
            raise
        lost = f"rank {mesh.world.rank} of {mesh.world.size} lost others of its layout after step {training.step}"
        raise explain_failure(error, mesh, lost) from error


def train_step(session: Session, batch: Batch, step: int) -> StepResult | None:
    """Train on a micro-batch of `step`, and return the update's result if it was the step's last."""
    training, run, replica = session.training, session.training.run, session.replica
    # Each micro-batch has its own random stream, which needs no state to resume.
    if batch.virtual_worker is None:  # else the loader has seeded it
        stream = (step, *replica.shard.random_stream) if replica.dispatcher is None else batch.interval
        torch.manual_seed(derive_seed(run.seed, *stream, session.num_micro_batches) >> 1)
    session.num_micro_batches += 1
    if batch.last:
        session.rates.set(step, session.loader.batch_at(batch.interval.start))  # coded steps use them in backward
    with session.load_balancer.computing(batch.num_samples), replica.shard.forward_context():
        if replica.shard.pipeline is not None:
            timed = run.timeline_interval > 0 and batch.last and (training.step + 1) % run.timeline_interval == 0
            replica.backward_through(batch, run.loss.loss_of_output, last=batch.last, timed=timed)
        else:
            loss = run.loss.loss(replica, batch)
            mean = loss.mean + balance_loss(replica.module) if training.has_experts else loss.mean
            if session.noise is not None:
                session.noise.watch(mean, batch.num_samples)
            replica.backward(mean, weight=loss.weight, last=batch.last)
    if not batch.last:
        return None
    session.num_micro_batches = 0
    result = guarded_step.update(session, batch)
    session.loader.ack(batch)
    training.num_samples += batch.interval.num_samples
    return result


def measure_noise(session: Session, result: StepResult, num_samples: int) -> None:
    """Measure the gradient noise of a step of `num_samples`, and adapt the batch if its schedule follows noise."""
    training, run, loader = session.training, session.training.run, session.loader
    measured = session.noise.end_step(training.step, result, num_samples) if session.noise is not None else None
    if measured is None:
        return
    session.log_event(measured)
    if isinstance(run.batch_schedule, NoiseScaleBatch):
        chosen = run.batch_schedule.choose(measured.noise_scale, loader.newest_batch, run.global_batch)
        if chosen != loader.newest_batch:
            loader.change_batch(chosen)


def log_batch_change(session: Session) -> None:
    """Log the global batch of the next step, if it changes."""
    batch = session.loader.global_batch
    if batch != session.global_batch:
        session.global_batch = batch
        session.log_event(describe_batch(session))


def maybe_grow(session: Session) -> None:
    """Replace the replica by one of a deeper or wider model, if the next step is a growth step. All workers call it.

    Raises:
        SettingsError: The model is already larger than it should be, since the run that saved it grew earlier.
    """
    training, run, old = session.training, session.training.run, session.replica
    present, size = size_of(training.model), run.growth.size_at(training.step, size_of(run.model))
    if not run.growth.steps or size == present:
        return
    if any(after is not None and after < (before or 0) for before, after in zip(present, size, strict=True)):
        raise SettingsError(
            f"a model must not become shallower or narrower, but it has {describe_size(*present)} and growth gives it "
            f"{describe_size(*size)} at step {training.step}; resume with the growth that the run was started with"
        )
    depth, width = training.model.layer_stack, training.model.unit_width
    state, feedback = old.state.document(), old.state.feedback()
    old.close()
    training.model = resize(training.model, size)
    module = build_model(run, training.splits, old.shard.world, training.model)
    training.num_parameters = count_parameters(module)
    training.module, training.optimizer = prepare(run, module, training.splits, old.shard.world)
    new = build_replica(training, old.shard.world)
    if size.num_layers != present.num_layers:
        assert depth is not None
        grow_module(old.module, new.module, depth, run.growth.method)
        grow_optimizer((old.module, old.optimizer), (new.module, new.optimizer), depth, run.growth.method)
    if size.width != present.width:
        assert width is not None
        widen_module(old.module, new.module, width, seed=run.seed + training.step)
        widen_optimizer((old.module, old.optimizer), (new.module, new.optimizer))
    new.state.load_document(state)
    if feedback:
        new.state.load_feedback([feedback if rank == new.group.rank else {} for rank in range(new.group.size)])
    session.replica = new
    watch_replica(session)
    session.rates = make_rates(training, new, session.rates)
    if session.noise is not None:
        session.noise.use(new.module)
    session.log_event(
        ModelGrown(
            num_layers=size.num_layers,
            width=size.width,
            num_parameters=training.num_parameters,
            method="widen" if run.growth.widths else run.growth.method,
        )
    )


def next_boundary(session: Session, step: int) -> int:
    """Return the first step after `step` at whose end all workers synchronise."""
    training, run = session.training, session.training.run
    intervals = [interval for interval in (run.evaluate_interval, run.peer_memory.interval) if interval]
    boundaries = [(step // interval + 1) * interval for interval in intervals] + [training.num_steps]
    return min([*boundaries, session.save_interval.next_after(step) or training.num_steps])


def do_after_step(session: Session, *, stop: bool) -> bool:
    """Evaluate and save if they are due, and save if a worker was asked to `stop`; return whether steps end here.

    A stop comes before an evaluation, or breaks it off on all workers: the checkpoint says that it is still due, and
    whoever resumes evaluates before the next step.
    """
    training = session.training
    run, step = training.run, training.step
    is_spent = _is_budget_spent(session)
    stop |= is_spent
    if next_boundary(session, step - 1) == step:
        log_delays(session)
        log_routing(session)
        log_stores(session)
    is_last = step == training.num_steps
    if is_evaluation_due(training) and (is_last or not stop):
        assert training.splits.held_out is not None
        stop |= evaluate_held_out(session, training.splits.held_out) is None
    is_best = training.best.is_kept and training.best.step == step
    end_reason = "" if is_last else training.best.end_reason
    training.is_over = is_last or bool(end_reason)
    if stop and not is_last:
        cause = "budget" if is_spent else _agree_on_cause(session)
        if cause == "change":
            session.replica.state.part()
            session.is_changing = True
            return True
        path = save_checkpoint(session, wait=True)
        if cause == "signal":
            session.log_event(
                Preempted(checkpoint=path, signal=session.membership.stop_requested_by or "a signal to another rank")
            )
        if cause == "budget":
            _log_spent(session, path)
    elif training.is_over or is_best or session.save_interval.is_due(step):
        save_checkpoint(session, wait=training.is_over, is_best=is_best)
        if end_reason:
            session.log_event(StoppedEarly(reason=end_reason))
    else:
        if session.saver is not None:
            log_saved(session, session.saver.finished())
        if session.peer_memory is not None and step % run.peer_memory.interval == 0:
            keep_in_memory(session)
    log_distance(session)
    return training.is_over or stop


def _is_budget_spent(session: Session) -> bool:
    """Return whether the budget does not pay for another step, at steps on which all workers agree, and warn before."""
    training, budget = session.training, session.budget
    verdict = budget.check(training.step, training.num_steps, session.replica.shard.world)
    for message in verdict.warnings:
        session.log_event(Warned(message=message))
    return bool(verdict.reached)


def _log_spent(session: Session, path: str) -> None:
    """Log that the budget ended the training, and was saved."""
    found = session.budget.verdict
    session.log_event(
        BudgetSpent(checkpoint=path, name=found.reached, spent=found.spent, limit=found.limit, unit=found.unit)
    )
    session.training.over_budget = f"{found.spent:.4g} of {found.limit:.4g} {found.unit} are spent"


def _agree_on_cause(session: Session) -> Literal["signal", "end", "change"]:
    """Return why all workers stop: a signal, code of the training's own, which ends it, or workers that change."""
    training, membership, mine = session.training, session.membership, session.training.end_reason
    reported = {"end": mine, "cause": membership.stop_requested_by if membership.stop_requested_by != mine else ""}
    everybody = session.replica.shard.world.gather_documents(reported, name="why to stop")
    if any(theirs["cause"] not in ("", CHANGE) for theirs in everybody):
        return "signal"
    reason = next((theirs["end"] for theirs in everybody if theirs["end"]), "")
    if not reason:
        return "change" if any(theirs["cause"] for theirs in everybody) else "signal"
    training.is_over, membership.stop_requested_by, membership.is_stopping = True, "", False
    session.log_event(StoppedEarly(reason=reason))
    return "end"
