import csv
import math
from importlib.resources import files

import numpy as np
import pytest
from steps import ROW, answer, change

from paceline.simulator.training import calibration, read_rows
from paceline.simulator.training.calibration import fit_published, load_posterior, load_published, read_published
from paceline.simulator.training.fit import ROW_SPREAD, Posterior, Unexplained
from paceline.simulator.training.parameters import CASE, INDEX, PARAMETERS


def test_shipped_rows_have_their_sources_and_only_the_known_misprint_cannot_be_priced():
    rows = read_published()
    text = (files(calibration.__package__) / "published" / "measurements.csv").read_text().splitlines()
    sources = {line["row"]: line for line in csv.DictReader(text)}
    assert len(sources) == 321
    assert all(sources[row.id]["reference"] and sources[row.id]["family"] == row.family for row in rows)
    steps = [row.id for row in rows if row.measured.step_s is not None]
    assert len(steps) == 156
    assert set(steps) - {row.id for row in load_published().rows} == {"P188"}


def moved(posterior):
    """Return how far the written parameters are from a fit, in standard deviations of the posterior."""
    spreads = np.sqrt(np.diag(posterior.covariance))
    return np.abs(posterior.logs - calibration._read_logs()) / spreads


def test_written_parameters_are_those_that_the_shipped_rows_give():
    """One more round moves none by a quarter of its uncertainty: who changes the model must fit it again."""
    assert moved(load_posterior()).max() < 0.25


@pytest.mark.slow
def test_the_fit_from_the_priors_ends_at_the_written_parameters():
    assert moved(fit_published(from_shipped=False)).max() < 0.5


def test_fitted_rows_are_explained_to_a_tenth():
    rows = [row.model_copy(update={"measured": None}) for row in load_published().rows]
    from paceline.simulator.training import answer_rows

    answers = answer_rows(rows)["rows"]
    ratios = [abs(math.log(a["step_s"] / s)) for a, s in zip(answers, load_published().step_s, strict=True)]
    assert math.expm1(np.mean(ratios)) < 0.1


@pytest.mark.parametrize(
    ("row", "step_s", "memory_bytes"), [("P017", 18.13, None), ("P076", 0.4079, None), ("P202", None, 44e9)]
)
def test_golden_rows_stay_near_what_was_published(row, step_s, memory_bytes):
    (found,) = [published for published in read_published() if published.id == row]
    found = answer(found.model_dump(exclude={"measured"}))
    if step_s:
        assert found["step_s"] == pytest.approx(step_s, rel=0.1)
        assert found["step_s_low"] < step_s < found["step_s_high"]
    else:
        assert found["memory_bytes"] == pytest.approx(memory_bytes, rel=0.1)


def test_two_rows_of_a_case_correct_the_others_and_rows_that_disagree_correct_less():
    base = answer(ROW)["step_s"]
    many = answer(change(global_batch=256))["step_s"]

    def corrected(first, second):
        rows = [
            change(id="a", measured={"step_s": first * base}),
            change(id="b", global_batch=256, measured={"step_s": second * many}),
        ]
        return answer(change(sample={"tokens": 512}), rows)

    cold = answer(change(sample={"tokens": 512}))
    agree, disagree = corrected(1.5, 1.5), corrected(1.5, 0.7)
    assert agree["step_s"] == pytest.approx(1.5 * cold["step_s"], rel=0.15)
    assert abs(disagree["step_s"] / cold["step_s"] - 1) < 0.2
    assert agree["step_s_high"] / agree["step_s_low"] < disagree["step_s_high"] / disagree["step_s_low"]


def test_intervals_are_those_of_a_normal_logarithm_of_parameters_and_noise():
    """Without any row, a step's variance is that of its parameters, the unexplained part and the noise."""
    published = load_published()
    observed = published.observe([0])
    nothing = Unexplained(observed.features, np.zeros((1, 1)), np.zeros(1))
    spreads = np.array([parameter.spread for parameter in (*PARAMETERS, *CASE)])
    logs = np.array([parameter.log_prior for parameter in (*PARAMETERS, *CASE)])
    found = Posterior(logs, np.zeros((len(logs), len(logs))), nothing).predict(observed.batch, observed.features)
    certain = float(found.log_spreads[0])
    wide = Posterior(logs, np.diag(spreads**2), nothing).predict(observed.batch, observed.features)
    assert certain == pytest.approx(math.hypot(ROW_SPREAD, 0.1))
    assert float(wide.log_spreads[0]) > certain


def test_every_parameter_has_a_meaning_and_moves_some_step():
    assert len(INDEX) == len(PARAMETERS) + len(CASE)
    assert all(parameter.meaning and parameter.spread > 0 for parameter in (*PARAMETERS, *CASE))
    rows = read_rows({"version": 1, "rows": [change(id="x")]}, "rows", measured=False)
    assert rows[0].id == "x"
