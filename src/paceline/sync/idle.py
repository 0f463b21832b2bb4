"""Rules that did not act, or will not, in so many steps."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Size

from paceline.sync.rule import Rule


class Idleness(NamedTuple):
    """Reason why a rule does not act, and the field to lower."""

    reason: str
    field: str


def find_idleness(rule: Rule, num_steps: int, shapes: Sequence[Size], num_workers: int) -> Idleness | None:
    """Return why a rule does nothing of its own in `num_steps` steps from the first; None if it does.

    Args:
        rule: The rule.
        num_steps: Number of steps.
        shapes: Shapes of the parameters.
        num_workers: Number of workers.
    """
    traffic = rule.traffic(shapes, num_workers) if num_workers > 1 else ()
    if traffic and all(each.count(num_steps) < 1 for each in traffic):
        period = max(each.period for each in traffic)
        return Idleness(
            f"sync {rule.name} exchanges nothing in {num_steps} steps, since its period is {period}, so that each "
            "worker trains alone",
            "period",
        )
    if late := [each.first_step for each in traffic if each.first_step >= num_steps]:
        return Idleness(
            f"sync {rule.name} is every_step without a codec for the whole run of {num_steps} steps, since it begins "
            f"with step {min(late)}",
            "synchronous_steps" if "synchronous_steps" in type(rule).model_fields else "dense_steps",
        )
    return None
