"""Parameters fitted to measured steps: a regularised fit, which is Bayes' rule for nearly linear logarithms.

Every parameter has a prior. Rows of one family share deviations that no parameter explains (`CASE`): many rows of one
family say less than as many of different families. The rows of the case at hand have such deviations of their own,
which their measurements correct; without any, they widen the interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from paceline.simulator.training.batch import StepBatch
from paceline.simulator.training.likeness import SPREAD, Features, covariance
from paceline.simulator.training.parameters import CASE, PARAMETERS
from paceline.simulator.training.price import find_unmeasured_spread, price, roofline_s
from paceline.topology.cluster import Floats

ROW_SPREAD = 0.03
"""Standard deviation of the logarithm of one measured step around its case: noise, and what is not printed."""
_NUM_OWN = len(PARAMETERS)
_PRIORS = np.array([parameter.log_prior for parameter in (*PARAMETERS, *CASE)])
_SPREADS = np.array([parameter.spread for parameter in (*PARAMETERS, *CASE)])
_STEP = 1e-3
_ROUNDS = 8
_CORRECTIONS = 3
_WIDENINGS = list(product((1.0, 4.0, 16.0, 64.0, 256.0), (1.0, 4.0, 16.0), (1.0, 4.0, 16.0, 64.0)))
"""Factors on variances: of the whole case, of each kind of its steps, and of each row."""
_WIDENING_PRICE = 0.7
"""Logarithm by which a doubled standard deviation must be likelier to be believed."""


@dataclass(frozen=True)
class Observed:
    """Measured steps.

    Args:
        batch: Numbers of the steps.
        features: Sizes and choices by which steps are alike.
        log_step_s: Logarithms of what was measured.
        families: Family of each: what its rows share is nobody else's.
    """

    batch: StepBatch
    features: Features
    log_step_s: Floats
    families: Sequence[str]


@dataclass(frozen=True)
class StepPrediction:
    """Steps with their uncertainty.

    Args:
        terms: Seconds of each term of each step.
        log_spreads: Standard deviation of each step's logarithm.
    """

    terms: Floats
    log_spreads: Floats


@dataclass(frozen=True)
class Unexplained:
    """What no parameter explains of measured steps, and so what to expect of steps like them.

    Args:
        features: Sizes and choices by which other steps are like these.
        inverse: Inverse of the covariance of their residuals.
        pull: That inverse times the residuals.
    """

    features: Features
    inverse: Floats
    pull: Floats

    def expect(self, features: Features) -> Floats:
        """Return the logarithm of the factor that is expected of steps."""
        return np.asarray(covariance(features, self.features) @ self.pull)

    def left(self, first: Features, second: Features) -> Floats:
        """Return the covariance of the unexplained parts of steps that is left."""
        shared = covariance(first, self.features) @ self.inverse @ covariance(self.features, second)
        return np.asarray(covariance(first, second) - shared)


@dataclass(frozen=True)
class SeenCase:
    """The case at hand, of which some steps were measured.

    Args:
        features: Sizes and choices by which other steps are like these.
        slopes: Derivatives of their logarithms by those of the parameters.
        inverse: Inverse of the covariance of their residuals.
        pull: That inverse times the residuals.
        widening: Factor on the variance of what no parameter explains.
        row_widening: Factor on that of each row alone.
    """

    features: Features
    slopes: Floats
    inverse: Floats
    pull: Floats
    widening: float
    row_widening: float


@dataclass(frozen=True)
class Posterior:
    """What is believed of the parameters after rows were seen.

    Args:
        logs: Logarithms of the parameters, in the order of `INDEX`.
        covariance: Covariance of the parameters before the case at hand was seen.
        unexplained: Part of the rows that they do not explain.
        case: Case at hand; None: none of its steps was measured.
    """

    logs: Floats
    covariance: Floats
    unexplained: Unexplained
    case: SeenCase | None = None

    def correct(self, seen: Observed) -> "Posterior":
        """Return what is believed when steps of the case at hand were measured too.

        How far a case may be off as a whole, and how far each of its steps beside it, is chosen by how likely that
        makes what was measured: steps that are all twice as slow are followed, and steps that disagree say little.
        """
        wanted = seen.log_step_s - self.unexplained.expect(seen.features)
        first = np.log(price(seen.batch, self.logs).sum(axis=1))
        slopes = differentiate(seen.batch, self.logs)[1]
        widened = max(_WIDENINGS, key=lambda widening: self._judge(widening, seen, wanted - first, slopes))
        believed, noise = self._widen(*widened, seen)
        logs = self.logs
        for _ in range(_CORRECTIONS):
            terms, slopes = differentiate(seen.batch, logs)
            residuals = wanted - np.log(terms.sum(axis=1)) + slopes @ (logs - self.logs)
            inverse = _invert(slopes @ believed @ slopes.T + noise)
            pull = inverse @ residuals
            logs = self.logs + believed @ slopes.T @ pull
        case = SeenCase(seen.features, slopes, inverse, pull, widened[1], widened[2])
        return Posterior(logs, believed, self.unexplained, case)

    def _widen(self, of_case: float, of_steps: float, of_rows: float, seen: Observed) -> tuple[Floats, Floats]:
        """Return the covariance of parameters, and of what they do not explain, with the case less sure."""
        believed = self.covariance.copy()
        believed[_NUM_OWN, _NUM_OWN] *= of_case
        left = self.unexplained.left(seen.features, seen.features)
        return believed, left * of_steps + np.eye(seen.batch.num_steps) * of_rows * ROW_SPREAD**2

    def _judge(self, widening: tuple[float, float, float], seen: Observed, residuals: Floats, slopes: Floats) -> float:
        believed, noise = self._widen(*widening, seen)
        together = slopes @ believed @ slopes.T + noise
        likelihood = residuals @ np.linalg.solve(together, residuals) + np.linalg.slogdet(together)[1]
        return float(-0.5 * likelihood - _WIDENING_PRICE * np.log2(widening).sum() / 2)

    def estimate(self, batch: StepBatch, features: Features) -> Floats:
        """Return the terms of steps, shape (steps, terms); no step is below its flops at its device's peak."""
        offsets = self.unexplained.expect(features)
        if self.case is not None:
            offsets = offsets + self._alike(features, self.case) @ self.case.pull
        terms = price(batch, self.logs) * np.exp(offsets)[:, None]
        return np.asarray(terms * np.maximum(1.0, roofline_s(batch) / terms.sum(axis=1))[:, None])

    def predict(self, batch: StepBatch, features: Features) -> StepPrediction:
        """Return the terms of steps, and how uncertain each step is."""
        slopes = differentiate(batch, self.logs)[1]
        shared = covariance(features, self.unexplained.features)
        variance = np.einsum("ij,jk,ik->i", slopes, self.covariance, slopes)
        of_steps = self.case.widening if self.case is not None else 1.0
        variance += of_steps * (SPREAD**2 - np.einsum("ij,jk,ik->i", shared, self.unexplained.inverse, shared))
        if self.case is not None:
            together = slopes @ self.covariance @ self.case.slopes.T + self._alike(features, self.case)
            variance -= np.einsum("ij,jk,ik->i", together, self.case.inverse, together)
        terms = self.estimate(batch, features)
        noise = ROW_SPREAD**2 * (self.case.row_widening if self.case is not None else 1.0)
        spreads = np.sqrt(np.maximum(variance, 0.0) + noise + find_unmeasured_spread(terms) ** 2)
        return StepPrediction(terms, spreads)

    def covary(self, batch: StepBatch, features: Features) -> Floats:
        """Return the covariance of the logarithms of steps; its diagonal is the square of the spreads of `predict`."""
        slopes = differentiate(batch, self.logs)[1]
        of_steps, of_rows = (1.0, 1.0) if self.case is None else (self.case.widening, self.case.row_widening)
        joint = slopes @ self.covariance @ slopes.T + of_steps * self.unexplained.left(features, features)
        if self.case is not None:
            together = slopes @ self.covariance @ self.case.slopes.T + self._alike(features, self.case)
            joint -= together @ self.case.inverse @ together.T
        unmeasured = find_unmeasured_spread(price(batch, self.logs)) ** 2
        return np.asarray(joint + np.eye(batch.num_steps) * of_rows * ROW_SPREAD**2 + np.diag(unmeasured))

    def _alike(self, features: Features, case: SeenCase) -> Floats:
        return case.widening * self.unexplained.left(features, case.features)


def _invert(matrix: Floats) -> Floats:
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)


def _surprise(residuals: Floats, variances: Floats) -> Floats:
    """Return variance to add for rows that are farther off than twice what is believed: they say less of the others."""
    return np.maximum(0.0, residuals**2 - 4 * variances)


def differentiate(batch: StepBatch, logs: Floats) -> tuple[Floats, Floats]:
    """Return the terms of steps, and how the logarithm of each step changes with the logarithm of each parameter."""
    terms = price(batch, logs)
    start = np.log(terms.sum(axis=1))
    slopes = np.empty((batch.num_steps, len(logs)))
    for index in range(len(logs)):
        moved = logs.copy()
        moved[index] += _STEP
        slopes[:, index] = (np.log(price(batch, moved).sum(axis=1)) - start) / _STEP
    return terms, slopes


def fit(observed: Observed, start: Floats | None = None, num_rounds: int = _ROUNDS) -> Posterior:
    """Return the parameters that explain measured steps best (Gauss-Newton), with their covariance.

    Args:
        observed: Steps to explain.
        start: Logarithms to start from; None: the priors.
        num_rounds: Rounds of the fit.
    """
    logs = _PRIORS.copy() if start is None else start.copy()
    families = np.array(observed.families)
    noise = covariance(observed.features, observed.features) * (families[:, None] == families[None, :])
    noise += np.eye(len(families)) * ROW_SPREAD**2
    surprise = np.zeros(len(families))
    for round_number in range(num_rounds):
        terms, slopes = differentiate(observed.batch, logs)
        residuals = observed.log_step_s - np.log(terms.sum(axis=1))
        own, case = slopes[:, :_NUM_OWN], slopes[:, _NUM_OWN:] * _SPREADS[_NUM_OWN:]
        together = noise + (case @ case.T) * (families[:, None] == families[None, :])
        now = _surprise(residuals, np.diag(together))
        # Rows that surprise in one round only would make the fit alternate for ever.
        surprise = now if round_number == 0 else 0.7 * surprise + 0.3 * now
        inverse = _invert(together + np.diag(surprise))
        normal = np.diag(1 / _SPREADS**2)
        right = -normal @ (logs - _PRIORS)
        normal[:_NUM_OWN, :_NUM_OWN] += own.T @ inverse @ own
        right[:_NUM_OWN] += own.T @ inverse @ residuals
        logs = logs + np.linalg.solve(normal, right) * (1.0 if round_number < 4 else 0.5)
    return Posterior(logs, _invert(normal), Unexplained(observed.features, inverse, inverse @ residuals))
