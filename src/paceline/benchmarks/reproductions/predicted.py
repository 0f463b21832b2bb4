"""Published tables that the simulator predicts: our number with its interval, theirs, and what does not add up."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from paceline.benchmarks.reproductions.base import Reproduction
from paceline.benchmarks.tables import TableRow
from paceline.monitor.formatting import number
from paceline.simulator.training import describe, make_case
from paceline.simulator.training.answers import QUANTILE, find_posterior, widen_unknown
from paceline.simulator.training.batch import make_batch
from paceline.simulator.training.contract import read_row
from paceline.simulator.training.likeness import Features
from paceline.simulator.training.memory import estimate_memory
from paceline.simulator.training.parameters import PARAMETERS

Several = Annotated[int, Field(ge=2)]
"""Number of nodes or workers that exchange something."""
Amount = tuple[float, float, float]
"""An estimate and the ends of its 90 % interval."""


@dataclass(frozen=True)
class PredictedRow(TableRow):
    """One number of a published table.

    Args:
        what: Name of the number, with its unit.
        ours: Our number.
        low: Lower end of its 90 % interval; None: it is counted, not predicted.
        high: Upper end of it.
        published: Number as it was printed, or what follows from it.
        note: Contradiction, or assumption; empty if there is none.
    """

    headings = ("what", "ours", "90 %", "published", "what does not add up")

    what: str
    ours: float
    low: float | None
    high: float | None
    published: str
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return it as texts."""
        return self.what, number(self.ours), self.interval, self.published, self.note

    @property
    def interval(self) -> str:
        """Interval in words."""
        if self.low is None or self.high is None:
            return "counted"
        return f"{number(self.low)} to {number(self.high)}"


def predicted(what: str, ours: Amount, published: str, note: str = "") -> PredictedRow:
    """Return the row of a number that is predicted."""
    return PredictedRow(what, *ours, published, note)


def counted(what: str, ours: float, published: str, note: str = "") -> PredictedRow:
    """Return the row of a number that follows from definitions and specifications alone."""
    return PredictedRow(what, ours, None, None, published, note)


class PredictedTable(Reproduction):
    """Settings of a published table that the simulator predicts."""

    @abstractmethod
    def reproduce(self) -> Sequence[PredictedRow]:
        """Predict it."""


class Steps:
    """Training steps, predicted together, so that what is uncertain of two alike cancels in their ratio.

    Args:
        rows: Steps as rows of the contract.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        posterior = find_posterior(())
        self.descriptions = [describe(make_case(read_row({"id": "", **row}, "row"))) for row in rows]
        batch, features = make_batch(self.descriptions), Features(self.descriptions)
        self.seconds = posterior.estimate(batch, features).sum(axis=1)
        self._covariance = posterior.covary(batch, features)
        cases = [description.case for description in self.descriptions]
        self._unknown = np.array([widen_unknown(0.0, case, posterior) for case in cases])

    def times(self, index: int, factor: float = 1.0) -> Amount:
        """Return a multiple of the time of a step."""
        spread = float(np.hypot(np.sqrt(self._covariance[index, index]), self._unknown[index]))
        return _widen(factor * float(self.seconds[index]), spread)

    def rate(self, index: int, factor: float = 1.0) -> Amount:
        """Return a number per second of a step."""
        seconds, low, high = self.times(index, 1.0)
        return factor / seconds, factor / high, factor / low

    def ratio(self, index: int, other: int, factor: float = 1.0) -> Amount:
        """Return a multiple of the ratio of a step to another: hardware that nobody knows is the same in both."""
        joint = self._covariance
        variance = joint[index, index] + joint[other, other] - 2 * joint[index, other]
        return _widen(factor * float(self.seconds[index] / self.seconds[other]), float(np.sqrt(max(variance, 0.0))))

    def memory_bytes(self, index: int) -> float:
        """Return the memory of the fullest rank in a step."""
        return estimate_memory(self.descriptions[index]).total_bytes


def spread_of_parameter(name: str) -> float:
    """Return the standard deviation of the logarithm of a parameter of the simulator, as shipped rows leave it."""
    place = next(index for index, parameter in enumerate(PARAMETERS) if parameter.name == name)
    return float(np.sqrt(find_posterior(()).covariance[place, place]))


def _widen(value: float, spread: float) -> Amount:
    width = exp(QUANTILE * spread)
    return value, value / width, value * width


def contains(amount: Amount, value: float) -> bool:
    """Return whether an interval holds a number."""
    return amount[1] <= value <= amount[2]


RESNET50 = {"name": "resnet", "depth": 50, "num_classes": 1000}
IMAGE = {"image": [3, 224, 224]}
IMAGENET = 1_281_167
"""Images of an epoch of ImageNet."""
BERT_LARGE = {
    "name": "bert",
    "num_layers": 24,
    "width": 1024,
    "num_heads": 16,
    "feedforward": 4096,
    "vocabulary": 30522,
}
GPT3 = {
    "name": "decoder", "num_layers": 96, "width": 12288, "num_heads": 96, "num_kv_heads": 96, "feedforward": 49152,
    "is_gated": False, "vocabulary": 51200, "is_tied": True, "positions": "learned",
}  # fmt: skip
