"""What is done between steps: evaluate, save, stop."""

import torch

from paceline.errors import NonFiniteError
from paceline.monitor.events import Evaluated, Preempted
from paceline.parallel.local import local
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.run import Run
from paceline.training.state import capture
from paceline.training.tell import tell_delays, tell_saved
from paceline.training.training import Training


def next_meeting(run: Run, step: int) -> int:
    """Return the first step after `step` at whose end all workers come together."""
    intervals = [interval for interval in (run.evaluate_interval, run.checkpoint_interval) if interval]
    return min([(step // interval + 1) * interval for interval in intervals] + [run.num_steps])


def do_after_step(training: Training, *, stop: bool) -> None:
    """Evaluate and save where it is time, and save where some worker was asked to `stop`."""
    run, step = training.run, training.step
    if next_meeting(run, step - 1) == step:
        tell_delays(training)
    is_last = step == run.num_steps
    if run.evaluate_interval and step % run.evaluate_interval == 0 and not is_last and not stop:
        evaluate_held_out(training)
    if stop and not is_last:
        path = save_checkpoint(training, wait=True)
        training.tell(Preempted(checkpoint=path, signal=training.stopped_by or "a signal to another rank"))
    elif is_last or (run.checkpoint_interval and step % run.checkpoint_interval == 0):
        save_checkpoint(training, wait=is_last)
    elif training.saver is not None:
        tell_saved(training, training.saver.finished())


def save_checkpoint(training: Training, *, wait: bool) -> str:
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
    document |= {
        "step": training.step,
        "recipe": training.recipe,
        "run": training.run.model_dump(mode="json"),
        "loader": training.loader.state_dict(),
        "num_layers": depth.num_layers if (depth := training.model.layer_stack) is not None else None,
        "noise": training.noise.state() if training.noise is not None else None,
    }
    path = ""
    if training.saver is not None:
        training.saver.start(tensors, document, training.step)
        tell_saved(training, training.saver.finished())
        if wait and (saved := training.saver.wait()):
            tell_saved(training, [saved])
            path = str(saved.path)
    if wait:
        replica.part.world.barrier(name="checkpoint")
    return path


def evaluate_held_out(training: Training) -> Evaluation | None:
    """Evaluate; None if a signal came meanwhile."""
    run = training.run
    training.replica.flush()
    evaluation = evaluate(
        training.replica,
        run.objective,
        training.splits.held_out,
        batch_size=max(1, run.global_batch // training.replica.part.readers.size // run.num_micro_batches),
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
