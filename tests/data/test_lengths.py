"""Samples of unequal length: padded, grouped by length within a global batch, and none lost."""

import itertools
import json
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cli.overrides import apply_overrides, parse_pairs
from paceline.comm import LocalGroup
from paceline.data import BadSamples, BadSampleWarning, GlobalOrder, Interval, Loader, MapSource, Padding
from paceline.data.division import Batches, MicroBatches, Shares, find_progress
from paceline.data.length_groups import LengthGroups
from paceline.data.order import list_positions
from paceline.errors import BadSample, DataError, SettingsError
from paceline.recipes.transformer_lm import TransformerLM
from plain_functions import Sentences, compute_loss_of_output, losses_of, make_run, parameters_of, train_here

always = settings(deadline=None, derandomize=True, max_examples=60)


# Padding


def test_samples_of_one_length_are_stacked_as_without_padding():
    samples = [{"ids": torch.arange(3) + number, "label": number} for number in range(4)]
    batch, plain = (MapSource(samples, collate_fn).read(np.arange(4)) for collate_fn in (Padding(), None))
    assert batch.keys() == plain.keys()
    assert all(torch.equal(batch[name], plain[name]) for name in plain)


def test_leaves_are_padded_labels_ask_nothing_and_a_mask_tells_what_is_padding():
    samples = [
        {
            "ids": torch.arange(1, size + 1),
            "labels": np.arange(size),
            "more": {"boxes": torch.ones(size, 2)},
            "id": size,
        }
        for size in (3, 1)
    ]
    batch = Padding(mask="attention_mask", multiple_of=2)(samples)
    assert batch["ids"].tolist() == [[1, 2, 3, 0], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[0, 1, 2, -100], [0, -100, -100, -100]]
    assert batch["more"]["boxes"].sum(dim=(1, 2)).tolist() == [6, 2]
    assert batch["attention_mask"].tolist() == [[True, True, True, False], [True, False, False, False]]
    assert batch["id"].tolist() == [3, 1]


def test_leaves_as_long_as_the_first_get_its_length_and_what_has_a_fixed_one_keeps_it():
    def shapes(*sizes, **given):
        samples = [(torch.arange(n), {"ids": torch.arange(n), "image": torch.zeros(9)}) for n in sizes]
        inputs, targets = Padding(multiple_of=4, **given)(samples)
        return [tuple(one.shape) for one in (inputs, targets["ids"], targets["image"])]

    assert shapes(5, 5) == shapes(5, 6) == [(2, 8), (2, 8), (2, 9)], "a context axis cuts inputs and targets alike"
    assert shapes(5, 5, leaves=("0", "1.image")) == [(2, 12), (2, 5), (2, 12)], "named leaves get one length"


def test_a_pair_gets_its_mask_as_one_more_input():
    (ids, mask), targets = Padding(value=7, mask="mask")(
        [(torch.ones(2), torch.ones(2)), (torch.ones(1), torch.ones(1))]
    )
    assert ids.tolist() == [[1, 1], [1, 7]]
    assert mask.tolist() == [[True, True], [True, False]]
    assert targets.tolist() == [[1, 1], [1, -100]]


def test_labels_of_a_named_pair_ask_nothing_where_they_are_padded():
    pair = namedtuple("pair", "words tags")
    batch = Padding(value=7)([pair(torch.ones(n), torch.ones(n)) for n in (1, 2)])
    assert batch.words.tolist() == [[1, 7], [1, 1]]
    assert batch.tags.tolist() == [[1, -100], [1, 1]]


@pytest.mark.parametrize("leaves", [(), ("ids",)])
def test_lists_of_numbers_are_padded(leaves):
    padding = Padding(leaves=leaves, value=9)
    samples = [{"ids": [1, 2, 3], "x": torch.ones(2)}, {"ids": [], "x": torch.ones(2)}]
    batch = padding(samples)
    assert batch["ids"].tolist() == [[1, 2, 3], [9, 9, 9]]
    assert batch["ids"].dtype == torch.int64
    assert batch["x"].shape == (2, 2)
    assert padding.length_of(samples[0]) == 3
    inputs, targets = Padding(value=9)([([1, 2], [0.5]), ([3], [1.5, 2])])
    assert (inputs.tolist(), targets.tolist()) == ([[1, 2], [3, 9]], [[0.5, -100], [1.5, 2]])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool])
def test_labels_whose_type_does_not_hold_the_padding_become_int64(dtype):
    for lengths in ((1, 2), (2, 2)):
        _, labels = Padding()([(torch.ones(n), torch.ones(n, dtype=dtype)) for n in lengths])
        assert labels.dtype == torch.int64, "also in a batch in which nothing is added"
        assert labels.tolist() == [[1, -100 if lengths[0] == 1 else 1], [1, 1]]


def test_only_named_leaves_are_padded():
    with pytest.raises(DataError, match="samples must be alike for torch to stack them"):
        Padding(leaves=("a",))([{"a": torch.ones(n), "b": torch.ones(n)} for n in (1, 2)])
    with pytest.raises(DataError, match="a leaf that is padded must be a tensor, an array or a list of numbers, but a"):
        Padding(leaves=("a",))([{"a": 1}])
    with pytest.raises(DataError, match="samples that are padded must hold a tensor or an array with a length"):
        Padding()([{"a": 1}])


# Groups


@always
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=60),
    weights=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=6).filter(any),
    start=st.integers(0, 100),
    size=st.integers(1, 80),
)
def test_groups_hold_each_position_once_sorted_by_length(lengths, weights, start, size):
    order = GlobalOrder(len(lengths), seed=3, tail="join")
    interval = Interval(start, start + size)
    groups = LengthGroups(order, lengths).divide(interval, weights)
    assert sorted(np.concatenate(groups).tolist()) == list(range(*interval))
    assert [len(group) == 0 for group, weight in zip(groups, weights, strict=True) if not weight] == [
        True
    ] * weights.count(0.0)
    found = [np.array(lengths)[order.samples_at(group)] for group in groups if len(group)]
    assert all(before.min() >= after.max() for before, after in itertools.pairwise(found))
    if size >= len(weights):
        assert all(len(group) for group, weight in zip(groups, weights, strict=True) if weight)


def cost_of(order, lengths, part):
    found = lengths[order.samples_at(part)]
    return len(found) * found.max()


def test_workers_have_like_costs_and_little_padding():
    lengths = np.random.default_rng(0).lognormal(4, 1, 2000).astype(int) + 1
    order = GlobalOrder(2000, seed=1)
    groups, costs, plain = LengthGroups(order, lengths), [], 0
    for start in range(0, 1920, 128):
        costs.append([cost_of(order, lengths, part) for part in groups.divide(Interval(start, start + 128), [1.0] * 8)])
        plain += sum(cost_of(order, lengths, Interval(at, at + 16)) for at in range(start, start + 128, 16))
    used = lengths[order.samples_at(Interval(0, 1920))].sum()
    assert np.sum(costs) / used < 1.4 < plain / used
    assert max(np.max(step) / np.mean(step) for step in costs) < 1.25
    uneven = [cost_of(order, lengths, part) for part in groups.divide(Interval(0, 512), [3.0, 1.0, 3.0, 1.0])]
    assert sum(uneven[::2]) / sum(uneven[1::2]) == pytest.approx(3, rel=0.1)


def test_groups_are_as_small_as_they_can_be():
    order = GlobalOrder(6, arrangement=None)
    lengths = np.zeros(6, dtype=int)
    lengths[order.samples_at(Interval(0, 6))] = [1, 6, 2, 1, 1, 1]
    groups = LengthGroups(order, lengths).divide(Interval(0, 6), [1.0, 1.0])
    assert [sorted(group.tolist()) for group in groups] == [[1], [0, 2, 3, 4, 5]], "a cost of 6, and one of 10"


@always
@given(
    size=st.integers(1, 40),
    batches=st.lists(st.integers(3, 20), min_size=2, max_size=2),
    num_workers=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    weights=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    num_micro_batches=st.integers(1, 3),
    stopped_after=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_each_sample_comes_once_whatever_the_lengths_workers_shares_and_resizes(
    size, batches, num_workers, weights, num_micro_batches, stopped_after, seed
):
    lengths = np.random.default_rng(seed).integers(0, 50, size)
    seen, state, steps = [], None, []
    for number, (batch, workers) in enumerate(zip(batches, num_workers, strict=True)):
        loaders = [
            Loader(
                [(float(at), at) for at in range(size)],
                batch,
                group=group,
                num_epochs=3,
                seed=seed,
                shares=weights[:workers],
                num_micro_batches=num_micro_batches,
                group_by_length=True,
                lengths=lengths,
            )
            for group in LocalGroup.create(workers)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
                loader._batches.change(loader.position, batch)
        mine = []
        for loader in loaders:
            read, count = [], 0
            for one in loader:
                read.append((one.interval, one.targets[: one.num_samples].tolist()))
                count += one.last
                if not number and count == stopped_after:
                    break
            mine.append(read)
        state = loaders[0].state_dict()
        for parts in zip(*mine, strict=True):
            steps.append((parts[0][0], [sample for _, samples in parts for sample in samples]))
    order = GlobalOrder(size, seed)
    for interval in dict.fromkeys(interval for interval, _ in steps):
        found = [sample for other, samples in steps for sample in samples if other == interval]
        assert sorted(found) == sorted(order.samples_at(interval).tolist()), "the global batch is the same set"
        seen += found
    assert sorted(seen) == sorted(list(range(size)) * 3)


@pytest.mark.parametrize("options", [{"num_processes": 2}, {"num_threads": 2}, {"num_virtual_workers": 4}])
def test_whoever_reads_reads_the_same(options):
    def read(num_workers, **given):
        found = []
        for group in LocalGroup.create(num_workers):
            loader = Loader(
                MapSource(Sentences(40), Padding(leaves=("input_ids", "labels"))),
                16,
                group=group,
                num_epochs=1,
                group_by_length=True,
                **given,
            )
            found += [(one.interval, one.data["input_ids"].tolist()) for one in loader]
        return sorted(found)

    plain = {key: value for key, value in options.items() if key == "num_virtual_workers"}
    assert read(2, **options) == read(2, **plain) if plain else read(2)
    if plain:
        assert read(1, **options) == read(2, **options)


def test_steps_of_some_workers_alone_count_the_samples_that_they_took():
    order = GlobalOrder(100)
    groups = LengthGroups(order, np.arange(100))
    batches, shares = Batches(order, 10), Shares(None, 2)
    division = MicroBatches(batches, shares, 0, 2, adds=False, groups=groups)
    position, used = find_progress(order, batches, division, {0: 3, 1: 1})
    assert position == 10
    expected = [list_positions(part) for at in (10, 20) for part in division.cut(Interval(at, at + 10)).parts]
    assert [at for one in used for at in range(*one)] == sorted(np.concatenate(expected).tolist())


def test_settings_that_do_not_fit_are_refused():
    samples, group = [(float(at), at) for at in range(9)], LocalGroup.create(1)[0]
    with pytest.raises(SettingsError, match="lengths must be given for group_by_length with MapSource"):
        Loader(samples, 3, group=group, group_by_length=True)
    with pytest.raises(SettingsError, match="lengths must come with group_by_length"):
        Loader(samples, 3, group=group, lengths=[1] * 9)
    with pytest.raises(SettingsError, match="lengths must be one whole number for each of 9 samples"):
        Loader(samples, 3, group=group, lengths=[1] * 8, group_by_length=True)
    with pytest.raises(SettingsError, match="group_by_length must be false with augment that mixes"):
        Loader(samples, 3, group=group, lengths=[1] * 9, group_by_length=True, augment=["mixup"])


# In a run

UNEQUAL = {
    "collate_fn": None,
    "metrics": None,
    "padding": {"leaves": ["input_ids", "labels"], "mask": "attention_mask"},
    "evaluate_interval": 0,
}


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_run_is_the_mean_over_tokens_of_one_process_however_its_batches_are_dealt(tmp_path, num_workers):
    train_here(make_run(num_steps=6), tmp_path / "plain")
    run = make_run(**UNEQUAL, num_steps=6, group_by_length=True, num_micro_batches=num_workers % 2 + 1)
    train_here(run, tmp_path / "dealt", num_workers)
    assert losses_of(tmp_path / "dealt") == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-6)
    dealt, plain = parameters_of(tmp_path / "dealt"), parameters_of(tmp_path / "plain")
    for name, expected in plain.items():
        torch.testing.assert_close(dealt[name], expected, rtol=1e-6, atol=1e-9, msg=name)


def test_a_run_goes_on_at_another_number_of_workers(tmp_path):
    train_here(make_run(num_steps=8), tmp_path / "plain")
    for steps, workers in ((4, 3), (8, 2)):
        train_here(
            make_run(**UNEQUAL, group_by_length=True, num_steps=steps, schedule="constant"), tmp_path / "d", workers
        )
    train_here(make_run(num_steps=8, schedule="constant"), tmp_path / "plain-constant")
    assert losses_of(tmp_path / "d") == pytest.approx(losses_of(tmp_path / "plain-constant"), rel=1e-6)


def write_stories(folder, num=60):
    words = np.random.default_rng(0).integers(1, 12, num).tolist()
    lines = [json.dumps({"text": "".join(f"word {n} " for n in range(size))}) for size in words]
    (folder / "stories.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "stories.jsonl"


@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
def test_text_of_files_trains_alike_padded_to_the_longest_or_to_one_length(tmp_path):
    data = {"name": "files", "path": str(write_stories(tmp_path)), "sequence_length": 64}
    common = {
        "model": TransformerLM(width=16, num_layers=1, num_heads=2),
        "loss": {"name": "next_token", "sample_tokens": 0},
        "collate_fn": None,
        "metrics": None,
        "num_steps": 5,
    }
    train_here(make_run(**common, data=data), tmp_path / "plain")
    run = make_run(**common, data={**data, "padding": "longest"}, group_by_length=True)
    train_here(run, tmp_path / "longest", 2)
    assert losses_of(tmp_path / "longest") == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-5)
    longest, plain = (one.open_data().train for one in (run, make_run(**common, data=data)))
    assert min(longest.read(np.array([index]))[0].shape[1] for index in range(4)) < 64
    assert plain.read(np.arange(4))[0].shape[1] == 64


def test_a_run_takes_its_padding_from_the_command_line_and_refuses_what_does_not_fit():
    words = [
        "--padding.mask",
        "attention_mask",
        "--padding.value",
        "1",
        "--group_by_length",
        "true",
        "--collate_fn",
        "none",
    ]
    run = apply_overrides(make_run(), parse_pairs(words))
    assert run.padding == Padding(mask="attention_mask", value=1)
    assert run.group_by_length
    with pytest.raises(ValueError, match="padding or collate_fn must be left out"):
        make_run(padding=Padding())
    with pytest.raises(ValueError, match="samples must have one length where the layout has a pipeline"):
        make_run(**UNEQUAL, loss=compute_loss_of_output, layout={"pipeline": 2})
    with pytest.raises(ValueError, match=r"padding\.multiple_of must be a multiple of 4 for a context axis of 2"):
        make_run(**UNEQUAL, layout={"context": 2})


def test_samples_that_cannot_be_read_are_measured_as_nothing_where_they_are_tolerated():
    class Torn(MapSource):
        def decode(self, fetched, seeds=None):
            if any(index % 5 == 3 for index in fetched.tolist()):
                raise BadSample("torn")
            return [{"n": torch.tensor(index), "ids": torch.ones(1 + index % 7)} for index in fetched.tolist()]

        fetch = staticmethod(lambda indices: indices)

    def read(action):
        source = Torn(range(40), Padding(leaves=("ids",)))
        options = {"group_by_length": True, "bad_samples": BadSamples(action=action)}
        loader = Loader(source, 8, num_epochs=1, num_micro_batches=2, **options)
        return sorted(n for batch in loader for n in batch.data["n"][: batch.num_samples].tolist())

    with pytest.warns(BadSampleWarning):
        assert read("skip") == [index for index in range(40) if index % 5 != 3]
    with pytest.raises(BadSample, match="torn"):
        read("fatal")
