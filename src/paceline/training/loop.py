"""Training from the first step, or the newest checkpoint, to the last."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from paceline.comm.group import Group
from paceline.comm.torch_group import tells_of_lost_peer
from paceline.errors import CommunicationError
from paceline.monitor.events import Preempted, RunFinished, Showcased
from paceline.monitor.log import EventLog
from paceline.sync.synchroniser import Desk, Site
from paceline.training.after_step import do_after_step, evaluate_held_out, next_meeting
from paceline.training.batch import measure_noise, tell_batch
from paceline.training.grow import grow_if_due
from paceline.training.learn import learn
from paceline.training.run import Run
from paceline.training.tell import tell_failure, tell_step
from paceline.training.training import Training, build_model, set_up


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
        with _stop_on_signal(training), training.saver or nullcontext(), _explaining(training):
            is_done = _run_steps(training) and _finish(training)
        training.replica.close()
        return is_done
    except (Exception, SystemExit) as error:  # code of the user's may call sys.exit
        tell_failure(log, error, step=training.step if training else -1)
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
        module = build_model(run, run.data.open(), world)
        optimizer = run.optimizer.build(module)
        num_workers = world.size - run.sync.num_server_processes
        run.sync.serve(Site(module, optimizer, world, run.seed, world), num_workers)
    except (Exception, SystemExit) as error:
        tell_failure(log, error)
        raise


def _run_steps(training: Training) -> bool:
    """Run steps to the last one; return False if a signal ended it before."""
    run = training.run
    if training.step >= run.num_steps:
        return True
    training.began_s = training.step_began_s = time.perf_counter()
    if training.replica.desk is not None:
        return _run_at_own_pace(training, training.replica.desk)
    grow_if_due(training)
    for batch in training.loader:
        with training.probe.watching(training.replica, batch):
            result = learn(training, batch, training.step)
        if result is None:
            continue
        training.step += 1
        tell_step(training, result, batch.interval.num_samples)
        for event in training.pacing.end_step(training.step, result.times):
            training.tell(event)
        measure_noise(training, result, batch.interval.num_samples)
        if (measured := training.probe.end_step(training.replica)) is not None:
            training.tell(measured)
        do_after_step(training, stop=result.stop)
        if result.stop and training.step < run.num_steps:
            return False
        if training.step == run.num_steps:
            return True
        grow_if_due(training)
        tell_batch(training)
        training.step_began_s = time.perf_counter()
    raise AssertionError("a loader never ends")


def _run_at_own_pace(training: Training, desk: Desk) -> bool:
    """Let each worker take what nobody has; all come together to evaluate, to save and at the end.

    A step is done when a global batch of samples is, by whomever.
    """
    run, loader, group = training.run, training.loader, training.replica.group
    began_at = loader.position
    while training.step < run.num_steps:
        desk.set_boundary(loader.order.position_of(next_meeting(run, training.step), run.global_batch))
        for batch in loader:
            result = learn(training, batch, loader.order.step_of(batch.interval.start, run.global_batch))
            if result is None:
                continue
            training.step = loader.order.step_of(batch.interval.stop, run.global_batch)
            tell_step(training, result, batch.interval.num_samples)
            training.step_began_s = time.perf_counter()
        position = group.gather_documents(loader.position, name="position")[0]
        loader.move_to(position)
        training.num_samples = position - began_at
        training.step = loader.order.step_of(position, run.global_batch)
        stop = desk.is_stopping
        do_after_step(training, stop=stop)
        if stop and training.step < run.num_steps:
            return False
    return True


def _finish(training: Training) -> bool:
    """Evaluate the trained model and say that the run is done; False if a signal came meanwhile."""
    duration_s = time.perf_counter() - training.began_s if training.began_s else 0.0
    evaluation = evaluate_held_out(training)
    if evaluation is None:
        newest = training.store.list_checkpoints()[0]
        training.tell(Preempted(checkpoint=str(newest), signal=training.stopped_by or "a signal to another rank"))
        return False
    part = training.replica.part
    with part.running_alike() as can_run:
        if can_run and (part.world.rank == 0 or not part.is_whole):
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
def _explaining(training: Training) -> Iterator[None]:
    """Say which rank lost others where torch, not a group of ours, carries what the ranks of a layout exchange."""
    try:
        yield
    except RuntimeError as error:
        if training.run.layout.is_plain or not tells_of_lost_peer(error):
            raise
        world = training.replica.part.world
        raise CommunicationError(
            f"rank {world.rank} of {world.size} lost others of its layout after step {training.step}: "
            f"{str(error).splitlines()[0]}"
        ) from error


@contextmanager
def _stop_on_signal(training: Training) -> Iterator[None]:
    """Turn SIGTERM, SIGINT and SIGHUP into a request to stop after the step under way. Threads cannot; they do not.

    SIGHUP stays ignored where it was, as under `nohup`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        training.stopped_by = signal.Signals(number).name
        training.replica.request_stop()

    previous = {
        number: signal.signal(number, stop)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
