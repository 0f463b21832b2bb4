"""Settings that never act, or hardly, in a run of so many steps: a person who gave them wants to know before it."""

from collections.abc import Iterator, Sequence

from torch import Size

from paceline.schedules.batch_size import GrowingBatch, NoiseScaleBatch, SteppedBatch
from paceline.schedules.learning_rate import DecaySchedule
from paceline.sync.diloco import DiLoCo
from paceline.sync.idle import find_idle_codec, find_idleness
from paceline.training.run import Run

_LEAST_ROUNDS = 25
"""Rounds that DiLoCo should have: over a third of them its outer momentum rises, and has its full value after that."""
_LEAST_PERIOD = 4
"""Period from which on DiLoCo sends so much less than every_step that stepping alone may pay."""


def list_idle(run: Run, num_steps: int, shapes: Sequence[Size], num_workers: int) -> Iterator[str]:
    """Yield a sentence for each setting that does not do in `num_steps` what it is for.

    Args:
        run: The run.
        num_steps: Number of updates of the whole run.
        shapes: Shapes of the parameters.
        num_workers: Number of workers.
    """
    if num_workers > 1:
        yield from _list_idle_rule(run, num_steps, shapes, num_workers)
    if isinstance(run.schedule, DecaySchedule) and run.schedule.warmup_steps >= num_steps:
        yield (
            f"the learning rate only rises: its warm-up takes {run.schedule.warmup_steps} steps, the run {num_steps}; "
            "lower --schedule.warmup_steps"
        )
    yield from _list_idle_batch(run, num_steps)
    if late := [step for step in run.growth.steps if step >= num_steps]:
        yield f"the model does not grow at step {late[0]}: the run ends after {num_steps}; lower --growth.steps"


def _list_idle_batch(run: Run, num_steps: int) -> Iterator[str]:
    schedule, first = run.batch_schedule, run.global_batch
    if isinstance(schedule, SteppedBatch):
        if late := [step for step, _ in schedule.steps if step >= num_steps]:
            yield f"the batch does not change at step {late[0]}: the run ends after {num_steps}; lower its step"
        if not schedule.steps:
            yield "batch_schedule stepped never changes the batch, since it has no steps; give --batch_schedule.steps"
    elif isinstance(schedule, GrowingBatch | NoiseScaleBatch):
        if schedule.interval >= num_steps:
            yield (
                f"batch_schedule {schedule.name} never changes the batch: its interval is {schedule.interval} steps, "
                f"the run {num_steps}; lower --batch_schedule.interval"
            )
        elif isinstance(schedule, GrowingBatch) and not schedule.plan(first, num_steps):
            yield (
                f"batch_schedule growing never changes the batch of {first}: its factor is {schedule.factor:g} and "
                f"max_batch {schedule.max_batch}; raise one of them"
            )
        elif isinstance(schedule, NoiseScaleBatch) and schedule.smallest(first) == schedule.max_batch:
            yield (
                f"batch_schedule noise_scale never changes the batch of {first}, since it is the smallest and the "
                "largest; raise --batch_schedule.max_batch"
            )


def _list_idle_rule(run: Run, num_steps: int, shapes: Sequence[Size], num_workers: int) -> Iterator[str]:
    if (codec := find_idle_codec(run.sync, shapes, num_workers)) is not None:
        yield f"{codec.reason}; lower --sync.{codec.field}, or take another codec"
    if (idleness := find_idleness(run.sync, num_steps, shapes, num_workers)) is not None:
        yield f"{idleness.reason}; lower --sync.{idleness.field}"
    elif isinstance(run.sync, DiLoCo):
        yield from _list_idle_momentum(run.sync, num_steps)


def _list_idle_momentum(rule: DiLoCo, num_steps: int) -> Iterator[str]:
    alone = num_steps - rule.synchronous_steps
    num_rounds, fitting_period = alone // rule.period, alone // _LEAST_ROUNDS
    if num_rounds < _LEAST_ROUNDS:
        advice = (
            f"take --sync.period {fitting_period}"
            if fitting_period >= _LEAST_PERIOD
            else f"take --sync every_step, or at least {_LEAST_ROUNDS * _LEAST_PERIOD + rule.synchronous_steps} steps "
            f"with --sync.period {_LEAST_PERIOD}"
        )
        yield (
            f"sync {rule.name} has {num_rounds} rounds in {num_steps} steps, and wants {_LEAST_ROUNDS} for its outer "
            f"momentum to help; {advice}"
        )
    if (rule.outer_momentum_warmup or 0) > num_rounds:
        yield (
            f"the outer momentum only rises: its warm-up takes {rule.outer_momentum_warmup} rounds, the run has "
            f"{num_rounds}; lower --sync.outer_momentum_warmup, or leave it out"
        )
