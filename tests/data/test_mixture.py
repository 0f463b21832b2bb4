import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.comm import LocalGroup
from paceline.data import (
    Full,
    GlobalOrder,
    Images,
    Interval,
    JoinedSource,
    Loader,
    MapSource,
    Mixture,
    MixtureSource,
    Sequential,
    Source,
    Spec,
    Text,
    Windows,
    apportion,
)
from paceline.errors import DataError, SettingsError

always = settings(deadline=None, derandomize=True)


class Shard(Source):
    """Pairs of the number of a source and of a sample, in two shards."""

    def __init__(self, number, size):
        self.number, self.size = number, size

    def __len__(self):
        return self.size

    @property
    def shard_sizes(self):
        return [self.size // 2, self.size - self.size // 2]

    def read(self, indices):
        return {"source": torch.full((len(indices),), self.number), "sample": torch.from_numpy(indices)}


def mix(sizes, weights=None, **options):
    return MixtureSource([Shard(number, size) for number, size in enumerate(sizes)], weights, **options)


def samples_of(source, order, start, stop, seed=0):
    """Return the source and sample at each position."""
    arrangement = source.arrange(order, seed)
    found = GlobalOrder(arrangement.num_samples, seed, arrangement=arrangement).samples_at(Interval(start, stop))
    read = source.read(found)
    return list(zip(read["source"].tolist(), read["sample"].tolist(), strict=True))


@st.composite
def mixtures(draw):
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    weights = st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)).filter(any)
    positions = draw(st.lists(st.integers(1, 60), unique=True, max_size=3))
    return sizes, {
        "weights": draw(weights),
        "changes": [(position, draw(weights)) for position in sorted(positions)],
        "on_end": draw(st.sampled_from(["repeat", "stop"])),
        "cycle": draw(st.integers(20, 30)),
    }


@always
@given(mixture=mixtures(), order=st.sampled_from([Full(), Sequential(), Windows(window=1)]))
@example(mixture=([1], {"weights": [1], "cycle": 1}), order=Full())
def test_cycles_have_exact_counts_and_sources_their_own_epochs(mixture, order):
    sizes, options = mixture
    source = mix(sizes, **options)
    used = samples_of(source, order, 0, 200)
    planned = [(0, options["weights"]), *options.get("changes", ())]
    ends = [*(start for start, _ in planned[1:]), 200]
    for (start, weights), end in zip(planned, ends, strict=True):
        for begin in range(start, end - options["cycle"] + 1, options["cycle"]):
            of_source = [number for number, _ in used[begin : begin + options["cycle"]]]
            assert np.bincount(of_source, minlength=len(sizes)).tolist() == apportion(options["cycle"], weights)
    for number, size in enumerate(sizes):
        own = [sample for of, sample in used if of == number]
        for start in range(0, len(own), size):
            epoch = own[start : start + size]
            assert len(set(epoch)) == len(epoch), "no sample comes twice in an epoch of its source"


@always
@given(mixture=mixtures(), data=st.data())
def test_a_sample_of_a_mixture_is_a_function_of_its_position(mixture, data):
    sizes, options = mixture
    whole = samples_of(mix(sizes, **options), Full(), 0, 150)
    start = data.draw(st.integers(0, 150))
    stop = data.draw(st.integers(start + 1, 151)) - 1
    assert start == stop or samples_of(mix(sizes, **options), Full(), start, stop) == whole[start:stop]


@always
@given(mixture=mixtures())
def test_an_epoch_ends_with_the_first_source_or_with_all(mixture):
    sizes, options = mixture
    source = mix(sizes, **options)
    num_samples = source.arrange(Full(), 0).num_samples
    last = [options["weights"], *(weights for _, weights in options["changes"])][-1]
    used = samples_of(source, Full(), 0, num_samples)
    counts = np.bincount([number for number, _ in used], minlength=len(sizes))
    is_done = counts >= sizes
    before = np.bincount([number for number, _ in used[:-1]], minlength=len(sizes)) >= sizes
    if options["on_end"] == "stop":
        assert is_done.any()
        assert not before.any()
    else:
        assert all(done or not weight for done, weight in zip(is_done, last, strict=True))
        assert not before.all()


def test_one_source_alone_is_its_own_epochs():
    source = mix([30], cycle=7)
    assert source.arrange(Sequential(), 0).num_samples == 30
    assert samples_of(source, Sequential(), 0, 60) == [(0, sample) for sample in [*range(30), *range(30)]]


def test_weights_by_size_use_all_samples_once():
    source = mix([300, 200], cycle=50)
    used = samples_of(source, Full(), 0, 500)
    assert source.arrange(Full(), 0).num_samples == 500
    assert len(set(used)) == 500


@pytest.mark.parametrize(("temperature", "counts"), [(1, [90, 10]), (2, [75, 25]), (1000, [50, 50])])
def test_temperature_raises_the_part_of_small_sources(temperature, counts):
    source = mix([900, 100], temperature=temperature, cycle=100)
    used = samples_of(source, Full(), 0, 100)
    assert np.bincount([number for number, _ in used]).tolist() == counts


def test_a_curriculum_changes_at_its_position():
    source = mix([50, 50], [1, 0], changes=[(13, [0, 1]), (40, [1, 1])], cycle=10)
    of_source = [number for number, _ in samples_of(source, Full(), 0, 60)]
    assert of_source[:40] == [0] * 13 + [1] * 27
    assert sorted(of_source[40:50]) == [0] * 5 + [1] * 5


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    mixture=mixtures(),
    phases=st.lists(st.tuples(st.integers(1, 4), st.integers(4, 13), st.integers(1, 6)), min_size=1, max_size=3),
)
def test_any_workers_batches_and_kills_read_the_same_samples(mixture, phases):
    """Workers come and go, with other batches; each phase is killed with what it had read ahead."""
    sizes, options = mixture
    source, state, used = mix(sizes, **options), None, []
    for num_workers, global_batch, num_steps in phases:
        loaders = [Loader(source, global_batch, group=group, seed=3) for group in LocalGroup.create(num_workers)]
        for loader in loaders if state else ():
            loader.load_state_dict(json.loads(json.dumps(state)))
        for _, batches in zip(range(num_steps), zip(*loaders, strict=True), strict=False):
            for batch in batches:
                read = [tensor[: batch.num_samples].tolist() for tensor in batch.data.values()]
                used += list(zip(*read, strict=True))
            state = loaders[0].state_dict()
            for loader in loaders[1:]:
                assert loader.state_dict() == state
    assert used == samples_of(source, Full(), 0, len(used), seed=3)


@pytest.mark.parametrize(
    "other",
    [{"weights": [1, 2]}, {"weights": [1, 1], "cycle": 10}, {"weights": [1, 1], "changes": [(50, [1, 3])]}],
)
def test_a_state_of_another_mixture_is_refused(other):
    state = Loader(mix([20, 20], [1, 1], cycle=20), 5).state_dict()
    with pytest.raises(DataError, match="must be that of the checkpoint"):
        Loader(mix([20, 20], **{"cycle": 20, **other}), 5).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1]}, r"weights must be 2 numbers \(one per source\)"),
        ({"weights": [1, -1]}, "none negative"),
        ({"weights": [0, 0]}, "not all 0"),
        ({"weights": [math.nan, 1]}, r"finite, .* but got \[nan, 1\]"),
        ({"weights": [1, math.inf]}, "finite"),
        ({"weights": [1, 1e-9]}, r"of 1000 samples weights \[1, 1e-09\] give \[1000, 0\]; raise cycle"),
        ({"changes": [(5, [1, 1]), (5, [1, 2])]}, "ascending positions"),
        ({"changes": [(0, [1, 1])]}, "ascending positions"),
        ({"changes": [(5, [1])]}, "weights must be 2 numbers"),
        ({"cycle": 0}, "cycle must be a whole number of at least 1"),
        ({"weights": ["a", 1]}, r"weights must be 2 numbers .* got \['a', 1\]"),
        ({"weights": None, "temperature": 0}, "temperature must be a number of at least 1, but got 0"),
        ({"weights": None, "temperature": math.nan}, "temperature must be a number of at least 1, but got nan"),
        ({"weights": [1, 1], "on_end": "halt"}, "on_end must be repeat or stop, but got 'halt'"),
    ],
)
def test_weights_that_cannot_be_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        mix([5, 5], **options)


def test_sources_that_cannot_be_joined_are_refused():
    with pytest.raises(DataError, match="got none"):
        JoinedSource([])
    with pytest.raises(DataError, match="is empty"):
        JoinedSource([Shard(0, 3), Shard(1, 0)])
    other = Shard(1, 3)
    other.spec = Spec(2, (3,))
    with pytest.raises(DataError, match="samples of one shape"):
        JoinedSource([Shard(0, 3), other])
    mixed = JoinedSource([Shard(0, 3), MapSource([(1.0, 2)] * 3)])
    with pytest.raises(DataError, match=r"same structure to share a batch, but got \{source: int64.* and \("):
        mixed.read(np.array([1, 4]))


def test_joined_samples_keep_their_order_and_seeds():
    class Drawn(Shard):
        def decode(self, fetched, seeds=None):
            return {**self.read(fetched), "seed": torch.tensor(list(seeds))}

    joined = JoinedSource([Drawn(0, 3), Drawn(1, 2)])
    read = joined.decode(joined.fetch(np.array([4, 0, 3, 2])), [40, 0, 30, 20])
    assert read["source"].tolist() == [1, 0, 1, 0]
    assert read["sample"].tolist() == [1, 0, 0, 2]
    assert read["seed"].tolist() == [40, 0, 30, 20]
    assert joined.shard_sizes == [1, 2, 1, 1]


def test_settings_open_all_sources(tmp_path):
    for name, text in (("a", "x" * 3000), ("b", "y" * 2000)):
        (tmp_path / f"{name}.txt").write_text(text)
    data = [Text(path=tmp_path / f"{name}.txt", sequence_length=10) for name in "ab"]
    splits = Mixture(sources=data, weights=(0.75, 0.25), cycle=8).open()
    parts = [one.open() for one in data]
    assert len(splits.train) == sum(len(one.train) for one in parts)
    assert len(splits.held_out) == sum(len(one.held_out) for one in parts)
    batch = next(iter(Loader(splits.train, 8)))
    assert sorted(batch.inputs[:, 0].tolist()) == [ord("x")] * 6 + [ord("y")] * 2


def test_settings_are_read_from_plain_values():
    data = Mixture.model_validate(
        {"sources": [{"name": "images"}, {"name": "images", "size": 8}], "changes": [[100, [1, 0]]]}
    )
    assert data.sources[1] == Images(size=8)
    assert data.changes == ((100, (1.0, 0.0)),)
    with pytest.raises(DataError, match="samples of one shape"):
        data.open()
    with pytest.raises(ValidationError, match="temperature"):
        Mixture(sources=[Images()], temperature=0.5)
