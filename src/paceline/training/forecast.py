"""What a plan predicts of a run's step, and what the steps turn out to take: both go into the log, side by side."""

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Self

from pydantic import Field, ValidationError

from paceline.errors import SettingsError
from paceline.monitor.events import Event, PlanCompared, Warned
from paceline.registry import Settings, explain

FILE = "plan.json"
"""Name of a plan in the directory of the run that it is trained by."""
_SKIPPED = 3
"""First steps of a start, which take longer."""
_FIRST = 8
"""Steps after which they are first compared; then after twice as many, and so on."""
_WINDOW = 512
"""Newest steps whose median counts."""


class Forecast(Settings):
    """Prediction of a step, with 90 % intervals."""

    step_s: float = Field(gt=0)
    """Time of a step."""
    step_s_low: float = Field(gt=0)
    """Time that one of twenty steps is below."""
    step_s_high: float = Field(gt=0)
    """Time that one of twenty is above."""
    memory_bytes: float = Field(ge=0)
    """Memory of the fullest rank."""
    memory_bytes_low: float = Field(ge=0)
    """Memory that one of twenty is below."""
    memory_bytes_high: float = Field(ge=0)
    """Memory that one of twenty is above."""
    energy_j: float = Field(ge=0)
    """Energy of all hosts."""
    energy_j_low: float = Field(default=0.0, ge=0)
    """Energy that one of twenty is below; 0 in plans of before it was known."""
    energy_j_high: float = Field(default=0.0, ge=0)
    """Energy that one of twenty is above; 0 in plans of before it was known."""
    terms: dict[str, float] = Field(default={})
    """Times that add up to the step."""
    basis: str = ""
    """Origin of the numbers: specification, published, calibrated or profile."""


class PlanWatch:
    """Compares the steps of a run with its plan.

    Args:
        forecast: Prediction of a step.
        machines: Machines that it is of, in words.
    """

    def __init__(self, forecast: Forecast, machines: str) -> None:
        self._forecast, self._machines = forecast, machines
        self._durations_s: deque[float] = deque(maxlen=_WINDOW)
        self._num_seen, self._has_warned = 0, False

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Return the watch of the plan in a run's directory; None if it has none.

        Raises:
            SettingsError: The file there is no plan.
        """
        path = directory / FILE
        if not path.is_file():
            return None
        try:
            document = json.loads(path.read_text())
            return cls(Forecast.model_validate(document["predicted"]), str(document["machines"]["words"]))
        except ValidationError as error:
            raise SettingsError(f"{path} must be a plan, but: {explain(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(f"{path} must be a plan, but is not; make one by `paceline plan`") from error

    def look(self, duration_s: float, *, is_last: bool) -> Iterator[Event]:
        """Take in a step; yield a comparison if one is due, and once a warning if they part.

        Args:
            duration_s: Time that the step took.
            is_last: Whether the training ends with it.
        """
        self._num_seen += 1
        if self._num_seen > _SKIPPED or is_last:
            self._durations_s.append(duration_s)
        num_measured = self._num_seen - _SKIPPED
        is_due = num_measured >= _FIRST and num_measured & (num_measured - 1) == 0
        if not (is_due or is_last):
            return
        forecast, measured_s = self._forecast, median(self._durations_s)
        is_within = forecast.step_s_low <= measured_s <= forecast.step_s_high
        yield PlanCompared(
            predicted_s=forecast.step_s,
            predicted_s_low=forecast.step_s_low,
            predicted_s_high=forecast.step_s_high,
            measured_s=measured_s,
            num_steps=len(self._durations_s),
            is_within=is_within,
            machines=self._machines,
            basis=forecast.basis,
        )
        if not is_within and not self._has_warned:
            self._has_warned = True
            yield Warned(message=self._explain(measured_s))

    def _explain(self, measured_s: float) -> str:
        forecast = self._forecast
        factor = measured_s / forecast.step_s
        words = f"{factor:.3g} times as long" if factor > 1 else f"{factor:.0%} of the time"
        return (
            f"a step takes {measured_s:.3g} s, {words}, where the plan for {self._machines} predicted "
            f"{forecast.step_s:.3g} s ({forecast.step_s_low:.3g} to {forecast.step_s_high:.3g}); if these are those "
            "machines, correct it: paceline plan --calibrate takes steps that were measured"
        )
