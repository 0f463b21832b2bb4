import json

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.comm import LocalGroup
from paceline.data import Full, GlobalOrder, Interval, Loader, Sequential, Source, Windows
from paceline.errors import DataError, SettingsError

FROZEN = [7, 2, 8, 5, 6, 0, 1, 9, 3, 4]
FROZEN_CUT = [5, 6, 3, 4, 0, 2, 8, 1, 9, 7]

always = settings(deadline=None, derandomize=True)
shards_of = st.lists(st.integers(0, 12), min_size=1, max_size=25).filter(any)
orders = st.one_of(
    st.just(Full()),
    st.just(Sequential()),
    st.builds(Windows, window=st.integers(1, 30), shard_samples=st.one_of(st.none(), st.integers(1, 8))),
)


class Shards(Source):
    """Numbers in shards; each sample is its own index."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return sum(self.sizes)

    @property
    def shard_sizes(self):
        return self.sizes

    def read(self, indices):
        return torch.from_numpy(indices)


def order_of(sizes, order, seed=0, tail="short"):
    return GlobalOrder(sum(sizes), seed, tail=tail, arrangement=order.arrange(sizes, seed))


def epoch_of(order, epoch):
    return order.samples_at(Interval(epoch * order.num_samples, (epoch + 1) * order.num_samples)).tolist()


@always
@given(sizes=shards_of, order=orders, seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 2**40))
@example(sizes=[1], order=Windows(window=1), seed=0, epoch=0)
@example(sizes=[0, 0, 5, 0], order=Windows(window=2), seed=0, epoch=3)
def test_each_epoch_has_each_sample_once(sizes, order, seed, epoch):
    assert sorted(epoch_of(order_of(sizes, order, seed), epoch)) == list(range(sum(sizes)))


@always
@given(sizes=shards_of, order=orders, data=st.data())
def test_a_sample_is_a_function_of_its_position_alone(sizes, order, data):
    size = sum(sizes)
    whole = [sample for epoch in range(4) for sample in epoch_of(order_of(sizes, order, 5), epoch)]
    start = data.draw(st.integers(0, 4 * size))
    stop = data.draw(st.integers(start, 4 * size))
    assert order_of(sizes, order, 5).samples_at(Interval(start, stop)).tolist() == whole[start:stop]


@always
@given(sizes=shards_of, window=st.integers(1, 30), seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_windows_read_a_window_of_shards_before_the_next(sizes, window, seed, epoch):
    """Samples come in runs, one for each window; a run has whole shards, at most `window` of them."""
    shard_of = np.repeat(np.arange(len(sizes)), sizes)
    shards = shard_of[epoch_of(order_of(sizes, Windows(window=window), seed), epoch)].tolist()
    start, num_windows, seen = 0, 0, set()
    while start < len(shards):
        stop, inside = start, set()
        while not inside or stop - start < sum(sizes[shard] for shard in inside):
            inside.add(shards[stop])
            stop += 1
        seen |= inside
        assert len(inside) <= window
        start, num_windows = stop, num_windows + 1
    assert num_windows >= -(-len(seen) // window)
    assert seen == {shard for shard, size in enumerate(sizes) if size}


def test_one_window_of_all_shards_mixes_all_samples():
    order = order_of([10] * 10, Windows(window=10))
    assert order.samples_at(Interval(0, 50)).max() >= 90
    assert len({sample // 10 for sample in epoch_of(order, 0)[:20]}) > 5


def test_one_window_is_as_random_as_full():
    counts = np.zeros((8, 8))
    for seed in range(2000):
        counts[np.arange(8), epoch_of(order_of([3, 0, 5], Windows(window=3), seed), 0)] += 1
    statistic = ((counts - 250) ** 2 / 250).sum()
    assert abs(statistic - 49) < 5 * np.sqrt(2 * 49)


def test_every_window_has_something_of_each_stretch_of_the_data():
    order = order_of([5] * 40, Windows(window=8), seed=3)
    for epoch in range(5):
        samples = np.array(epoch_of(order, epoch)).reshape(5, 40)  # five windows of eight shards
        assert all(set(window // 25) == set(range(8)) for window in samples)


def test_epochs_seeds_and_windows_differ():
    sizes = [4] * 12
    found = {
        tuple(epoch_of(order_of(sizes, Windows(window=window), seed), epoch))
        for window in (1, 3, 12)
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    assert len(found) == 18


def test_windows_are_frozen():
    """Another order would make every run that is resumed by a newer version repeat and skip samples."""
    assert epoch_of(order_of([3, 0, 2, 4, 1], Windows(window=2), 7), 1) == FROZEN
    cut = order_of([7, 3], Windows(window=2, shard_samples=3), 7)
    assert epoch_of(cut, 0) == FROZEN_CUT


def test_long_shards_are_cut_into_parts_of_equal_size():
    order = order_of([10], Windows(window=1, shard_samples=4), 1)
    part_of = np.repeat([0, 1, 2], [4, 3, 3])
    parts = part_of[epoch_of(order, 0)]
    assert (np.diff(parts) != 0).sum() == 2, "each part is read in one run"
    assert order.num_samples == 10


@pytest.mark.parametrize("order", [Full(), Windows(window=4), Sequential()])
def test_workers_read_one_order_whatever_their_number(order):
    sizes = [3, 9, 0, 7, 1, 1, 12, 5]
    expected = order_of(sizes, order, 3)
    for num_workers in (1, 2, 3):
        loaders = [
            Loader(Shards(sizes), 6, group=group, order=order, seed=3, num_epochs=2)
            for group in LocalGroup.create(num_workers)
        ]
        for batches in zip(*loaders, strict=True):
            used = [sample for batch in batches for sample in batch.data[: batch.num_samples].tolist()]
            assert used == expected.samples_at(batches[0].interval).tolist()


def test_a_resumed_loader_goes_on_in_its_window():
    sizes = [5] * 20
    whole = [batch.data.tolist() for batch in Loader(Shards(sizes), 7, order="windows", num_epochs=3)]
    first = Loader(Shards(sizes), 7, order="windows", num_epochs=3)
    begun = []
    for batch in first:
        begun.append(batch.data.tolist())
        if len(begun) == 19:
            break
    state = json.loads(json.dumps(first.state_dict()))
    rest = Loader(Shards(sizes), 7, order="windows", num_epochs=3)
    rest.load_state_dict(state)
    assert begun + [batch.data.tolist() for batch in rest] == whole


@pytest.mark.parametrize(
    "other", [{"order": "full"}, {"order": Windows(window=3)}, {"order": Windows(window=2, shard_samples=3)}, {}]
)
def test_a_state_of_another_order_is_refused(other):
    state = Loader(Shards([6] * 5), 5, order=Windows(window=2)).state_dict()
    with pytest.raises(DataError, match="the data's order must be that of the checkpoint"):
        Loader(Shards([6] * 5), 5, **other).load_state_dict(state)


def test_a_state_of_other_shards_is_refused():
    state = Loader(Shards([6, 4]), 5, order="windows").state_dict()
    with pytest.raises(DataError, match="the data's order must be that of the checkpoint"):
        Loader(Shards([4, 6]), 5, order="windows").load_state_dict(state)


def test_a_state_from_before_there_were_orders_is_read():
    state = Loader(Shards([6, 4]), 5).state_dict()
    older = {key: value for key, value in state.items() if key not in ("order", "eras")}
    Loader(Shards([6, 4]), 5).load_state_dict({**older, "shuffle": True})
    Loader(Shards([6, 4]), 5, shuffle=False).load_state_dict({**older, "shuffle": False})
    with pytest.raises(DataError, match="the data's order must be"):
        Loader(Shards([6, 4]), 5).load_state_dict({**older, "shuffle": False})


def test_order_and_shuffle_are_one_setting():
    with pytest.raises(SettingsError, match="shuffle must be left out where an order is given"):
        Loader(Shards([5]), 2, order="full", shuffle=False)
    in_order = Loader(Shards([5]), 2, shuffle=False, num_epochs=1)
    assert [batch.data.tolist() for batch in in_order] == [[0, 1], [2, 3], [4]]


def test_an_unknown_order_lists_the_known_ones():
    with pytest.raises(SettingsError, match=r"order: .*known: full, sequential, windows"):
        Loader(Shards([5]), 2, order="random")


def test_an_order_of_a_data_loader_is_replaced_by_one_that_is_given():
    loader = torch.utils.data.DataLoader(Shards([5]), batch_size=2, shuffle=True)
    assert [batch.data.tolist() for batch in Loader(loader, order="sequential", num_epochs=1)] == [[0, 1], [2, 3], [4]]


def test_late_positions_cost_what_the_first_does():
    """Work, not time, is compared: how many numbers are permuted, and shards laid out."""
    order = order_of([1000] * 10_000, Windows(window=64))
    order.samples_at(Interval(0, 1))
    arrangement = order._eras[0].arrangement
    before = arrangement._epoch.cache_info().misses
    assert len(set(order.samples_at(Interval(9_000_000, 9_000_256)).tolist())) == 256
    assert arrangement._epoch.cache_info().misses == before, "an epoch is laid out once"
