import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from story import make_bucket, make_record, make_timed_step, make_times

from paceline.monitor import Record
from paceline.monitor.timeline import covered_s, find_timed_steps, typical_steps

always = settings(deadline=None, derandomize=True)
SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def test_buckets_that_left_in_the_step_before_count_where_they_landed() -> None:
    early = make_bucket(0, ready_s=-0.03, began_s=-0.02, ended_s=0.01, landed_s=0.01, waited_s=0.005)
    times = make_times(waited_s=0.005, optimizer_began_s=None, optimizer_ended_s=None)
    (step,) = typical_steps(list(find_timed_steps([make_record(early), make_record(times)])))
    assert step.exchange_s == pytest.approx(0.03)
    assert step.hidden_s == pytest.approx(0.025)
    assert step.optimizer_spans == []


@always
@given(SPANS)
def test_covered_time_counts_each_moment_once(spans: list[tuple[int, int]]) -> None:
    assert covered_s(spans) == len({moment for began, ended in spans for moment in range(began, ended)})


def test_what_is_hidden_and_what_is_exposed() -> None:
    (step,) = find_timed_steps(make_timed_step(num_buckets=5))
    assert step.exchange_s == pytest.approx(0.05)
    assert step.times.waited_s == pytest.approx(0.01)
    assert step.hidden_s == pytest.approx(0.04)
    assert step.hidden_share == pytest.approx(0.8)
    assert step.computing_s == pytest.approx(0.09)
    assert step.wire_bytes == 5 * 4_000_000


def test_buckets_side_by_side_are_not_counted_twice() -> None:
    buckets = [make_bucket(n, began_s=0.04, ended_s=0.06) for n in range(3)]
    (step,) = find_timed_steps(make_record(event) for event in (*buckets, make_times()))
    assert step.exchange_s == pytest.approx(0.02)


def test_a_step_without_an_exchange_hides_nothing() -> None:
    (step,) = find_timed_steps([make_record(make_times(waited_s=0.2))])
    assert (step.exchange_s, step.hidden_s, step.hidden_share, step.computing_s) == (0, 0, None, 0)


def test_workers_write_into_one_log_between_each_other() -> None:
    first, second = (make_timed_step(7, num_buckets=n, rank=rank) for rank, n in ((0, 2), (1, 3)))
    mixed = [record for pair in zip(first, second, strict=False) for record in pair] + second[len(first) :]
    found = {step.rank: step for step in find_timed_steps(mixed)}
    assert {rank: [one.bucket for one in step.buckets] for rank, step in found.items()} == {0: [0, 1], 1: [0, 1, 2]}


@pytest.mark.parametrize(
    "records",
    [
        make_timed_step(3)[:-1],
        [make_record(make_times(duration_s=math.nan))],
        [make_record(make_bucket(0, ended_s=math.inf)), make_record(make_times())],
        [make_record(make_times(backward_ended_s=-1.0))],
        [make_record(make_times(), rank=-1)],
    ],
    ids=["unfinished", "nan", "infinite", "negative", "the launcher"],
)
def test_a_step_that_is_not_known_is_left_out(records: list[Record]) -> None:
    good = make_timed_step(4)
    assert [step.step for step in find_timed_steps([*records, *good])] == [4]


def test_a_step_made_again_after_a_restart_has_only_its_own_buckets() -> None:
    torn = make_timed_step(3, num_buckets=4, epoch=0)[:-1]
    (step,) = find_timed_steps([*torn, *make_timed_step(3, num_buckets=2, epoch=1)])
    assert (step.epoch, len(step.buckets)) == (1, 2)


def test_a_typical_step_has_the_medians_of_each_rank() -> None:
    records = [
        record
        for rank, speeds in ((1, (2.0, 2.0, 2.0)), (0, (1.0, 9.0, 1.2)))
        for step, slower in enumerate(speeds)
        for record in make_timed_step(step, slower=slower, rank=rank)
    ]
    first, second = typical_steps(list(find_timed_steps(records)))
    assert (first.rank, second.rank) == (0, 1)
    assert (first.num_steps, second.num_steps) == (3, 3)
    assert first.times.duration_s == pytest.approx(0.12)
    assert second.times.duration_s == pytest.approx(0.2)
    assert first.buckets[1].ended_s == pytest.approx(1.2 * make_bucket(1).ended_s)
    assert first.wire_bytes == 5 * 4_000_000


def test_a_typical_step_is_of_the_newest_buckets_and_the_newest_start() -> None:
    records = [
        *make_timed_step(1, num_buckets=3, epoch=0, rank=1),
        *make_timed_step(1, num_buckets=3, epoch=1),
        *make_timed_step(2, num_buckets=2, epoch=1),
        *make_timed_step(3, num_buckets=2, epoch=1),
    ]
    (step,) = typical_steps(list(find_timed_steps(records)))
    assert (step.rank, step.num_steps, len(step.buckets)) == (0, 2, 2)
    assert typical_steps([]) == []


MOMENTS = st.lists(st.floats(0, 1e6), min_size=5, max_size=5).map(sorted)


@always
@given(st.lists(MOMENTS, min_size=1, max_size=6))
def test_medians_keep_the_order_of_moments(told: list[list[float]]) -> None:
    records = []
    for step, (ready_s, began_s, ended_s, landed_s, duration_s) in enumerate(told):
        bucket = make_bucket(0, ready_s=ready_s, began_s=began_s, ended_s=ended_s, landed_s=landed_s)
        records += [make_record(event, step) for event in (bucket, make_times(duration_s=duration_s))]
    (typical,) = typical_steps(list(find_timed_steps(records)))
    (bucket,) = typical.buckets
    assert bucket.ready_s <= bucket.began_s <= bucket.ended_s <= bucket.landed_s <= typical.times.duration_s
