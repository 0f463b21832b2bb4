"""Batch schedules against their closed forms."""

import pytest
from pydantic import ValidationError

from paceline.schedules import BatchSchedule, ConstantBatch, GrowingBatch, NoiseScaleBatch, SteppedBatch


def batch_of(changes, first, step):
    return [first, *(batch for start, batch in changes if start <= step)][-1]


@pytest.mark.parametrize(
    ("factor", "interval", "max_batch"), [(2.0, 10, 64), (1.5, 7, 40), (1.05, 1, 30), (3.0, 100, 64), (1.0, 1, 99)]
)
def test_growing_is_its_formula_at_every_step(factor, interval, max_batch):
    changes = GrowingBatch(factor=factor, interval=interval, max_batch=max_batch).plan(8, 120)
    for step in range(120):
        assert batch_of(changes, 8, step) == round(min(max_batch, 8 * factor ** (step // interval)))
    assert all(step < 120 for step, _ in changes)


def test_the_degenerate_schedules_never_change():
    assert ConstantBatch().plan(8, 1000) == []
    assert GrowingBatch(factor=1.0).plan(8, 1000) == []
    assert GrowingBatch(max_batch=8).plan(8, 1000) == []
    assert SteppedBatch().plan(8, 1000) == []
    still = NoiseScaleBatch(min_batch=8, max_batch=8)
    assert {still.choose(noise, 8, 8) for noise in (0.0, 3.0, 1e9, None)} == {8}


def test_stepped_takes_what_is_given():
    schedule = SteppedBatch(steps=((5, 16), (9, 4), (50, 64)))
    assert schedule.plan(8, 20) == [(5, 16), (9, 4)]
    assert schedule.smallest(8) == 4


@pytest.mark.parametrize(
    ("noise", "present", "expected"),
    [
        (40.0, 32, 40),
        (43.0, 32, 40),
        (44.5, 32, 48),
        (1000.0, 32, 64),
        (1.0, 64, 32),
        (1.0, 16, 16),
        (1e9, 100, 128),
        (None, 32, 64),
        (0.0, 32, 16),
    ],
)
def test_a_batch_follows_the_noise_scale_within_bounds(noise, present, expected):
    assert NoiseScaleBatch(min_batch=16, max_batch=128).choose(noise, present, 16) == expected


def test_by_default_it_is_never_below_the_first():
    assert NoiseScaleBatch().choose(0.5, 12, 12) == 12
    assert NoiseScaleBatch().smallest(12) == 12


@pytest.mark.parametrize("steps", [((0, 4),), ((5, 4), (5, 8)), ((5, 0),), ((9, 4), (5, 8))])
def test_steps_that_do_not_ascend_are_refused(steps):
    with pytest.raises(ValidationError, match="must be pairs of ascending steps"):
        SteppedBatch(steps=steps)


def test_ranges_that_hold_no_batch_are_refused():
    with pytest.raises(ValidationError, match="min_batch must be at most max_batch, but got 16 and 8"):
        NoiseScaleBatch(min_batch=16, max_batch=8)
    with pytest.raises(ValueError, match="global_batch must be from 1 to 64 with batch_schedule growing, but got 65"):
        GrowingBatch(max_batch=64).check(65)
    with pytest.raises(ValueError, match="global_batch must be from 16 to 64 with batch_schedule noise_scale"):
        NoiseScaleBatch(min_batch=16, max_batch=64).check(8)


def test_a_schedule_survives_json():
    for schedule in (ConstantBatch(), GrowingBatch(factor=1.5), SteppedBatch(steps=((3, 4),)), NoiseScaleBatch()):
        assert BatchSchedule.model_validate_json(schedule.model_dump_json()) == schedule
