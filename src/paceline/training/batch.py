"""The global batch of a training, as it changes."""

from paceline.monitor.events import BatchChanged
from paceline.replica.step_result import StepResult
from paceline.schedules import NoiseScaleBatch
from paceline.training.training import Training


def measure_noise(training: Training, result: StepResult, num_samples: int) -> None:
    """Measure the gradient noise of a step of `num_samples`, and let the batch follow it where it does."""
    run, loader = training.run, training.loader
    measured = training.noise.end_step(training.step, result, num_samples) if training.noise is not None else None
    if measured is None:
        return
    training.tell(measured)
    if isinstance(run.batch_schedule, NoiseScaleBatch):
        chosen = run.batch_schedule.choose(measured.noise_scale, loader.newest_batch, run.global_batch)
        if chosen != loader.newest_batch:
            loader.change_batch(chosen)


def tell_batch(training: Training) -> None:
    """Tell of another global batch, where the step to come has one."""
    batch = training.loader.global_batch
    if batch != training.global_batch:
        training.global_batch = batch
        training.tell(BatchChanged(global_batch=batch, start=training.loader.position))
