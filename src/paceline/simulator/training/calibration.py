"""What the shipped rows say of the parameters: fitted once, written down by name, and read here."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from paceline.errors import PacelineError
from paceline.simulator.training.batch import make_batch
from paceline.simulator.training.case import make_case
from paceline.simulator.training.contract import Row, read_rows
from paceline.simulator.training.description import Description, describe
from paceline.simulator.training.fit import Observed, Posterior, fit
from paceline.simulator.training.likeness import Features
from paceline.simulator.training.parameters import CASE, PARAMETERS


@dataclass(frozen=True)
class MeasuredRows:
    """Rows whose step was measured.

    Args:
        rows: Rows as they are written.
        descriptions: Steps of the rows as numbers.
        step_s: Seconds that were measured.
        families: Publication of each.
    """

    rows: tuple[Row, ...]
    descriptions: tuple[Description, ...]
    step_s: tuple[float, ...]
    families: tuple[str, ...]

    def observe(self, chosen: Sequence[int]) -> Observed:
        """Return some of them, by index, for a fit."""
        descriptions = [self.descriptions[index] for index in chosen]
        return Observed(
            batch=make_batch(descriptions),
            features=Features(descriptions),
            log_step_s=np.log([self.step_s[index] for index in chosen]),
            families=[self.families[index] for index in chosen],
        )


@cache
def read_published() -> tuple[Row, ...]:
    """Return the published rows of the contract, each with what was measured; `measurements.csv` has their sources."""
    text = (files(__package__) / "published" / "rows.json").read_text()
    return tuple(read_rows(json.loads(text), "the shipped rows", measured=True))


def select_measured(rows: Sequence[Row]) -> MeasuredRows:
    """Return the rows whose step was measured and can be priced."""
    found: list[tuple[Row, Description, float, str]] = []
    for row in rows:
        if row.measured is None or row.measured.step_s is None:
            continue
        try:
            found.append((row, describe(make_case(row)), row.measured.step_s, row.family or ""))
        except PacelineError:  # one shipped row's layout does not multiply, as it was printed
            continue
    chosen, descriptions, step_s, families = zip(*found, strict=True) if found else ((), (), (), ())
    return MeasuredRows(chosen, descriptions, step_s, families)


@cache
def load_published() -> MeasuredRows:
    """Return the shipped rows whose step was measured."""
    return select_measured(read_published())


def fit_published(chosen: Sequence[int] | None = None, *, from_shipped: bool = True) -> Posterior:
    """Return the posterior of some shipped rows, by index; None: of all.

    Args:
        chosen: Rows to fit.
        from_shipped: Whether to start from the values that are written down, near which the fit ends sooner.
    """
    published = load_published()
    observed = published.observe(range(len(published.rows)) if chosen is None else chosen)
    return fit(observed, _read_logs() if from_shipped else None, 5 if from_shipped else 12)


@cache
def load_posterior() -> Posterior:
    """Return the posterior of all shipped rows."""
    published = load_published()
    return fit(published.observe(range(len(published.rows))), _read_logs(), 1)


def _read_logs() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    values = json.loads((files(__package__) / "published" / "fitted.json").read_text())
    return np.log([values[parameter.name] for parameter in PARAMETERS] + [1.0] * len(CASE))
