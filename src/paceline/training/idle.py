"""Settings that never act, or hardly, in a run of so many steps: a person who gave them wants to know before it."""

from collections.abc import Iterator, Sequence

from torch import Size

from paceline.schedules.learning_rate import DecaySchedule
from paceline.sync.diloco import DiLoCo
from paceline.training.run import Run

_LEAST_ROUNDS = 25
"""Rounds that DiLoCo should have: over a third of them its outer momentum rises, and has its full value after that."""


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
    if late := [step for step in run.growth.steps if step >= num_steps]:
        yield f"the model does not grow at step {late[0]}: the run ends after {num_steps}; lower --growth.steps"


def _list_idle_rule(run: Run, num_steps: int, shapes: Sequence[Size], num_workers: int) -> Iterator[str]:
    rule = run.sync
    traffic = rule.traffic(shapes, num_workers)
    period = max((each.period for each in traffic), default=1)
    if traffic and all(each.count(num_steps) < 1 for each in traffic):
        yield (
            f"sync {rule.name} exchanges nothing in {num_steps} steps, since its period is {period}, so that each "
            "worker trains alone; lower --sync.period"
        )
    elif late := [each.first_step for each in traffic if each.first_step >= num_steps]:
        field = "synchronous_steps" if "synchronous_steps" in type(rule).model_fields else "dense_steps"
        yield (
            f"sync {rule.name} is every_step without a codec for the whole run of {num_steps} steps, since it begins "
            f"with step {min(late)}; lower --sync.{field}"
        )
    elif isinstance(rule, DiLoCo) and (num_rounds := (num_steps - rule.synchronous_steps) // period) < _LEAST_ROUNDS:
        yield (
            f"sync {rule.name} has {num_rounds} rounds in {num_steps} steps, and wants {_LEAST_ROUNDS} for its outer "
            f"momentum to help; take --sync.period {max(1, (num_steps - rule.synchronous_steps) // _LEAST_ROUNDS)}"
        )
