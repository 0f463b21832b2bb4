import json
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm import LocalGroup
from paceline.data import Loader, MixtureSource, Source, Windows
from paceline.errors import DataError, SettingsError


class Growing(Source):
    """Numbers in shards, to which more are added."""

    def __init__(self, *sizes):
        self.sizes = list(sizes)

    def __len__(self):
        return sum(self.sizes)

    @property
    def shard_sizes(self):
        return self.sizes

    def read(self, indices):
        assert not len(indices) or indices.max() < len(self), "no sample is read before it is there"
        return torch.from_numpy(indices)


def step(loaders, running=None):
    """Return the samples of the next step of all workers, whose iterators may be running."""
    batches = [next(iterator) for iterator in running or map(iter, loaders)]
    for loader, batch in zip(loaders, batches, strict=True):
        if loader.position == batch.interval.start:
            loader.ack(batch)
    return [sample for batch in batches for sample in batch.data[: batch.num_samples].tolist()]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    new=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    grown_after=st.integers(0, 12),
    killed_after=st.integers(0, 12),
    workers=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    order=st.sampled_from(["full", "sequential", Windows(window=2)]),
    tail=st.sampled_from([{}, {"join_epochs": True}]),
)
def test_epochs_have_all_samples_of_their_time(sizes, new, grown_after, killed_after, workers, order, tail):
    source = Growing(*sizes)
    before = len(source)
    options = {"order": order, "grows": True, "prefetch": 0, "num_epochs": 6, **tail}
    loaders = [Loader(source, 4, group=group, **options) for group in LocalGroup.create(workers[0])]
    running, used, starts = [iter(loader) for loader in loaders], [], []
    for number in range(120):
        if number == grown_after:
            source.sizes += new
            starts = [loader.grow() for loader in loaders]
            assert len(set(starts)) == 1
        if number == killed_after:
            state = json.loads(json.dumps(loaders[0].state_dict()))
            loaders = [Loader(source, 4, group=group, **options) for group in LocalGroup.create(workers[1])]
            for iterator in running:
                iterator.close()
            for loader in loaders:
                loader.load_state_dict(state)
            running = [iter(loader) for loader in loaders]
        if loaders[0]._ending.is_reached(loaders[0].position):
            break
        used += step(loaders, running)
    for iterator in running:
        iterator.close()
    start = starts[0] if starts and starts[0] is not None else len(used)
    assert start % before == 0 or start == len(used)
    position = 0
    for _ in range(6):
        size = before if position < start else len(source)
        assert sorted(used[position : position + size]) == list(range(size))
        position += size
    assert position == len(used)


def test_changes_of_the_batch_stay_at_their_steps():
    source = Growing(10)
    loader = Loader(source, 5, grows=True, prefetch=0, changes=[(8, 4)])
    source.sizes += [3]
    assert loader.grow() == 10
    assert loader._batches.position_of(8) == 36
    assert [len(step([loader])) for _ in range(13)] == [5, 5, 5, 5, 3, 5, 5, 3, 4, 4, 4, 1, 4]


def test_a_loop_may_grow_its_data_while_all_that_may_be_read_ahead_has_been():
    source = Growing(10)
    loader, used = Loader(source, 5, grows=True, num_steps=10), []
    for number, batch in enumerate(loader):
        used += batch.data.tolist()
        if number == 1:
            source.sizes.append(3)
            while loader._ledger.next_claim < 25:  # the current step, two that are ready, and one more
                time.sleep(0.01)
            assert loader.grow() == 30
    assert [sorted(used[start : start + 10]) for start in (0, 10, 20)] == [list(range(10))] * 3
    assert sorted(used[30:43]) == list(range(13))


def test_growth_is_asked_for_and_refused_where_it_cannot_be():
    source = Growing(10)
    with pytest.raises(SettingsError, match=r"give Loader\(grows=True\)"):
        Loader(source, 5).grow()
    with pytest.raises(SettingsError, match="grows must be false for a MixtureSource"):
        Loader(MixtureSource([source]), 5, grows=True)
    with pytest.raises(SettingsError, match="num_processes must be 0 for data that grows"):
        Loader(source, 5, grows=True, num_processes=1)
    loader = Loader(source, 5, grows=True)
    assert loader.grow() is None
    source.sizes = [9]
    with pytest.raises(DataError, match="must keep its samples, but got 9 after 10"):
        loader.grow()
    state = Loader(Growing(10), 5, grows=True).state_dict()
    with pytest.raises(DataError, match="num_samples must be that of the checkpoint"):
        Loader(source, 5, grows=True).load_state_dict(state)
    with pytest.raises(DataError, match="num_samples must be that of the checkpoint"):
        Loader(Growing(10, 5), 5).load_state_dict(state)


class Announced(Growing):
    """The same, which keeps what it is told of the samples to come."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.told = []

    def expect(self, upcoming):
        self.told.append((upcoming.position, upcoming.samples(upcoming.position, upcoming.stop).tolist()))


def test_a_source_that_fetches_ahead_is_told_anew_of_what_comes_once_its_data_has_grown():
    source = Announced(5, 4)
    loader = Loader(source, 3, order="sequential", grows=True, prefetch=0, num_epochs=3)
    running, used = iter(loader), []
    for _ in range(4):
        used += step([loader], [running])
    source.sizes.append(3)
    assert loader.grow() == 18
    while len(used) < 30:
        used += step([loader], [running])
    assert used == [*range(9), *range(9), *range(12)]
    assert source.told == [(0, [*range(9)] * 3), (15, used[15:])], "and one step is planned already"
