"""Rules that did not act, or will not, in so many steps."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Size

from paceline.compression import Codec, NoCodec
from paceline.sync.parameter_server.asgd import ASGD
from paceline.sync.rule import Rule


class Idleness(NamedTuple):
    """Reason why a rule, or a setting of it, does not act, and the field to lower."""

    reason: str
    field: str


def find_idleness(rule: Rule, num_steps: int, shapes: Sequence[Size], num_workers: int) -> Idleness | None:
    """Return why a rule, or its warm-up, is without effect in `num_steps` steps from the first; else None.

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
    if num_workers > 1 and isinstance(rule, ASGD) and (rule.warmup_steps or 0) >= num_steps:
        return Idleness(
            f"the rate of sync asgd only rises: its warm-up takes {rule.warmup_steps} steps, the run {num_steps}",
            "warmup_steps",
        )
    return None


def find_idle_codec(rule: Rule, shapes: Sequence[Size], num_workers: int) -> Idleness | None:
    """Return why a codec encodes no block of the model; None if it does: then other bytes are sent than without it.

    Args:
        rule: The rule.
        shapes: Shapes of the parameters.
        num_workers: Number of workers, at least 2.
    """

    def count(**changes: Codec) -> list[int]:
        return [each.wire_bytes for each in rule.model_copy(update=changes).traffic(shapes, num_workers)]

    for field in ("codec", "pull_codec"):
        codec = getattr(rule, field) if field in type(rule).model_fields else None
        if not isinstance(codec, Codec) or isinstance(codec, NoCodec) or count() != count(**{field: NoCodec()}):
            continue
        least = f"dense_below={codec.dense_below}" if codec.dense_below else "the size for which it pays"
        return Idleness(f"{field} {codec.name} codes nothing: all blocks are below {least}", f"{field}.dense_below")
    return None
