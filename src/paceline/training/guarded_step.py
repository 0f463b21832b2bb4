"""The update of a run's step, and what is done where an anomaly refuses it: skip it, go back, or end."""

from paceline.data import Batch
from paceline.errors import CheckpointError, NonFiniteError, SpikeError
from paceline.monitor.events import CheckpointSkipped, RolledBack
from paceline.replica.step_result import StepResult
from paceline.training.log_events import log_saved
from paceline.training.session import Session, resume


class GoingBack(Exception):  # noqa: N818 - no error: it leaves the loop over batches
    """Training goes back to its last checkpoint."""


def update(session: Session, batch: Batch) -> StepResult:
    """Make the update of the step that ends with `batch`, or skip it on all workers.

    Raises:
        GoingBack: All workers go back; call `go_back` outside of the loop over batches.
        NonFiniteError: A loss or gradient is not finite, and the run is to end.
        SpikeError: A loss or gradient norm is far above those before, and the run is to end.
    """
    replica, guard, step = session.replica, session.guard, session.training.step
    guard.begin(step)
    try:
        result = replica.update()
    except (NonFiniteError, SpikeError) as error:
        reaction = guard.choose_reaction(error)
        for found in guard.found:
            session.log_event(found)
        if reaction == "stop" or not replica.is_between_steps:  # others may be out of step
            raise
        replica.state.skip_update()
        if reaction == "roll_back":
            raise GoingBack from error
        return guard.skipped(float(batch.interval.num_samples))
    for found in guard.end():
        session.log_event(found)
    return result


def go_back(session: Session, cause: Exception | None) -> None:
    """Go back to the newest whole checkpoint; every worker calls it.

    Raises:
        CheckpointError: There is none; the anomaly is its cause.
    """
    training, loader = session.training, session.loader
    loader.in_hand = None  # its step did not end
    from_step, world = training.step, session.replica.shard.world
    if session.saver is not None and (saved := session.saver.wait()):
        log_saved(session, [saved])
    world.barrier(name="checkpoint to go back to")
    checkpoint = None
    if world.rank == 0:
        checkpoint = training.store.find_newest_valid(
            lambda path, reason: session.log_event(CheckpointSkipped(path=str(path), reason=reason))
        )
    if not resume(session, checkpoint):
        raise CheckpointError(
            "there must be a checkpoint to go back to after an anomaly, but none is whole; save more often "
            "(--checkpoint_interval), or let the update be skipped"
        ) from cause
    session.num_micro_batches = 0
    skipped = sorted(step for step in session.guard.skipped_steps if training.step <= step <= from_step)
    session.log_event(RolledBack(checkpoint=training.resumed_from or "", from_step=from_step, skipped_steps=skipped))
