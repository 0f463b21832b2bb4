import contextlib
import gc
import itertools
import json
import multiprocessing
import signal
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from naive_order import batch_of, positions_of, walk
from torch.utils.data import Dataset, TensorDataset

from paceline.comm import LocalGroup
from paceline.data import Full, GlobalOrder, Interval, Loader, MapSource, Sequential, Source, Spec, apportion
from paceline.data.batch import is_borrowed
from paceline.errors import DataError, SettingsError


class Numbers(Source):
    """Samples that are their own index, so that what was read can be told."""

    spec = Spec(num_classes=2, input_shape=())

    def __init__(self, num_samples, broken_after=None):
        self.num_samples = num_samples
        self.broken_after = broken_after
        self.num_reads = 0

    def __len__(self):
        return self.num_samples

    def read(self, indices):
        if self.num_reads == self.broken_after:
            raise OSError("the disk is gone")
        self.num_reads += 1
        samples = torch.from_numpy(np.array(indices))
        return samples, samples * 10


def make_loaders(num_samples, global_batch, num_workers, **options):
    groups = LocalGroup.create(num_workers)
    return [Loader(Numbers(num_samples), global_batch, group=group, **options) for group in groups]


def take(loader, num_steps):
    """Return the micro-batches of each of the next steps, which count as done."""
    with contextlib.closing(iter(loader)) as batches:
        steps = []
        for _ in range(num_steps):
            step = list(itertools.islice(batches, loader.num_micro_batches))
            assert [batch.last for batch in step] == [False] * (len(step) - 1) + [True]
            loader.ack(step[-1])
            steps.append(step)
        return steps


def counted(step):
    """Return the samples of a step's micro-batches that count, in order."""
    samples = []
    for batch in step:
        assert torch.equal(batch.targets, batch.inputs * 10), "targets are those of the inputs"
        if batch.num_samples == 0:
            assert len(batch.inputs) == 1, "an empty share borrows one sample"
        else:
            assert len(batch.inputs) == batch.num_samples
            samples += batch.inputs.tolist()
    return samples


shares_of = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=4).filter(lambda shares: sum(shares) > 0)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    num_samples=st.integers(1, 30),
    shares=shares_of,
    extra=st.integers(0, 12),
    num_micro_batches=st.integers(1, 4),
    shuffle=st.booleans(),
)
@example(num_samples=11, shares=[1.0, 0.0, 2.0], extra=5, num_micro_batches=3, shuffle=True)
def test_workers_together_read_the_global_batch_in_order(num_samples, shares, extra, num_micro_batches, shuffle):
    options = {"shares": shares, "num_micro_batches": num_micro_batches, "shuffle": shuffle, "seed": 7}
    loaders = make_loaders(num_samples, len(shares) + extra, len(shares), **options)
    arrangement = (Full() if shuffle else Sequential()).arrange([num_samples], 7)
    order = GlobalOrder(num_samples, seed=7, arrangement=arrangement)
    position = 0
    for steps in zip(*[take(loader, 5) for loader in loaders], strict=True):
        intervals = {batch.interval for step in steps for batch in step}
        assert len(intervals) == 1, "all workers and micro-batches are of one global batch"
        (interval,) = intervals
        assert interval == order.next_batch(position, len(shares) + extra)
        assert sum((counted(step) for step in steps), []) == order.samples_at(interval).tolist()
        borrowed = [int(b.inputs[0]) for step in steps for b in step if b.num_samples == 0]
        assert set(borrowed) <= set(order.samples_at(interval).tolist())
        position = interval.stop
    assert [loader.position for loader in loaders] == [position] * len(shares)


def test_a_share_of_zero_counts_for_nothing():
    full, empty = make_loaders(20, 8, 2, shares=[1.0, 0.0])
    for mine, theirs in zip(take(full, 4), take(empty, 4), strict=True):
        assert mine[0].num_samples == mine[0].interval.num_samples
        assert theirs[0].num_samples == 0
        assert theirs[0].inputs.shape == theirs[0].targets.shape == (1,)


@pytest.mark.parametrize("is_left", [False, True])
def test_a_thread_knows_whether_it_was_given_a_borrowed_sample_until_the_loop_ends(is_left):
    loader = Loader(TensorDataset(torch.arange(4)), 3, group=LocalGroup(), num_epochs=1, num_micro_batches=2)
    seen = []
    for batch in loader:
        seen.append((batch.num_samples, is_borrowed()))
        if is_left and len(seen) == 4:
            break
    assert seen == [(2, False), (1, False), (1, False), (0, True)]
    gc.collect()
    assert not is_borrowed()


def test_fewer_samples_than_micro_batches_leave_some_empty():
    (loader,) = make_loaders(100, 3, 1, num_micro_batches=5)
    (step,) = take(loader, 1)
    assert [batch.num_samples for batch in step] == [1, 1, 1, 0, 0]
    assert counted(step) == loader.order.samples_at(step[0].interval).tolist()


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    num_samples=st.integers(5, 25),
    phases=st.lists(st.tuples(shares_of, st.integers(4, 9), st.integers(0, 4)), min_size=2, max_size=4),
)
def test_resuming_at_any_number_of_workers_uses_each_sample_once_an_epoch(num_samples, phases):
    state, used = None, []
    for shares, global_batch, num_steps in phases:
        loaders = make_loaders(num_samples, global_batch, len(shares), shares=shares)
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
        for steps in zip(*[take(loader, num_steps) for loader in loaders], strict=True):
            used += sum((counted(step) for step in steps), [])
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states), "any worker's state is that of all"
        state = states[0]
    order = GlobalOrder(num_samples)
    epochs = [order.samples_at(order.next_batch(n * num_samples, num_samples)).tolist() for n in range(len(used))]
    assert used == sum(epochs, [])[: len(used)]


@st.composite
def trainings(draw):
    """Draw the settings of a training, with an end, and on which workers its parts are done."""
    num_samples = draw(st.integers(1, 25))
    phases = draw(st.lists(st.tuples(shares_of, st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=3))
    tail = draw(st.sampled_from(["short", "drop", "join"]))
    fewest = max(len(shares) for shares, _, _ in phases)
    most = num_samples if tail == "drop" else fewest + 30
    assume(fewest <= most)
    sizes = st.integers(fewest, most)
    changes = draw(st.lists(st.tuples(st.integers(1, 12), sizes), max_size=2, unique_by=lambda change: change[0]))
    ends = {"num_epochs": draw(st.integers(1, 4)), "num_steps": draw(st.integers(1, 12))}
    kept = draw(st.sampled_from([["num_epochs"], ["num_steps"], ["num_epochs", "num_steps"]]))
    options = {"drop_last": tail == "drop", "join_epochs": tail == "join", "changes": sorted(changes)}
    options |= {name: ends[name] for name in kept} | {"adds_micro_batches": draw(st.booleans())}
    return num_samples, draw(sizes), tail, phases, options


@settings(deadline=None, derandomize=True, max_examples=60)
@given(trainings())
@example((10, 4, "join", [([1.0], 1, 2)], {"join_epochs": True, "num_epochs": 1}))
@example((10, 4, "drop", [([1.0], 1, 2), ([1.0], 1, 0)], {"drop_last": True, "num_epochs": 3, "changes": [(2, 2)]}))
@example((1, 2, "short", [([0.0, 1.0], 2, 1)], {"num_epochs": 3}))
def test_a_training_is_that_of_lists_of_samples_wherever_it_is_taken_up_again(training):
    num_samples, first, tail, phases, options = training
    epochs = positions_of(num_samples, options.get("num_epochs"))
    steps = walk(epochs, batch_of(first, options.get("changes", [])), tail, options.get("num_steps"))
    order, state, num_done = GlobalOrder(num_samples), None, 0
    for number, (shares, num_micro_batches, num_steps) in enumerate(phases):
        loaders = make_loaders(
            num_samples, first, len(shares), shares=shares, num_micro_batches=num_micro_batches, **options
        )
        for loader in loaders if state else []:
            loader.load_state_dict(json.loads(json.dumps(state)))
        is_last = number == len(phases) - 1
        lengths, to_do = (
            {len(loader) for loader in loaders},
            steps[num_done : None if is_last else num_done + num_steps],
        )
        parts = [read(loader, len(to_do) + is_last) for loader in loaders]  # one more than there are, at the end
        assert not is_last or lengths == {sum(len(step) for step in one) for one in parts}
        assert {len(one) for one in parts} == {len(to_do)}
        for positions, *by_worker in zip(to_do, *parts, strict=True):
            expected = order.samples_at(Interval(positions[0], positions[-1] + 1)).tolist()
            assert sum(map(counted, by_worker), []) == expected
        num_done += len(to_do)
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert {len(loader) for loader in loaders} == {0}
    assert [list(loader) for loader in loaders] == [[] for _ in loaders]


def read(loader, num_steps):
    """Return the micro-batches of the next steps, fewer at the end; the loop is left as by break."""
    steps, step = [], []
    for batch in loader if num_steps else []:
        step.append(batch)
        if batch.last:
            steps.append(step)
            step = []
            if len(steps) == num_steps:
                break
    assert not step
    return steps


def test_a_batch_counts_when_it_is_acknowledged_or_the_next_is_asked_for_or_the_loop_is_left():
    (loader,) = make_loaders(100, 10, 1)
    with contextlib.closing(iter(loader)) as batches:
        first = next(batches)
        assert loader.position == 0, "read is not used"
        loader.ack(first)
        loader.ack(first)
        assert loader.position == 10
        next(batches)
        assert loader.position == 10
        next(batches)
        assert loader.position == 20
        assert loader.state_dict()["low_water"] == 30, "a state is taken after the update with the batch in hand"
        next(batches)
    again = next(iter(loader))
    assert tuple(again.interval) == (40, 50), "the loop was left, as by break after the step: its batch is used"


def test_half_a_step_is_no_step():
    (loader,) = make_loaders(100, 10, 1, num_micro_batches=2)
    with contextlib.closing(iter(loader)) as batches:
        next(batches)
        assert not next(batches).interval.start
        assert loader.position == 0
        assert next(batches).interval.start == 10
        with pytest.raises(DataError, match="after the last micro-batch of a step"):
            loader.state_dict()
    assert loader.state_dict()["low_water"] == 10, "the loop was left in the middle of a step, which is to come again"


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_loader_processes_read_the_same_batches(num_micro_batches):
    options = {"shares": [3.0, 0.0, 1.0], "num_micro_batches": num_micro_batches, "seed": 3}
    for rank in range(2):
        thread = make_loaders(23, 6, 3, **options)[rank]
        processes = make_loaders(23, 6, 3, num_processes=2, **options)[rank]
        for steps in zip(take(thread, 9), take(processes, 9), strict=True):
            for one, other in zip(*steps, strict=True):
                assert torch.equal(one.inputs, other.inputs)
                assert torch.equal(one.targets, other.targets)
                assert (one.num_samples, one.interval, one.last) == (
                    other.num_samples,
                    other.interval,
                    other.last,
                )


def wait_until(is_true):
    return any(is_true() or time.sleep(0.01) for _ in range(3000))


BEFORE: set[threading.Thread] = set()
"""Threads that failed or abandoned loops of other tests have left."""


@pytest.fixture(autouse=True)
def threads_before():
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "paceline-loader" and thread not in BEFORE]


@pytest.mark.parametrize("num_processes", [0, 2])
@pytest.mark.parametrize("num_taken", [1, 4])
def test_nothing_is_left_when_the_iterator_is_closed(num_processes, num_taken):
    (loader,) = make_loaders(1000, 10, 1, num_processes=num_processes)
    batches = iter(loader)
    for _ in range(num_taken):
        next(batches)
    assert len(loader_threads()) == 1
    batches.close()
    assert loader_threads() == []
    del batches
    gc.collect()
    assert wait_until(lambda: not multiprocessing.active_children())


def test_an_older_loop_takes_nothing_from_a_newer_one():
    for _ in range(30):
        (loader,) = make_loaders(100, 10, 1)
        older = iter(loader)
        next(older)  # and reads ahead while the newer one begins
        assert [step[0].interval.start for step in read(loader, 6)] == [0, 10, 20, 30, 40, 50]
        assert loader_threads() == [], "the older one's has ended too"
        with pytest.raises(DataError, match="iterated once at a time"):
            next(older)


def test_an_older_loop_that_is_left_uses_nothing_of_a_newer_one():
    (loader,) = make_loaders(100, 10, 1)
    older, newer = iter(loader), iter(loader)
    assert next(older).interval == next(newer).interval
    older.close()
    assert loader.position == 0
    newer.close()
    assert loader.position == 10


@pytest.mark.parametrize("num_processes", [0, 1])
def test_nothing_is_left_when_a_loop_ends_by_break_or_by_an_error_or_at_its_end(num_processes):
    (loader,) = make_loaders(100, 10, 1, num_processes=num_processes, num_steps=4)
    handler = signal.getsignal(signal.SIGINT)
    for _ in loader:
        break
    assert loader_threads() == []
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in loader]
    assert loader_threads() == []
    assert [batch.interval.start for batch in loader] == [20, 30]
    assert loader_threads() == []
    assert signal.getsignal(signal.SIGINT) == handler
    gc.collect()
    assert wait_until(lambda: not multiprocessing.active_children())


@pytest.mark.parametrize("prefetch", [1, 3])
def test_no_more_is_read_ahead_than_was_asked_for(prefetch):
    source = Numbers(1000)
    with contextlib.closing(iter(Loader(source, 10, prefetch=prefetch))) as batches:
        next(batches)
        assert wait_until(lambda: source.num_reads >= 1 + prefetch), "it reads while the batch is used"
        time.sleep(0.05)
        assert source.num_reads <= 2 + prefetch, "one used, those ready, and one in hand"


def test_an_error_of_the_source_surfaces_after_the_batches_before_it():
    batches = iter(Loader(Numbers(100, broken_after=3), 10, prefetch=2))
    assert [next(batches).interval.start for _ in range(3)] == [0, 10, 20]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert loader_threads() == []


@pytest.mark.parametrize(("num_workers", "global_batch"), [(2, 1), (5, 4)])
def test_a_global_batch_smaller_than_the_number_of_workers_is_refused(num_workers, global_batch):
    with pytest.raises(SettingsError, match=f"number of workers, but got {global_batch} for {num_workers} workers"):
        make_loaders(100, global_batch, num_workers)


@pytest.mark.parametrize(
    "shares",
    [
        [1.0],
        [1.0, 1.0, 1.0],
        [2.0, -1.0],
        [0.0, 0.0],
        [float("nan"), 1.0],
        [float("inf"), 1.0],
        [1e308, 1e308],
    ],
    ids=str,
)
def test_shares_that_divide_nothing_are_refused(shares):
    with pytest.raises(SettingsError, match="shares must be 2 weights"):
        make_loaders(100, 10, 2, shares=shares)


def test_no_micro_batches_are_refused_when_the_loader_is_made():
    with pytest.raises(SettingsError, match="num_micro_batches"):
        Loader(Numbers(100), 10, num_micro_batches=0)


@pytest.mark.parametrize(
    ("name", "other"), [("seed", Loader(Numbers(50), 5, seed=1)), ("num_samples", Loader(Numbers(51), 5))]
)
def test_a_state_of_other_data_is_refused(name, other):
    loader = Loader(Numbers(50), 5)
    with pytest.raises(DataError, match=f"the data's {name} must be that of the checkpoint"):
        loader.load_state_dict(other.state_dict())


def test_a_state_of_an_order_without_shuffling_is_refused_by_one_with():
    state = Loader(Numbers(50), 5, shuffle=False).state_dict()
    with pytest.raises(DataError, match=r"order must be that of the checkpoint, but got \{'name': 'full'\} instead"):
        Loader(Numbers(50), 5).load_state_dict(state)


def test_an_empty_data_set_is_refused():
    with pytest.raises(SettingsError, match="the data set is empty"):
        Loader(Numbers(0), 5)


def test_any_torch_data_set_of_pairs_will_do():
    inputs, targets = torch.randn(9, 2, 3), torch.arange(9)
    loader = Loader(TensorDataset(inputs, targets), 4, shuffle=False)
    steps = take(loader, 3)
    assert [len(step[0].inputs) for step in steps] == [4, 4, 1], "an epoch's last batch is shorter"
    assert torch.equal(torch.cat([step[0].inputs for step in steps]), inputs)
    assert torch.equal(torch.cat([step[0].targets for step in steps]), targets)


def test_plain_numbers_are_collated_as_torch_does_it():
    class Squares(Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return np.float32(index), index**2

    source = MapSource(Squares())
    inputs, targets = source.read(np.array([3, 1], dtype=np.int64))
    assert (inputs.tolist(), inputs.dtype) == ([3.0, 1.0], torch.float32)
    assert (targets.tolist(), targets.dtype) == ([9, 1], torch.int64)
    assert len(source) == 5
    assert source[4][1] == 16


def test_batches_are_moved_to_the_devices_of_their_group():
    group = LocalGroup(device=torch.device("meta"))
    batch = next(iter(Loader(Numbers(10), 2, group=group)))
    assert batch.inputs.device.type == batch.targets.device.type == "meta"
    assert batch.num_samples == 2


def test_two_iterators_at_once_are_refused():
    (loader,) = make_loaders(100, 10, 1)
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    with pytest.raises(DataError, match="iterated once at a time"):
        next(first)
    second.close()


@pytest.mark.parametrize(
    ("num_processes", "num_micro_batches", "prefetch"),
    [(0, 1, 2), (0, 3, 0), (0, 2, 5), (2, 1, 2), (2, 4, 1), (1, 2, 3)],
)
def test_changed_shares_leave_alone_what_was_read_ahead(num_processes, num_micro_batches, prefetch):
    """At their own pace of reading, all workers come to the same position, and the order stays."""
    options = {"num_processes": num_processes, "num_micro_batches": num_micro_batches, "prefetch": prefetch}
    loaders = make_loaders(50, 8, 2, seed=1, **options)
    order, expected, starts = GlobalOrder(50, seed=1), {0: [1.0, 1.0]}, []
    with contextlib.ExitStack() as stack:
        iterators = [stack.enter_context(contextlib.closing(iter(loader))) for loader in loaders]
        for number in range(30):
            steps = [list(itertools.islice(batches, num_micro_batches)) for batches in iterators]
            interval = steps[0][0].interval
            assert sum(map(counted, steps), []) == order.samples_at(interval).tolist()
            weights = expected[max(start for start in expected if start <= interval.start)]
            assert [len(counted(step)) for step in steps] == apportion(interval.num_samples, weights)
            if number % 7 == 3:
                time.sleep(0.1)  # so that all is read ahead that may be
                for loader, step in zip(loaders, steps, strict=True):
                    loader.ack(step[-1])
                new = [1.0 + number % 4, float(number % 5)]
                starts = {loader.change_shares(new) for loader in loaders}
                assert len(starts) == 1
                expected[min(starts)] = new
                assert loaders[0].shares == apportion(8, new)
                assert loaders[0].state_dict() == loaders[1].state_dict()
    assert len([start for start in expected if start <= interval.start]) > 2, "they came into force"


def test_a_state_holds_the_shares_in_force_and_those_to_come():
    (loader,) = make_loaders(1000, 12, 1)
    (first, second) = make_loaders(1000, 12, 2, shares=[2.0, 1.0])
    take(first, 3)
    start = first.change_shares([1.0, 3.0])
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert second.shares == [8, 4], "its own, unless it is told to take on others"
    assert second.load_shares(state)
    after = [step[0] for step in take(second, 8)]
    assert {batch.num_samples for batch in after if batch.interval.start < start} == {4}
    assert {batch.num_samples for batch in after if batch.interval.start >= start} == {9}
    assert not loader.load_shares(state), "they are of another number of workers"
    assert loader.shares == [12]
    with pytest.raises(SettingsError, match="shares must be 2 weights"):
        second.change_shares([1.0])
