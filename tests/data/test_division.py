"""Global batches that change: one order of samples all the same."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_order import batch_of, positions_of, walk

from paceline.comm import LocalGroup
from paceline.data import GlobalOrder, Interval, Loader
from paceline.data.division import Batches
from paceline.data.map_source import MapSource
from paceline.errors import SettingsError

always = settings(deadline=None, derandomize=True, max_examples=60)
changes_of = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), max_size=4, unique_by=lambda pair: pair[0])


@always
@given(
    size=st.integers(1, 60),
    first=st.integers(1, 30),
    changes=changes_of,
    resumed=st.integers(1, 49),
    tail=st.sampled_from(["short", "drop", "join"]),
)
def test_steps_and_positions_are_those_of_a_walk(size, first, changes, resumed, tail):
    if tail == "drop":
        first, changes = min(first, size), [(step, min(batch, size)) for step, batch in changes]
    order, size_of = GlobalOrder(size, tail=tail), batch_of(first, changes)
    batches, late = Batches(order, first, sorted(changes)), Batches(order, first, sorted(changes))
    steps = walk(positions_of(size), size_of, tail, num_steps=50)
    late.resume(resumed, steps[resumed - 1][-1] + 1)
    for step, positions in enumerate(steps):
        start, end = positions[0], positions[-1] + 1
        for one in [batches, late] if step >= resumed else [batches]:
            assert one.position_of(step) == start
            assert (one.step_of(start), one.step_of(end - 1), one.step_of(end)) == (step, step, step + 1)
            assert (one.at(start), one.at(end)) == (size_of(step), size_of(step + 1))


def test_a_change_takes_the_place_of_what_was_to_come_there():
    batches = Batches(GlobalOrder(100), 10, [(4, 20), (8, 30)])
    batches.change(30, 5)
    assert [batches.at(position) for position in (0, 29, 30, 95, 1000)] == [10, 10, 5, 5, 5]
    assert (batches.step_of(30), batches.step_of(45), batches.position_of(6)) == (3, 6, 45)
    assert batches.newest == 5
    copy = Batches(GlobalOrder(100), 10, [(4, 20)])
    copy.load(batches.state(20))
    assert [(copy.at(position), copy.step_of(position)) for position in (20, 30, 45)] == [(10, 2), (5, 3), (5, 6)]


def make_loaders(num_workers, **options):
    source = MapSource([(float(index), index) for index in range(50)])
    return [Loader(source, 6, group=group, **options) for group in LocalGroup.create(num_workers)]


def read(loader, num_steps):
    """Return the targets and intervals of a worker's steps, each with how many micro-batches it was cut into."""
    steps, parts = [], []
    for batch in loader:
        parts.append(batch.targets[: batch.num_samples].tolist())
        if batch.last:
            steps.append((parts, batch.interval))
            parts = []
        if len(steps) == num_steps:
            break
    return steps


CHANGES = [(3, 12), (5, 9), (9, 24)]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("num_processes", [0, 2])
def test_workers_together_read_the_same_steps_however_many(num_workers, num_processes):
    expected = walk(positions_of(50), batch_of(6, CHANGES), num_steps=12)
    order, size_of = GlobalOrder(50), batch_of(6, CHANGES)
    options = {"changes": CHANGES, "num_processes": num_processes, "adds_micro_batches": True}
    by_worker = [read(loader, 12) for loader in make_loaders(num_workers, **options)]
    for step, positions in enumerate(expected):
        interval = Interval(positions[0], positions[-1] + 1)
        parts = [part for worker in by_worker for part in worker[step][0]]
        assert list(itertools.chain(*parts)) == order.samples_at(interval).tolist()
        assert {worker[step][1] for worker in by_worker} == {interval}
        # As many micro-batches as keep each no larger than the first ones.
        assert {len(worker[step][0]) for worker in by_worker} == {-(-size_of(step) // 6)}
        assert max(map(len, parts)) <= -(-6 // num_workers)


def test_without_more_micro_batches_they_grow():
    (loader,) = make_loaders(1, changes=CHANGES, num_micro_batches=2)
    steps = read(loader, 10)
    sizes = [[len(part) for part in parts] for parts, _ in steps]
    assert sizes == [[3, 3]] * 3 + [[6, 6]] * 2 + [[4, 4]] + [[5, 4]] * 3 + [[12, 11]]


@pytest.mark.parametrize("stopped_after", [2, 3, 7])
@pytest.mark.parametrize("num_later", [1, 3])
def test_a_loader_goes_on_in_the_middle_at_any_number_of_workers(stopped_after, num_later):
    straight = read(make_loaders(1, changes=CHANGES)[0], 14)
    (first,) = make_loaders(1, changes=CHANGES)
    read(first, stopped_after)
    state = first.state_dict()
    later = make_loaders(num_later, changes=CHANGES)
    for loader in later:
        loader.load_state_dict(state)
    by_worker = [read(loader, 14 - stopped_after) for loader in later]
    for step, (parts, interval) in enumerate(straight[stopped_after:]):
        assert all(worker[step][1] == interval for worker in by_worker)
        assert [x for worker in by_worker for part in worker[step][0] for x in part] == parts[0]


@pytest.mark.parametrize("num_processes", [0, 2])
def test_a_change_while_training_leaves_alone_what_was_read_ahead(num_processes):
    loaders = make_loaders(2, num_processes=num_processes)
    seen = []
    for loader in loaders:
        intervals = []
        for batch in loader:
            loader.ack(batch)
            intervals.append(batch.interval)
            if len(intervals) == 4:
                start = loader.change_batch(16)
                assert loader.newest_batch == 16
            if len(intervals) == 14:
                break
        sizes = [interval.num_samples for interval in intervals]
        changed = next(number for number, interval in enumerate(intervals) if interval.start == start)
        assert changed >= 4
        assert set(sizes[:changed]) <= {6, 2}  # 50 = 8 * 6 + 2
        assert sizes[changed] == 16 or intervals[changed].stop % 50 == 0
        assert 16 in sizes
        seen.append(intervals)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("tail", ["short", "drop", "join"])
def test_a_change_while_training_moves_no_end_of_epochs(tail):
    seen = []
    for loader in make_loaders(2, num_epochs=3, drop_last=tail == "drop", join_epochs=tail == "join"):
        intervals, starts = [], []
        for batch in loader:
            loader.ack(batch)
            intervals.append(batch.interval)
            if len(intervals) in (4, 12):
                starts.append(loader.change_batch({4: 4, 12: 16}[len(intervals)]))
                num_steps = len(intervals) + len(loader)
        assert len(intervals) == num_steps
        seen.append((intervals, starts))
    assert seen[0] == seen[1]
    steps = [sum(interval.stop <= start for interval in intervals) for start in starts]
    expected = walk(positions_of(50, 3), batch_of(6, zip(steps, (4, 16), strict=True)), tail)
    assert intervals == [(positions[0], positions[-1] + 1) for positions in expected]


def test_shares_follow_the_batch():
    loader = make_loaders(2, shares=[2, 1], changes=[(2, 12)])[0]
    assert loader.shares == [4, 2]
    read(loader, 2)
    assert (loader.global_batch, loader.shares) == (12, [8, 4])


def test_a_batch_below_the_number_of_workers_is_refused():
    with pytest.raises(SettingsError, match="at least the number of workers, but got 2 for 3"):
        make_loaders(3, changes=[(4, 2)])
    loader = make_loaders(3)[0]
    with pytest.raises(SettingsError, match="at least the number of workers, but got 2 for 3"):
        loader.change_batch(2)
