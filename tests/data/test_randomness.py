"""Data sets that draw random numbers: in a process each sample has its own; beside the model they are warned of."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from paceline.comm import LocalGroup
from paceline.data import Loader
from paceline.data.randomness import SharedRandomNumbersWarning
from paceline.errors import SettingsError

DRAWS = {"torch": lambda: float(torch.rand(())), "numpy": np.random.rand, "python": random.random}


class Augmented(Dataset):
    """Samples with noise from global generators, of which `which` are drawn from."""

    def __init__(self, which=tuple(DRAWS)):
        self.which = which

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index, [DRAWS[name]() for name in self.which] or [0.0]


def stack(samples):
    return [(index, *noise) for index, noise in samples], torch.tensor([0])


def make_loaders(dataset, num_workers, **options):
    options = {"collate_fn": stack, "num_processes": 1, "num_epochs": 2} | options
    return [Loader(dataset, 6, group=group, **options) for group in LocalGroup.create(num_workers)]


def read(loader):
    return [sample for batch in loader for sample in batch.data[0][: batch.num_samples]]


@pytest.mark.parametrize(
    "dataset", [Augmented(), Subset(Augmented(), range(12))], ids=["one by one", "several at once"]
)
def test_a_samples_noise_depends_on_its_position_alone(dataset):
    straight = read(make_loaders(dataset, 1)[0])
    assert len({noise for _, *noises in straight for noise in noises}) == 2 * 12 * 3, "each in each epoch its own"
    options = {"shares": [2.0, 1.0], "num_micro_batches": 2, "num_processes": 2}
    parts = [read(loader) for loader in make_loaders(dataset, 2, **options)]
    assert sorted(sum(parts, [])) == sorted(straight)
    first, second = (make_loaders(dataset, 1, num_epochs=epochs)[0] for epochs in (1, 2))
    begun = read(first)
    second.load_state_dict(first.state_dict())
    assert begun + read(second) == straight
    assert read(make_loaders(dataset, 1, seed=1)[0])[0][1:] != straight[0][1:]


def test_processes_draw_nothing_from_the_generators_of_the_model():
    before = torch.get_rng_state()
    read(make_loaders(Augmented(), 1)[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("which", DRAWS)
def test_draws_beside_the_model_are_warned_of(which):
    (loader,) = make_loaders(Augmented([which]), 1, num_processes=0)
    with pytest.warns(
        SharedRandomNumbersWarning, match=r"^Augmented, or the collate_fn, draws .* give num_processes=1 "
    ):
        read(loader)


@pytest.mark.parametrize("which", DRAWS)
def test_draws_beside_the_model_are_refused_with_virtual_workers_and_not_in_processes(which):
    (loader,) = make_loaders(Augmented([which]), 1, num_processes=0, num_virtual_workers=2)
    with pytest.raises(
        SettingsError, match=r"with num_virtual_workers, .* but Augmented, .* give num_processes=1 \(num_data_processes"
    ):
        read(loader)
    (loader,) = make_loaders(Augmented([which]), 1, num_processes=1, num_virtual_workers=2)
    assert read(loader)


class Shuffled(IterableDataset):
    def __iter__(self):
        yield from torch.randperm(5)


def test_an_iterable_data_set_that_draws_is_warned_of():
    with pytest.warns(SharedRandomNumbersWarning, match="^Shuffled, .* a generator that set_epoch seeds"):
        list(Loader(Shuffled(), 2, num_epochs=1))


def test_threads_of_several_workers_are_not_watched_since_each_would_see_what_others_draw():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [len(read(loader)) for loader in make_loaders(Augmented(), 2, num_processes=0)] == [12, 12]


def test_what_draws_nothing_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (loader,) = make_loaders(Augmented([]), 1, num_processes=0)
        for _ in loader:
            torch.rand(()), random.random(), np.random.rand()
