"""Answers to rows of the contract: time, memory and energy of a step with intervals, terms, bound and assumptions."""

from collections.abc import Sequence
from math import exp, hypot
from typing import Any

import numpy as np

from paceline.errors import PacelineError, SettingsError
from paceline.simulator.training.batch import make_batch
from paceline.simulator.training.calibration import load_posterior, select_measured
from paceline.simulator.training.case import StepCase, explain_refusal, make_case
from paceline.simulator.training.contract import VERSION, Row
from paceline.simulator.training.description import Description, describe
from paceline.simulator.training.energy import WORKING, estimate_energy_j, widen_by_power
from paceline.simulator.training.fit import Posterior
from paceline.simulator.training.likeness import Features
from paceline.simulator.training.memory import LOG_SPREAD, estimate_memory
from paceline.simulator.training.parameters import GENERATIONS
from paceline.simulator.training.price import TERMS
from paceline.topology.cluster import Floats

QUANTILE = 1.645
"""Standard deviations on either side of a 90 % interval of a normal distribution."""
_UNKNOWN_SPREAD = 0.20
"""Additional standard deviation of a step's logarithm on hardware that no shipped row knows."""
MEMORY_ROW_SPREAD = 0.04
"""Standard deviation of measured memory around its case: what other rows of the case cannot say."""


def answer_rows(rows: Sequence[Row], measured: Sequence[Row] = ()) -> dict[str, Any]:
    """Return the answers to rows, in their order, as a document of the contract.

    Args:
        rows: Rows to price.
        measured: Rows of the case at hand that were measured: they correct the answers.

    Raises:
        SettingsError: A measured row cannot be priced.
    """
    described: dict[int, Description] = {}
    refusals: dict[int, str] = {}
    for number, row in enumerate(rows):
        try:
            described[number] = describe(make_case(row))
        except PacelineError as error:
            refusals[number] = explain_refusal(error)
    posterior = find_posterior(measured)
    memory = _correct_memory(measured)
    answers: dict[int, dict[str, Any]] = {
        number: {"id": rows[number].id, "error": reason} for number, reason in refusals.items()
    }
    if described:
        priced = answer_described(list(described.values()), posterior, memory)
        answers |= dict(zip(described, priced, strict=True))
    return {"version": VERSION, "rows": [answers[number] for number in range(len(rows))]}


def find_posterior(measured: Sequence[Row]) -> Posterior:
    """Return what is believed of the parameters, corrected by rows of the case at hand if their steps were measured.

    Raises:
        SettingsError: A measured row cannot be priced.
    """
    posterior = load_posterior()
    if not any(row.measured is not None and row.measured.step_s is not None for row in measured):
        return posterior
    seen = _check_measured(measured)
    return posterior.correct(seen.observe(range(len(seen.rows))))


def _check_measured(measured: Sequence[Row]) -> Any:
    for row in measured:
        try:
            make_case(row)
        except PacelineError as error:
            raise SettingsError(f"measured row {row.id} cannot be priced: {error}") from error
    return select_measured(measured)


def _correct_memory(measured: Sequence[Row]) -> tuple[float, float]:
    """Return the logarithm of the factor on memory that rows of the case show, and its spread."""
    ratios = []
    for row in measured:
        if row.measured is not None and row.measured.memory_bytes is not None:
            estimate = estimate_memory(describe(make_case(row))).total_bytes
            ratios.append(np.log(row.measured.memory_bytes / estimate))
    precision = 1 / LOG_SPREAD**2 + len(ratios) / MEMORY_ROW_SPREAD**2
    return float(sum(ratios) / MEMORY_ROW_SPREAD**2 / precision), float(np.sqrt(1 / precision + MEMORY_ROW_SPREAD**2))


def answer_described(
    descriptions: Sequence[Description], posterior: Posterior, memory: tuple[float, float] | None = None
) -> list[dict[str, Any]]:
    """Return the answers to described steps.

    Args:
        descriptions: The steps.
        posterior: Beliefs about the parameters.
        memory: Logarithm of the factor on memory, and its spread; None if no memory was measured.
    """
    memory = _correct_memory(()) if memory is None else memory
    batch = make_batch(descriptions)
    prediction = posterior.predict(batch, Features(descriptions))
    is_corrected = posterior.case is not None
    return [
        _answer(description, terms, widen_unknown(float(log_spread), description.case, posterior), memory, is_corrected)
        for description, terms, log_spread in zip(descriptions, prediction.terms, prediction.log_spreads, strict=True)
    ]


def widen_unknown(log_spread: float, case: StepCase, posterior: Posterior) -> float:
    """Return the spread of a step, wider on hardware that neither shipped rows nor rows of the case at hand know."""
    is_known = case.device.generation in GENERATIONS or posterior.case is not None
    return log_spread if is_known else hypot(log_spread, _UNKNOWN_SPREAD)


def with_interval(name: str, value: float, log_spread: float) -> dict[str, float]:
    """Return a number and the ends of its 90 % interval, by name."""
    width = exp(QUANTILE * log_spread)
    return {name: value, f"{name}_low": value / width, f"{name}_high": value * width}


def _answer(
    description: Description, terms: Floats, log_spread: float, memory: tuple[float, float], is_corrected: bool
) -> dict[str, Any]:
    case = description.case
    step_s = float(terms.sum())
    by_name = {name: float(seconds) for name, seconds in zip(TERMS, terms, strict=True) if seconds > 0}
    busy = sum(seconds for name, seconds in by_name.items() if name in WORKING) / step_s
    memory_bytes = estimate_memory(description).total_bytes * exp(memory[0])
    basis = "calibrated" if is_corrected else "published" if case.device.generation in GENERATIONS else "specification"
    return {
        "id": case.row.id,
        **with_interval("step_s", step_s, log_spread),
        **with_interval("memory_bytes", memory_bytes, memory[1]),
        **with_interval("energy_j", estimate_energy_j(case, step_s, busy), widen_by_power(case, log_spread)),
        "terms": by_name,
        "bound": max(by_name, key=lambda name: by_name[name]),
        "basis": basis,
        "assumed": list(case.assumed),
        "error": None,
    }
