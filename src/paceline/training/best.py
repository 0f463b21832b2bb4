"""The best evaluation of a training so far, and the number of evaluations since."""

import math
from typing import Any

from paceline.errors import SettingsError, unknown_name
from paceline.training.evaluate import Evaluation


class BestSoFar:
    """The best evaluation: the first one that none was better than. All workers have the same.

    Args:
        measure: Measure to compare: loss, the lowest; or ``min:NAME`` or ``max:NAME`` of a metric. None for no
            comparison.
        stop_after: Evaluations in a row without improvement after which training ends; None for no limit. They are
            compared by the loss if there is no `measure`.
    """

    def __init__(self, measure: str | None, stop_after: int | None) -> None:
        self.is_used = measure is not None or stop_after is not None
        self.is_kept = measure is not None
        self._measure = measure or "loss"
        self._stop_after = stop_after
        self.value: float | None = None
        self.step = -1
        """Step after which it was made."""
        self.num_since = 0
        """Number of evaluations since then."""
        self.warning = ""
        """Report of the first evaluation that could not be compared; empty if there was none."""

    def note(self, evaluation: Evaluation, step: int) -> bool:
        """Record an evaluation after `step`, and return whether it is the best.

        Raises:
            UnknownNameError: The evaluation has no metric of the name.
        """
        if not self.is_used:
            return False
        kind, name = part_measure(self._measure)
        values = {"loss": evaluation.loss} | evaluation.metrics
        if name not in values:
            raise unknown_name("the metric of keep_best", name, values)
        value = values[name]
        if math.isnan(value) and not self.warning:
            self.warning = (
                f"{name} must be a number for keep_best and stop_after, but it is NaN after step {step}; an evaluation "
                "with NaN is never the best: look at the metric and its samples"
            )
        is_better = self.value is None or (value < self.value if kind == "min" else value > self.value)
        if is_better and not math.isnan(value):
            self.value, self.step, self.num_since = value, step, 0
            return True
        self.num_since += 1
        return False

    @property
    def end_reason(self) -> str:
        """Reason for which training ends; empty while it continues."""
        if self._stop_after is None or self.num_since < self._stop_after:
            return ""
        best = "none was finite" if self.value is None else f"the best is {self.value:.6g} at step {self.step}"
        _, name = part_measure(self._measure)
        what = "held-out loss" if name == "loss" else name
        return f"{what} has not improved for {self.num_since} evaluations: {best}"

    def state(self) -> dict[str, Any]:
        """Return the state, as JSON."""
        return {"measure": self._measure, "value": self.value, "step": self.step, "num_since": self.num_since}

    def load(self, state: dict[str, Any]) -> None:
        """Load a saved state, if it is of the same measure."""
        if state.get("measure") == self._measure:
            self.value, self.step, self.num_since = state["value"], state["step"], state["num_since"]


def part_measure(measure: str) -> tuple[str, str]:
    """Return ``min`` or ``max``, and the name of a measure.

    Raises:
        SettingsError: The measure is neither loss nor one with a direction.
    """
    kind, separator, name = ("min:" + measure if measure == "loss" else measure).partition(":")
    if kind not in ("min", "max") or not separator or not name:
        raise SettingsError(
            f"keep_best must be loss, or min: or max: and a metric's name, but got {measure!r}; write max:accuracy"
        )
    return kind, name
