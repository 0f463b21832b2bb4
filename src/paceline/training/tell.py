"""What a training tells the log."""

import time
import traceback

from paceline.checkpoint import SavedCheckpoint
from paceline.monitor.events import CheckpointSaved, Failed, StalenessMeasured, StepFinished, UnusedParameters
from paceline.monitor.log import EventLog
from paceline.monitor.user_code import find_user_line
from paceline.training.step_result import StepResult
from paceline.training.timeline import tell_timeline
from paceline.training.training import Training


def tell_failure(log: EventLog, error: BaseException, step: int = -1) -> None:
    """Write to the log how this worker failed; step -1 is before the first."""
    trace = "".join(traceback.format_exception(error))
    place = find_user_line(error)
    log.write(Failed(error=type(error).__name__, message=str(error), traceback=trace, place=place), step=step)


def tell_step(training: Training, result: StepResult, num_samples: int) -> None:
    """Write what a step of `num_samples` did."""
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
        pipeline = training.replica.part.pipeline
        if pipeline is not None and pipeline.times is not None:
            training.log.write(pipeline.times.tell(), step=training.step)
    if result.newly_unused:
        training.tell(UnusedParameters(names=result.newly_unused))


def tell_delays(training: Training) -> None:
    """Write how stale what was pushed to servers has been."""
    delays = training.replica.count_delays() if training.replica.group.rank == 0 else None
    if delays is not None:
        ages, counts = zip(*sorted(delays.counts.items()), strict=True) if delays.counts else ((), ())
        training.tell(StalenessMeasured(delays=list(ages), counts=list(counts), num_dropped=delays.num_dropped))


def tell_saved(training: Training, saved: list[SavedCheckpoint]) -> None:
    """Write which checkpoints are whole by now."""
    for checkpoint in saved:
        training.tell(
            CheckpointSaved(path=str(checkpoint.path), num_bytes=checkpoint.num_bytes, duration_s=checkpoint.duration_s)
        )
