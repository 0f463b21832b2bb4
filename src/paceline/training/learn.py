"""Learning from one batch."""

import torch
from torch import Tensor

from paceline.data import Batch, derive_seed
from paceline.replica.replica import LossOfPart
from paceline.replica.step_result import StepResult
from paceline.training.objective import Objective
from paceline.training.training import Training


def learn(training: Training, batch: Batch, step: int) -> StepResult | None:
    """Learn from a micro-batch of `step`, and return what the update did if it was the step's last."""
    run, replica = training.run, training.replica
    # Each micro-batch has a random stream of its own, which needs no state to resume.
    stream = (step, *replica.part.stream) if replica.desk is None else batch.interval
    torch.manual_seed(derive_seed(run.seed, *stream, training.num_micro_batches) >> 1)
    training.num_micro_batches += 1
    batch = replica.part.cut(batch)
    with training.pacing.computing(batch.num_samples), replica.part.computing():
        if replica.part.pipeline is not None:
            loss_of = chunk_loss(run.objective, batch)
            timed = run.timeline_interval > 0 and batch.last and (training.step + 1) % run.timeline_interval == 0
            replica.backward_through(batch.inputs, batch.targets, loss_of, last=batch.last, timed=timed)
        else:
            loss = run.objective.loss(replica, batch)
            if training.noise is not None:
                training.noise.watch(loss.mean, batch.num_samples)
            replica.backward(loss.mean, weight=loss.weight, last=batch.last)
    if not batch.last:
        return None
    training.num_micro_batches = 0
    rate = run.optimizer.rate(training.loader.batch_at(batch.interval.start))
    for group in replica.optimizer.param_groups:
        group["lr"] = rate * run.schedule.factor(step, run.num_steps)
    result = replica.update()
    training.loader.ack(batch)
    training.num_samples += batch.interval.num_samples
    return result


def chunk_loss(objective: Objective, batch: Batch) -> LossOfPart:
    """Return what makes mean loss and weight of a part of a batch, from its outputs and targets."""

    def loss_of(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        num_samples = min(len(targets), batch.num_samples)  # a borrowed sample counts for nothing
        loss = objective.loss(lambda _: output, Batch(targets, targets, num_samples, batch.interval))
        return loss.mean, loss.weight

    return loss_of
