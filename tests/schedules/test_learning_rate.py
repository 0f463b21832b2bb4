import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.schedules import Constant, Cosine, LearningRate, Linear, Polynomial

always = settings(deadline=None, derandomize=True)
finals = st.floats(0, 1, allow_nan=False)
schedules = st.one_of(
    st.builds(Constant, warmup_steps=st.integers(0, 50)),
    st.builds(Linear, warmup_steps=st.integers(0, 50), final_factor=finals),
    st.builds(Cosine, warmup_steps=st.integers(0, 50), final_factor=finals),
    st.builds(Polynomial, warmup_steps=st.integers(0, 50), final_factor=finals, power=st.floats(0.1, 4)),
)


def final_of(schedule):
    return getattr(schedule, "final_factor", 1.0)


@always
@given(schedule=schedules, extra=st.integers(1, 200))
def test_warm_up_is_a_straight_line_to_one(schedule, extra):
    warmup = schedule.warmup_steps
    total = warmup + extra
    factors = [schedule.factor(step, total) for step in range(warmup)]
    assert factors == [(step + 1) / warmup for step in range(warmup)]
    assert schedule.factor(warmup, total) == pytest.approx(1, abs=1e-12), "then the decay begins, from 1"


def test_warm_up_may_begin_above_nought():
    """As where the rate rises from that of a small batch to that of a large one (Goyal 2017)."""
    schedule = Constant(warmup_steps=4, warmup_from=0.2)
    assert [schedule.factor(step, 10) for step in range(5)] == pytest.approx([0.4, 0.6, 0.8, 1, 1])
    flat = Constant(warmup_steps=4, warmup_from=1)
    assert [flat.factor(step, 10) for step in range(5)] == [1, 1, 1, 1, 1]


@always
@given(schedule=schedules, extra=st.integers(1, 200))
def test_decay_falls_from_one_to_the_final_factor_and_stays_there(schedule, extra):
    total = schedule.warmup_steps + extra
    factors = [schedule.factor(step, total) for step in range(schedule.warmup_steps, total + 5)]
    assert all(after <= before + 1e-12 for before, after in pairwise(factors))
    assert factors[extra:] == pytest.approx([final_of(schedule)] * 5, abs=1e-12)


@always
@given(schedule=schedules, total=st.integers(1, 100), step=st.integers(0, 300))
def test_a_factor_is_a_finite_number_from_nought_to_one(schedule, total, step):
    """Also where warm-up is as long as the training, or longer."""
    factor = schedule.factor(step, total)
    assert math.isfinite(factor)
    assert 0 <= factor <= 1 + 1e-12


def test_the_forms_are_those_of_their_names():
    assert [Linear(final_factor=0.2).factor(step, 4) for step in range(5)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    half = math.sqrt(0.5)
    expected = [1, (1 + half) / 2, 0.5, (1 - half) / 2, 0]
    assert [Cosine(final_factor=0).factor(step, 4) for step in range(5)] == pytest.approx(expected)
    assert [Polynomial().factor(step, 4) for step in range(5)] == pytest.approx([1, 9 / 16, 1 / 4, 1 / 16, 0])
    assert [Polynomial(power=0.5).factor(step, 4) for step in (1, 3)] == pytest.approx([math.sqrt(0.75), 0.5])
    assert [Constant(warmup_steps=2).factor(step, 4) for step in range(5)] == [0.5, 1, 1, 1, 1]


@always
@given(final=finals, total=st.integers(1, 50), step=st.integers(0, 60))
def test_linear_and_cosine_without_decay_are_constant(final, total, step):
    line = Polynomial(power=1, final_factor=final).factor(step, total)
    assert line == pytest.approx(Linear(final_factor=final).factor(step, total), abs=1e-12)
    for schedule in (Linear(final_factor=1), Cosine(final_factor=1), Polynomial(final_factor=1)):
        assert schedule.factor(step, total) == Constant().factor(step, total)
    low, high = Cosine(final_factor=0).factor(step, total), Cosine(final_factor=final).factor(step, total)
    assert high == pytest.approx(final + (1 - final) * low, abs=1e-12), "a final factor squeezes the same curve"


@pytest.mark.parametrize(
    "fields",
    [
        {"warmup_steps": -1},
        {"warmup_steps": 1.5},
        {"warmup_from": -0.1},
        {"warmup_from": 2},
        {"name": "polynomial", "power": 0},
        {"name": "cosine", "final_factor": -0.1},
        {"name": "cosin"},
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_when_it_is_made(fields):
    with pytest.raises(ValidationError, match=list(fields)[-1]):
        LearningRate.model_validate({"name": "linear", **fields})
