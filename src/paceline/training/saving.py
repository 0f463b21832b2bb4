"""Saving a training: at a step of all its workers, or what is left when one of them is lost."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from paceline.comm.progress import BETWEEN, PROGRESS
from paceline.errors import CommunicationError, NonFiniteError, PacelineError
from paceline.monitor.events import StateCopied
from paceline.parallel.local import local
from paceline.replica.gathering import divide
from paceline.replica.named_tensors import capture_objects
from paceline.replica.shared_saving import start_saving
from paceline.replica.state import describe
from paceline.replica.survivors import can_stand_alone, stand_alone
from paceline.training.log_events import log_saved
from paceline.training.model import size_of
from paceline.training.session import Session
from paceline.training.training import Training


def save_checkpoint(session: Session, *, wait: bool, is_best: bool = False, lost_ranks: Sequence[int] = ()) -> str:
    """Start a checkpoint of the state after `training.step` updates, and with `wait` finish it.

    Args:
        session: Session of workers that are at the same step, or of the one that stands for all.
        wait: Whether to wait until it is on disk.
        is_best: Whether the model is the best so far.
        lost_ranks: Ranks whose last work is not in it.
    """
    training, world, began_s = session.training, session.replica.shard.world, time.perf_counter()
    tensors, document = _describe(session, lost_ranks)
    path, write_s = "", 0.0
    start_saving(session.saver, tensors, document, training.step, world, is_best=is_best)
    if session.saver is not None:
        finished = session.saver.finished()
        write_s = max([one.duration_s for one in finished], default=0.0)
        log_saved(session, finished)
        if wait and (saved := session.saver.wait()):
            log_saved(session, [saved], lost_ranks)
            path = str(saved.path)
    if session.save_interval.is_chosen and not wait:
        _choose_interval(session, time.perf_counter() - began_s, write_s)
    if wait:
        world.barrier(name="checkpoint")
    PROGRESS.enter(time.monotonic(), BETWEEN)
    return path


def keep_in_memory(session: Session) -> None:
    """Copy the state after `training.step` updates into the memory of peers; all ranks call it."""
    assert session.peer_memory is not None, "the run keeps copies"
    training, world, began_s = session.training, session.replica.shard.world, time.perf_counter()
    tensors, document = _describe(session)
    copy = session.peer_memory.keep(divide(tensors, world), document, training.step, world)
    sizes = world.gather_documents([copy.part_bytes, copy.memory_bytes], name="sizes of the state")
    part_bytes, memory_bytes = max(sizes)
    duration_s = time.perf_counter() - began_s
    session.log_event(StateCopied(part_bytes=part_bytes, memory_bytes=memory_bytes, duration_s=duration_s))
    PROGRESS.enter(time.monotonic(), BETWEEN)


def _choose_interval(session: Session, save_s: float, write_s: float) -> None:
    """Choose the step of the next checkpoint by rank 0's measurements of this one."""
    step, world = session.training.step, session.replica.shard.world
    mine = [session.save_interval.choose(step, save_s, write_s), save_s]
    interval, save_s = world.gather_documents(mine, name="checkpoint interval")[0]
    if (chosen := session.save_interval.follow(step, interval, save_s)) is not None:
        session.log_event(chosen)


def _describe(session: Session, lost_ranks: Sequence[int] = ()) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return this rank's tensors of the state of the training, and its document; all ranks call it.

    Raises:
        NonFiniteError: A parameter is not finite, or a buffer.
    """
    training, replica = session.training, session.replica
    PROGRESS.enter(time.monotonic(), b"save")
    replica.flush()
    for name, parameter in replica.module.named_parameters():
        if not torch.isfinite(local(parameter)).all():
            raise NonFiniteError(
                f"parameters must be finite to be saved, but at step {training.step} {name} is not; resume from the "
                "checkpoint before with a lower learning rate, or with clip_norm, which finds the step at once"
            )
    if spoilt := replica.state.find_spoilt_buffer():
        raise NonFiniteError(
            f"buffers must be finite to be saved, but at step {training.step} {spoilt} is not; look for bad samples "
            "whose loss is finite all the same, such as NaN under a mask, and resume from the checkpoint before"
        )
    tensors, document = describe(replica)
    more, progress = capture_progress(session)
    tensors |= more if replica.shard.world.rank == 0 else {}
    document |= progress | {
        "noise": session.noise.state() if session.noise is not None else None,
        "lost_ranks": list(lost_ranks),
    }
    return tensors, document


def capture_progress(session: Session) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the document of what a checkpoint holds beside the replica; nothing is exchanged."""
    training = session.training
    tensors, objects = capture_objects({"rates": session.rates})
    return tensors, objects | {
        "step": training.step,
        "recipe": training.recipe,
        "run": training.run.model_dump(mode="json"),
        "spec": asdict(training.splits.train.spec),
        "loader": session.loader.state_dict(),
        "best": training.best.state(),
        "anomalies": session.guard.state(),
        "is_evaluation_due": is_evaluation_due(training),
        **size_of(training.model)._asdict(),
    }


def save_what_lives(session: Session, error: CommunicationError) -> None:
    """Save what servers and living workers have learnt, if a worker that goes at its own pace is lost.

    Each living worker calls it when it has stopped. The checkpoint is one of the first worker alone, and names the
    ranks that are lost: samples that they had not finished will be used again. If the first worker or a server is lost,
    nothing is saved.

    Args:
        session: Session of the workers.
        error: Error that stopped this one.
    """
    training, loader = session.training, session.loader
    if not can_stand_alone(session.replica):
        return
    loader.in_hand = None  # its step did not end
    try:
        found = stand_alone(session.replica)
        if found is None:
            return
        if found.num_steps:
            loader.set_progress(found.num_steps)
            training.step = min(found.num_steps.values())
        else:
            training.step = loader.order.step_of(loader.position, training.run.global_batch)
        save_checkpoint(session, wait=True, lost_ranks=found.lost_ranks)
    except PacelineError as other:
        if str(other) != str(error):
            error.add_note(f"Nothing of what living workers know could be saved: {other}")


def is_save_missing(training: Training) -> bool:
    """Return whether workers were lost after a step that is to be saved, and before they began to save it."""
    run, step = training.run, training.step
    interval = run.checkpoint_interval if run.checkpoint_interval != "auto" else 0
    is_due = training.is_over or bool(interval and step % interval == 0)
    return training.outlives_workers and step > 0 and is_due and 0 <= training.saved_step != step


def is_evaluation_due(training: Training) -> bool:
    """Return whether the parameters after the present step are to be evaluated, and are not yet."""
    run, step = training.run, training.step
    if training.splits.held_out is None or step == training.evaluated_step:
        return False
    if step == training.num_steps:
        return training.best.is_used
    return run.evaluate_interval > 0 and step % run.evaluate_interval == 0
