"""Losses and gradient norms that are not finite, or far above those before, and what is done about them."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

from pydantic import Field

from paceline.errors import NonFiniteError, PacelineError, SpikeError
from paceline.monitor.events import AnomalyFound
from paceline.registry import Settings
from paceline.replica.step_result import StepResult, StepTimes
from paceline.sync.every_step import EveryStep
from paceline.sync.rule import Rule
from paceline.topology.layout import Layout

Reaction = Literal["ignore", "report", "skip", "roll_back", "stop"]
"""Reaction to an anomaly: nothing; an event in the log; that, and the update is skipped, on all workers; or
training goes back to its last checkpoint, and skips the updates from the one before the anomaly on; or the run ends."""

_NUM_NEIGHBOURS = 2
"""Number of earlier values as high from which on another one is no news: the data has more than one kind of batch."""
_MEAN_OF_SIGMA = 1.2533
"""Ratio of a normal distribution's deviation to the mean of the distances from its median."""
_LEAST_VALUES = 20
"""Number of values before which nothing is a spike: the first steps change fast."""
_MOST_HIGH = 2
"""Number of high values in a row of which none is a spike."""
_MAD_OF_SIGMA = 1.4826
"""Ratio of a normal distribution's deviation to the median of the distances from its median."""
_LEAST_SCALE = 0.02
"""Least scale of what is usual, as a fraction: a loss that never moves may still move by some."""
_HIGH_RATIO = 100.0
"""Ratio to the median from which fewer deviations make a spike: many wide deviations would be a ratio of thousands."""
_LEAST_DEVIATIONS = 6.0
"""Number of deviations that a spike of such a ratio needs at least."""


class Anomalies(Settings):
    """Reactions to anomalies. A spike is judged by the median and the median distance from it, so others hide none."""

    non_finite: Literal["skip", "roll_back", "stop"] = "stop"
    """Reaction to a loss or a gradient that is NaN or infinite; such an update is never made."""
    loss_spike: Reaction = "report"
    """Reaction to a loss far above those of the steps before."""
    gradient_spike: Reaction = "report"
    """Reaction to a gradient norm, before clipping, far above those before; norms are known if clip_norm is given."""
    window: int = Field(default=100, ge=_LEAST_VALUES)
    """Number of steps before that a value is compared with."""
    loss_threshold: float = Field(default=10.0, gt=0)
    """Distance above the median from which a loss is a spike, in robust standard deviations of the logarithm."""
    gradient_threshold: float = Field(default=20.0, gt=0)
    """The same for a gradient norm, which changes more as a model learns."""
    patience: int = Field(default=10, ge=1)
    """Number of updates that may be skipped one after another, or times that training may go back, before it ends."""

    def _list_acting(self) -> dict[str, str]:
        chosen = {name: getattr(self, name) for name in ("non_finite", "loss_spike", "gradient_spike")}
        return {name: value for name, value in chosen.items() if value in ("skip", "roll_back")}

    @property
    def may_go_on(self) -> bool:
        """Whether training may go on after an update that was refused."""
        return bool(self._list_acting())

    def check(self, sync: Rule, layout: Layout, landing: str) -> None:
        """Refuse reactions that cannot be the same on all workers.

        Raises:
            ValueError: Updates cannot be skipped with these settings.
        """
        acting = self._list_acting()
        if acting and not (isinstance(sync, EveryStep) and layout.is_plain and landing == "update"):
            name, value = next(iter(acting.items()))
            raise ValueError(
                f"anomalies.{name} must be report or stop with sync {sync.name}, landing {landing} and {layout}, where "
                f"workers do not all skip the same update, but got {value}; take sync every_step with landing update"
            )


class SpikeDetector:
    """Tells values that are far above those before.

    A value is a spike if it is above the median by `threshold` deviations, or the third in a row that is above it by
    half of that: an odd batch is soon over, and parameters that went astray stay there. Values are compared by their
    logarithms while all are positive: then a loss near 0 may double, and one of 3 may not. From 100 medians on 6
    deviations are enough.

    Values of exactly 0, as of a loss with a margin that is kept, are no spikes and are left out: they say nothing of
    how high the others are (Aitchison 1955, a probability mass at 0 beside a lognormal distribution). Where more than
    half of the rest are the same, so that the median distance is 0, the mean distance is the scale (Iglewicz and
    Hoaglin 1993).

    Args:
        window: Number of values, 0 left out, before that one is compared with.
        threshold: Distance above their median, in robust standard deviations.
    """

    def __init__(self, window: int, threshold: float) -> None:
        self._values: deque[float] = deque(maxlen=window)
        self._threshold = threshold
        self._center: tuple[float, float, bool] | None = None
        self.num_high = 0
        """Number of values in a row, up to the last, that are above half of what makes a spike."""

    def find_limit(self) -> float:
        """Return the largest value that is no spike, if it comes next."""
        return self._find_limit(self._threshold if self.num_high < _MOST_HIGH else self._threshold / 2)

    def _find_limit(self, threshold: float) -> float:
        if len(self._values) < _LEAST_VALUES:
            return math.inf
        if self._center is None:
            in_logarithms = min(self._values) > 0
            values = [math.log(value) for value in self._values] if in_logarithms else self._values
            self._center = *_center(values), in_logarithms
        middle, scale, in_logarithms = self._center
        if not in_logarithms:
            return middle + threshold * max(scale, _LEAST_SCALE * abs(middle))
        scale = max(scale, _LEAST_SCALE)
        exponent = middle + min(threshold * scale, max(math.log(_HIGH_RATIO), _LEAST_DEVIATIONS * scale))
        return math.exp(exponent) if exponent < 700 else math.inf

    def add(self, value: float) -> None:
        """Take a finite value into what later ones are compared with."""
        self.num_high = self.num_high + 1 if value > self._find_limit(self._threshold / 2) else 0
        if math.isfinite(value) and value != 0:
            self._values.append(value)
            self._center = None

    def is_known(self, value: float) -> bool:
        """Return whether some values of the window are as high: nearer to this one than to the median.

        So a cluster of high values, as of a second task among the data, is no news after its first ones: a value
        stands out by the distance to its second neighbour (Ramaswamy, Rastogi and Shim 2000).
        """
        middle = self.median
        least = math.sqrt(value * middle) if middle > 0 else (value + middle) / 2
        return sum(one >= least for one in self._values) >= _NUM_NEIGHBOURS

    def state(self) -> dict[str, Any]:
        """Return the state, as JSON."""
        return {"values": list(self._values), "num_high": self.num_high}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; of a longer window the newest values count."""
        self._values.clear()
        self._values.extend(state["values"])
        self._center, self.num_high = None, state["num_high"]

    @property
    def median(self) -> float:
        """Median of the values; NaN without any."""
        return median(self._values) if self._values else math.nan


def _center(values: Sequence[float]) -> tuple[float, float]:
    middle = median(values)
    distances = [abs(value - middle) for value in values]
    return middle, _MAD_OF_SIGMA * median(distances) or _MEAN_OF_SIGMA * sum(distances) / len(distances)


class AnomalyGuard:
    """Judges each step's loss and gradient norm before its update, the same on all workers, and counts what is done.

    Args:
        settings: Reactions.
    """

    def __init__(self, settings: Anomalies) -> None:
        self.settings = settings
        self._detectors = {
            "loss": SpikeDetector(settings.window, settings.loss_threshold),
            "gradient norm": SpikeDetector(settings.window, settings.gradient_threshold),
        }
        self._step = 0
        self._values: dict[str, float] = {}
        self._found: list[AnomalyFound] = []
        self._num_skipped = 0
        self._num_returns = 0
        self.skipped_steps: set[int] = set()
        """Steps whose updates are skipped when training comes to them again."""

    def begin(self, step: int) -> None:
        """Begin the update of a step."""
        self._step, self._values, self._found = step, {}, []

    def judge(self, name: str, value: float) -> None:
        """Judge a value of the step before its update.

        Raises:
            SpikeError: The update must not be made.
        """
        if self._step in self.skipped_steps and name == "loss":
            raise SpikeError(f"the update of step {self._step} is skipped: it led to an anomaly before")
        reaction = self.settings.loss_spike if name == "loss" else self.settings.gradient_spike
        limit = self._detectors[name].find_limit() if reaction != "ignore" else math.inf
        self._values[name] = value
        if not value > limit or (reaction == "report" and self._detectors[name].is_known(value)):
            return
        middle = self._detectors[name].median
        self._found.append(AnomalyFound(quantity=name, value=value, median=middle, limit=limit, reaction=reaction))
        if reaction != "report":
            raise SpikeError(
                f"the {name} must stay near those before, but at step {self._step} it is {value:.4g}, above "
                f"{limit:.4g}, where the median is {middle:.4g}; lower the learning rate, look at that step's data, or "
                "let it be skipped (--anomalies.loss_spike skip, --anomalies.gradient_spike skip)"
            )

    def end(self) -> list[AnomalyFound]:
        """Take the values of an update that was made, and return what was found."""
        for name, value in self._values.items():
            self._detectors[name].add(value)
        self._num_skipped, self._values = 0, {}
        return self._found

    def choose_reaction(self, error: PacelineError) -> str:
        """Return the reaction to an update that was refused: skip, roll_back or stop.

        A reaction that has been taken too often gives way to stop.
        """
        if self._step in self.skipped_steps and not self._found:
            return "skip"
        if isinstance(error, NonFiniteError):
            reaction: str = self.settings.non_finite
            quantity = "loss" if str(error).startswith("the loss") else "gradient"
            self._found.append(AnomalyFound(quantity=quantity, value=math.nan, reaction=reaction, message=str(error)))
        else:
            reaction = self._found[-1].reaction
        if reaction == "roll_back":
            self._num_returns += 1
            first = self._step - self._detectors["loss"].num_high - 1  # the update before what was high
            self.skipped_steps |= set(range(max(0, first), self._step + 1))
            return reaction if self._num_returns <= self.settings.patience else "stop"
        self._num_skipped += 1
        return reaction if self._num_skipped <= self.settings.patience else "stop"

    def skipped(self, weight: float) -> StepResult:
        """Return the result of a step whose update was skipped."""
        return StepResult(
            loss=self._values.get("loss", math.nan),
            weight=weight,
            gradient_norm=self._values.get("gradient norm"),
            communication_s=0.0,
            skipped=True,
            stop=False,
            newly_unused=[],
            wire_bytes=0,
            times=StepTimes(),
        )

    def state(self) -> dict[str, Any]:
        """Return, as JSON, all that later judgements depend on."""
        return {
            "detectors": {name: detector.state() for name, detector in self._detectors.items()},
            "num_skipped": self._num_skipped,
            "num_returns": self._num_returns,
            "skipped_steps": sorted(self.skipped_steps),
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Judge as after a saved state; without one, as an older checkpoint has none, go on as before.

        What going back has counted stays, as it was found after the checkpoint to which training goes back.
        """
        if not state:
            return
        for name, saved in state["detectors"].items():
            self._detectors[name].load(saved)
        self._num_skipped = state["num_skipped"]
        self._num_returns = max(self._num_returns, state["num_returns"])
        self.skipped_steps |= set(state["skipped_steps"])

    @property
    def found(self) -> list[AnomalyFound]:
        """Anomalies of the present step."""
        return self._found
