import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from paceline.comm import LocalGroup
from paceline.data import Full, Loader, MapSource, Sequential, Source, Windows
from paceline.data.mixing import (
    CLUMPED,
    ClumpedOrderWarning,
    Labels,
    find_window,
    label_places,
    measure_clumping,
    read_labels,
)


class Sorted(Source):
    """Digits sorted by class, in shards of a few."""

    def __init__(self, images, labels, shard=36, reads=None):
        by_class = torch.argsort(labels, stable=True)
        self.images, self.labels, self.shard = images[by_class], labels[by_class], shard
        self.reads = [] if reads is None else reads

    def __len__(self):
        return len(self.labels)

    @property
    def shard_sizes(self):
        return [min(self.shard, len(self) - start) for start in range(0, len(self), self.shard)]

    def read(self, indices):
        self.reads.append(len(indices))
        which = torch.from_numpy(indices)
        return self.images[which], self.labels[which]


@pytest.fixture(scope="module")
def digits():
    found = load_digits()
    images, labels = torch.tensor(found.images).float().reshape(-1, 64) / 8 - 1, torch.tensor(found.target)
    places = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = places[:360], places[360:]
    return Sorted(images[train], labels[train]), images[held_out], labels[held_out]


def clumping(order, source, labels, batch=32, seed=0):
    return measure_clumping(source.arrange(order, seed), seed, labels, batch)


def test_clumping_is_none_by_chance_and_all_if_sorted():
    source = Sorted(torch.zeros(4000, 1), torch.arange(4000) // 400, shard=40)
    labels = Labels(source.labels.numpy(), 4000)
    assert abs(clumping(Full(), source, labels)) < 0.005
    assert clumping(Sequential(), source, labels, batch=40) == 1
    by_window = [clumping(Windows(window=window), source, labels) for window in (1, 2, 4, 8, 32, 100)]
    assert by_window == sorted(by_window, reverse=True)
    assert by_window[0] > 0.5
    assert by_window[-1] < 0.005


@pytest.mark.parametrize("classes", [[7] * 50, [3], list(range(50))])
def test_labels_that_say_nothing_have_no_clumping(classes):
    source = Sorted(torch.zeros(len(classes), 1), torch.tensor(classes), shard=5)
    for order in (Full(), Sequential(), Windows(window=2)):
        assert clumping(order, source, Labels(source.labels.numpy(), len(classes))) <= 0


def test_a_few_labels_judge_windows_as_all_do(digits):
    source, _, _ = digits
    every, few = read_labels(source, len(source)), read_labels(source)
    assert len(few.values) == 256
    for window in (1, 2, 4, 8, 16, 40):
        judged = [clumping(Windows(window=window), source, labels) < CLUMPED for labels in (few, every)]
        assert judged == [window > 10] * 2


def test_samples_without_labels_have_places():
    assert read_labels(MapSource([torch.zeros(3)] * 10)) is None
    assert read_labels(MapSource([(torch.zeros(3), 0.5)] * 10)) is None
    values, num_samples = label_places(MapSource([0.0] * 160))
    assert num_samples == 160
    assert np.bincount(values).tolist() == [10] * 16


def train(source, order, images, labels):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in Loader(source, 32, order=order, num_epochs=5):
        optimizer.zero_grad()
        cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    return cross_entropy(model(images), labels).item()


def test_what_is_not_warned_of_trains_like_full(digits):
    """Each window either has the loss of full, within 15%, or a warning that says which window would."""
    full = train(digits[0], "full", *digits[1:])
    advised = set()
    for window in (1, 3, 12, 16, 40):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = train(digits[0], Windows(window=window), *digits[1:])
        advised |= {int(str(one.message).split("take a window of ")[1].split()[0]) for one in caught}
        assert caught or loss < 1.15 * full
        assert bool(caught) == (window < 12)
        assert window > 1 or loss > 1.3 * full, "a window of one class makes a worse model"
    assert len(advised) == 1
    assert train(digits[0], Windows(window=advised.pop()), *digits[1:]) < 1.15 * full


def test_the_window_that_would_do_is_the_smallest_power_of_two_that_mixes(digits):
    source = digits[0]
    labels = read_labels(source)
    window = find_window(source, Windows(window=1), 0, labels, 32)
    assert clumping(Windows(window=window), source, labels) < CLUMPED
    assert clumping(Windows(window=window // 2), source, labels) >= CLUMPED
    tiny = Sorted(torch.zeros(64, 1), torch.arange(64) // 32, shard=32)
    assert find_window(tiny, Windows(window=1), 0, read_labels(tiny), 32) is None


def test_the_first_worker_alone_warns_and_once(digits):
    source = digits[0]
    for group in LocalGroup.create(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in Loader(source, 32, group=group, order=Windows(window=2), num_steps=4):
                pass
        assert [one.category for one in caught] == ([ClumpedOrderWarning] if group.rank == 0 else [])


def test_other_orders_and_one_window_cost_no_extra_reads():
    for order in ("full", "sequential", Windows(window=3)):
        reads = []
        source = Sorted(torch.zeros(90, 1), torch.arange(90) // 30, shard=30, reads=reads)
        for _ in Loader(source, 30, order=order, num_steps=3):
            pass
        assert reads == [30] * 3
