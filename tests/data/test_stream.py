"""Iterable data sets: every worker reads all and keeps its share; resumed by counting."""

import json

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from naive_order import batch_of, walk
from torch.utils.data import DataLoader, IterableDataset

from paceline.comm import LocalGroup
from paceline.data import Loader
from paceline.data.stream import Stream
from paceline.errors import DataError, SettingsError


class Numbers(IterableDataset):
    """Epochs of given sizes; each sample says which epoch it is of, and its place there."""

    def __init__(self, *sizes):
        self.sizes = sizes
        self.epoch = 0
        self.num_read = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for place in range(self.sizes[self.epoch % len(self.sizes)]):
            self.num_read += 1
            yield self.epoch, float(place)


class Once(IterableDataset):
    """Samples that come once, as from a socket."""

    def __init__(self, num_samples):
        self._samples = iter([(float(number), number) for number in range(num_samples)])

    def __iter__(self):
        return self._samples


def make_loaders(sizes, global_batch, num_workers, **options):
    return [Loader(Numbers(*sizes), global_batch, group=group, **options) for group in LocalGroup.create(num_workers)]


def read(loader, num_steps):
    """Return the samples of the next steps that count, fewer at the end, and where each step ends."""
    steps, step = [], []
    for batch in loader if num_steps else []:
        epochs, places = batch.data
        assert len(epochs) == len(places) == max(1, batch.num_samples), "an empty share borrows one sample"
        step += [(int(epoch), int(place)) for epoch, place in zip(epochs, places, strict=True)][: batch.num_samples]
        if batch.last:
            steps.append((step, batch.interval.stop))
            step = []
        if len(steps) == num_steps:
            break
    return steps


shares_of = st.lists(st.integers(0, 3).map(float), min_size=1, max_size=3).filter(any)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    first=st.integers(3, 25),
    changes=st.lists(st.tuples(st.integers(1, 6), st.integers(3, 9)), max_size=1),
    phases=st.lists(st.tuples(shares_of, st.integers(1, 2), st.integers(0, 4)), min_size=1, max_size=3),
    num_epochs=st.integers(1, 4),
    num_steps=st.none() | st.integers(1, 9),
)
@example(sizes=[4], first=4, changes=[], phases=[([1.0], 1, 1), ([1.0, 1.0], 1, 0)], num_epochs=2, num_steps=None)
def test_a_training_is_that_of_lists_of_samples_wherever_it_is_taken_up_again(
    sizes, first, changes, phases, num_epochs, num_steps
):
    epochs = [[(epoch, place) for place in range(sizes[epoch % len(sizes)])] for epoch in range(num_epochs)]
    steps = walk(epochs, batch_of(first, changes), "join", num_steps)
    state, num_done = None, 0
    options = {"changes": changes, "num_epochs": num_epochs, "num_steps": num_steps}
    for number, (shares, num_micro_batches, num_more) in enumerate(phases):
        loaders = make_loaders(sizes, first, len(shares), shares=shares, num_micro_batches=num_micro_batches, **options)
        for loader in loaders if state else []:
            loader.load_state_dict(json.loads(json.dumps(state)))
        is_last = number == len(phases) - 1
        to_do = steps[num_done : None if is_last else num_done + num_more]
        parts = [read(loader, len(to_do) + is_last) for loader in loaders]
        for expected, *by_worker in zip(to_do, *parts, strict=True):
            assert sum((samples for samples, _ in by_worker), []) == expected
            assert len({stop for _, stop in by_worker}) == 1
        num_done += len(to_do)
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states), "however far each has read ahead"
        state = states[0]
    assert [list(loader) for loader in loaders] == [[] for _ in loaders]


def test_going_on_reads_again_what_the_epoch_had_and_once():
    (loader,) = make_loaders([400], 10, 1, prefetch=1)
    read(loader, 70)
    source = Numbers(400)
    resumed = Loader(source, 10, prefetch=1)
    resumed.load_state_dict(loader.state_dict())
    assert source.num_read == 0, "nothing is read before it is needed"
    ((samples, _),) = read(resumed, 1)
    assert samples == [(1, place) for place in range(300, 310)]
    assert source.num_read <= 300 + 10 * 4, "those before, the step, and what is read ahead"


def test_a_state_is_the_same_however_far_was_read_ahead():
    stream = Stream(Numbers(4, 3), num_epochs=2)
    stream.take(4)
    before = stream.state(4)
    stream.take(1)
    assert stream.state(4) == before == {"epoch": 0, "epoch_start": 0}
    assert stream.state(5) == {"epoch": 1, "epoch_start": 4}
    assert [len(stream.resume(before, 4).take(9)), len(stream.resume(stream.state(5), 5).take(9))] == [3, 2]


def test_left_and_taken_up_again_in_one_process():
    (loader,) = make_loaders([7, 5], 4, 1)
    straight = read(make_loaders([7, 5], 4, 1)[0], 8)
    assert read(loader, 3) + read(loader, 1) + read(loader, 4) == straight


def test_an_end_of_steps_has_a_length_and_one_of_epochs_has_none():
    (loader,) = make_loaders([100], 10, 1, num_steps=7, num_micro_batches=2)
    read(loader, 3)
    assert len(loader) == 8
    assert len(list(loader)) == 8
    for options in ({}, {"num_epochs": 2}, {"num_epochs": 2, "num_steps": 500}):
        with pytest.raises(TypeError, match="data set of known length"):
            len(make_loaders([100], 10, 1, **options)[0])


def test_samples_are_collated_a_share_at_a_time():
    sizes = []

    def pad(samples):
        sizes.append(len(samples))
        return {"x": torch.nn.utils.rnn.pad_sequence([torch.ones(int(place) + 1) for _, place in samples])}

    (first, _) = make_loaders([9], 6, 2, shares=[2.0, 1.0], collate_fn=pad, num_epochs=1)
    shapes = [batch.data["x"].shape for batch in first]
    assert shapes == [(4, 4), (8, 2)], "6 samples, then 3: the longest of this worker's 4, and of its 2"
    assert sizes == [4, 2]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_fewer_samples_than_workers_leave_some_empty(num_workers):
    loaders = make_loaders([2], 4, num_workers, num_epochs=1)
    steps = [list(loader) for loader in loaders]
    assert [[batch.num_samples for batch in step] for step in steps] == {1: [[2]], 3: [[1], [1], [0]]}[num_workers]
    assert [len(batch.data[0]) for (batch,) in steps] == {1: [2], 3: [1, 1, 1]}[num_workers]


def test_a_data_set_without_samples_is_refused():
    with pytest.raises(DataError, match=r"must yield samples each time .* Numbers yields none in epoch 0"):
        list(Loader(Numbers(0), 4))


def test_a_data_set_that_comes_once_may_be_iterated_once():
    assert [batch.num_samples for batch in Loader(Once(5), 2, num_epochs=1)] == [2, 2, 1]
    with pytest.raises(DataError, match=r"Once yields none in epoch 1; .* give Loader num_epochs=1"):
        list(Loader(Once(5), 2))
    loader = Loader(Once(100), 2)
    next(iter(loader))
    with pytest.raises(DataError, match=r"must begin anew each time .* Once continues where it was left"):
        next(iter(loader))


def test_a_data_set_that_has_become_shorter_is_refused():
    (loader,) = make_loaders([20], 5, 1)
    read(loader, 3)
    other = Loader(Numbers(12), 5)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="Numbers has 12 samples in epoch 0, of which 15 were used"):
        next(iter(other))


def test_states_of_iterable_data_and_of_others_are_kept_apart():
    iterable, other = Loader(Numbers(9), 3), Loader([(1.0, 1)] * 9, 3)
    for one, state in ((iterable, other.state_dict()), (other, iterable.state_dict())):
        with pytest.raises(DataError, match="must be iterable where that of the checkpoint is"):
            one.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shuffle": True}, "shuffle in the data set itself"),
        (
            {"drop_last": True},
            "drop_last must be false .*, but got true; leave it out: the last samples",
        ),
        ({"num_processes": 2}, "num_processes must be 0 .*, but got 2; leave it out"),
        ({"dispatcher": object()}, "the rule must be synchronous .* take every_step"),
    ],
)
def test_what_needs_an_index_is_refused(options, words):
    with pytest.raises(SettingsError, match=words):
        Loader(Numbers(9), 3, **options)


def test_a_data_loader_of_one_is_taken_apart():
    loader = Loader(
        DataLoader(Numbers(5), batch_size=2, collate_fn=lambda samples: torch.tensor(samples)), num_epochs=1
    )
    assert [batch.data.shape for batch in loader] == [(2, 2), (2, 2), (1, 2)]
    with pytest.raises(SettingsError, match=r"num_processes must be 0 .*, but got 1"):
        Loader(DataLoader(Numbers(5), batch_size=2, num_workers=1))
