"""Data as people have it: data sets of torch and of others with any samples, and DataLoaders, which are taken apart."""

import dataclasses
from collections import namedtuple

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from transformers import (
    BatchEncoding,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from paceline.comm import LocalGroup
from paceline.data import Loader, MapSource, Source
from paceline.errors import DataError, SettingsError

Pair = namedtuple("Pair", "image label")
PAIRS = [(float(number), number) for number in range(10)]


@dataclasses.dataclass
class Scan:
    pixels: torch.Tensor
    pose: "Pose"
    age: float = 0.0


@dataclasses.dataclass
class Pose:
    angle: float


def first_batch(samples, share=2, **options):
    return next(iter(Loader(samples, share, shuffle=False, **options)))


def same(one, other):
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


# Samples of any structure


def test_samples_of_every_structure_become_batches_of_it():
    pixels = torch.ones(3)
    batch = first_batch([{"x": pixels, "text": "a", "n": 1, "deep": {"y": (pixels, 2.0)}}] * 4).data
    assert (batch["x"].shape, batch["text"], batch["n"].tolist()) == ((2, 3), ["a", "a"], [1, 1])
    assert [part.shape for part in batch["deep"]["y"]] == [(2, 3), (2,)]
    batch = first_batch([Pair(pixels, 1)] * 4).data
    assert (type(batch), batch.image.shape, batch.label.tolist()) == (Pair, (2, 3), [1, 1])
    batch = first_batch([Scan(pixels, Pose(30.0), 1.5)] * 4).data
    assert (type(batch), batch.pixels.shape, batch.age.tolist()) == (Scan, (2, 3), [1.5, 1.5])
    assert batch.pose.angle.tolist() == [30.0, 30.0]
    scan = Scan(pixels, Pose(30.0), 1.5)
    for sample, find in (
        ((scan, 1), lambda data: data[0]),
        (Pair(scan, 1), lambda data: data.image),
        ({"scan": [scan], "label": 1}, lambda data: data["scan"][0]),
    ):
        inside = find(first_batch([sample] * 4).data)
        assert (type(inside), inside.pixels.shape, inside.pose.angle.tolist()) == (Scan, (2, 3), [30.0, 30.0])
    with pytest.raises(DataError, match=r"samples must be alike .* got \(Scan\(.*\), int\) and \(Scan\(.*\)\)"):
        first_batch([(scan, 1), (scan,)] * 2)
    batch = first_batch([({"ids": pixels, "mask": pixels > 0}, 1)] * 4)
    assert (batch.inputs["mask"].dtype, batch.targets.tolist()) == (torch.bool, [1, 1])
    assert first_batch(np.eye(3, dtype=np.float32)).data.dtype == torch.float32


@pytest.mark.parametrize("keys", [("x", "label"), ("x", "mask", "label")])
def test_samples_with_keys_train_on_their_values(keys):
    batch = first_batch([dict.fromkeys(keys, 1.5)] * 4)
    assert list(batch.inputs) == list(keys[:-1])
    assert batch.targets.tolist() == [1.5, 1.5]


def test_images_are_turned_into_tensors_by_the_data_set():
    class Images(Dataset):
        def __init__(self, transform):
            self.transform = transform

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return self.transform(Image.new("RGB", (4, 2), (index, 0, 0))), index

    batch = first_batch(Images(lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255), 3)
    assert batch.inputs.shape == (3, 3, 2, 4)
    assert (batch.inputs[:, 0, 0, 0] * 255).tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=r"made of tensors, arrays and numbers .* but got \(Image, int\)"):
        first_batch(Images(lambda image: image))


@pytest.fixture(scope="module")
def tokenizer():
    words = ["[PAD]", "[UNK]", "[MASK]", *"abcde"]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


TEXTS = ["a b c", "a", "b c d e", "c c", "e d c b a"]


def test_a_collator_of_transformers_pads(tokenizer):
    samples = [tokenizer(text) for text in TEXTS]
    batch = first_batch(samples, 3, collate_fn=DataCollatorWithPadding(tokenizer))
    assert type(batch.data) is BatchEncoding
    assert batch.data["input_ids"].tolist() == [[3, 4, 5, 0], [3, 0, 0, 0], [4, 5, 6, 7]]
    assert batch.count(batch.data["attention_mask"]) == 8
    loaders = [
        Loader(samples, 5, group=group, shuffle=False, num_epochs=1, collate_fn=DataCollatorWithPadding(tokenizer))
        for group in LocalGroup.create(2)
    ]
    shapes = [[batch.data["input_ids"].shape for batch in loader] for loader in loaders]
    assert shapes == [[(3, 4)], [(2, 5)]], "each worker pads its own share"


@pytest.mark.parametrize("options", [{"mlm": False}, {"mlm_probability": 0.5, "seed": 1}])
def test_a_collator_of_transformers_makes_labels(tokenizer, options):
    samples = [tokenizer(text) for text in TEXTS]
    batch = first_batch(samples, 5, collate_fn=DataCollatorForLanguageModeling(tokenizer, **options))
    assert list(batch.inputs) == ["input_ids", "attention_mask"]
    assert batch.targets.shape == batch.inputs["input_ids"].shape == (5, 5)
    is_asked = batch.targets != -100
    assert 0 < batch.count(is_asked) <= 15
    assert not (is_asked & (batch.inputs["attention_mask"] == 0)).any()


def test_lists_of_numbers_are_refused_since_torch_would_transpose_them(tokenizer):
    for sample in (tokenizer("a b"), {"x": [[1, 2], [3, 4]], "y": 0}, ((1.0, 2.0), 0), Scan([1.0, 2.0], Pose(0.0))):
        with pytest.raises(DataError, match=r"got a list of 2, of which torch would make 2 tensors; return torch.te"):
            first_batch([sample] * 4)
    batch = first_batch([{"size": [1, 2]}] * 4, 3, collate_fn=default_collate)
    assert [part.tolist() for part in batch.data["size"]] == [[1, 1, 1], [2, 2, 2]], "torch's way, asked for"


def test_a_batch_may_be_packed_so_that_samples_are_not_its_first_dim():
    def pack(samples):
        return {"ids": torch.cat(samples), "lengths": torch.tensor([len(one) for one in samples])}

    batch = first_batch([torch.arange(number + 1) for number in range(4)], 3, collate_fn=pack)
    assert (batch.data["ids"].shape, batch.num_samples, batch.count()) == ((6,), 3, 3.0)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (
            [torch.ones(2), torch.ones(3)],
            r"alike .* but got float32\[2\] and float32\[3\]; .* by padding \(RuntimeError",
        ),
        ([np.ones(2), np.ones(3)], r"alike .* but got float64\[2\] and float64\[3\]"),
        ([{"a": 1.0}, {"b": 1.0}], r"alike .* but got {a: float} and {b: float}"),
        ([{"a": 1.0}, {"a": 1.0, "b": 1.0}], r"alike .* but got {a: float} and {a: float, b: float}"),
        ([{"a": 1.0, "b": None}] * 2, r"made of tensors, arrays and numbers .* but got {a: float, b: NoneType}"),
        (["text", "more"], r"a batch must hold tensors, but got \(str, str\)"),
    ],
    ids=str,
)
def test_samples_that_cannot_be_stacked_are_shown(samples, words):
    with pytest.raises(DataError, match=words):
        first_batch(samples)


def test_a_collate_fn_must_make_a_batch():
    samples = [torch.ones(2)] * 4
    for share in (1, 2, 4):
        with pytest.raises(
            DataError, match=r"must make one batch .* returned the samples unchanged.* {'samples': samples}"
        ):
            first_batch(samples, share, collate_fn=lambda samples: samples)
        assert (
            len(first_batch(samples, share, collate_fn=lambda samples: {"samples": samples}).data["samples"]) == share
        )
    assert torch.equal(first_batch(samples, 1, collate_fn=lambda samples: samples[0]).data, samples[0])
    with pytest.raises(DataError, match="must hold tensors, but got NoneType"):
        first_batch(samples, collate_fn=lambda samples: None)


# Data sets


class Columns(Dataset):
    """Columns under names, as of the datasets library, which reads several rows at once and takes numpy's integers."""

    def __init__(self, **columns):
        self.columns, self.asked = columns, []

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        if isinstance(index, str):
            return self.columns[index]
        return {name: column[index] for name, column in self.columns.items()}

    def __getitems__(self, indices):
        self.asked.append(indices)
        return [self[index] for index in indices]


def test_rows_that_can_be_read_at_once_are():
    data = Columns(x=torch.arange(12.0).view(6, 2), label=torch.arange(6), text=list("abcdef"))
    batch = first_batch(data, 4)
    assert (batch.inputs["x"].shape, batch.targets.tolist(), batch.data["text"]) == ((4, 2), [0, 1, 2, 3], list("abcd"))
    assert data.asked[0] == [0, 1, 2, 3]
    assert all(type(index) is int for index in data.asked[0])
    assert MapSource(data)[np.int64(5)]["label"] == 5


def test_parts_of_data_sets_are_data_sets():
    data = TensorDataset(torch.arange(20.0))
    left, right = random_split(data, [15, 5], torch.Generator().manual_seed(0))
    for part in (left, right, Subset(data, [3, 1, 3]), ConcatDataset([data, right])):
        seen = [float(x) for batch in Loader(part, 4, num_epochs=1) for x in batch.data[0]]
        assert sorted(seen) == sorted(float(part[index][0]) for index in range(len(part)))


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("options", [{}, {"join_epochs": True}])
def test_a_data_set_of_one_sample_is_enough(num_workers, options):
    for group in LocalGroup.create(num_workers):
        batches = list(Loader([(1.0, 7)], 3, group=group, num_epochs=4, **options))
        counts = [batch.num_samples for batch in batches]
        whole = {(1, False): [1] * 4, (1, True): [3, 1], (3, False): [group.rank == 0] * 4}
        assert counts == whole.get((num_workers, bool(options)), [1, group.rank == 0])
        assert {int(batch.targets[0]) for batch in batches} == {7}, "an empty share borrows it"


class Broken(Dataset):
    """Eight samples by its length, of which one raises."""

    def __init__(self, error, broken):
        self.error, self.broken = error, broken

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index >= self.broken:
            raise self.error
        return float(index)


@pytest.mark.parametrize("error", [IndexError("list index out of range"), KeyError("label"), StopIteration()], ids=repr)
def test_a_sample_that_is_not_there_is_named(error):
    batches = iter(Loader(Broken(error, 5), 2, shuffle=False))
    assert [next(batches).data.tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match=r"each index below its length, 8, but Broken\[5\] raises ") as caught:
        next(batches)
    assert f"raises {error!r} in {__file__}, line" in str(caught.value)
    assert caught.value.__cause__ is error
    with pytest.raises(DataError, match=r"Subset\[2\] raises "):
        next(iter(Loader(Subset(Broken(error, 5), [0, 1, 6]), 3, shuffle=False)))


def test_an_error_of_a_data_set_keeps_its_type_and_says_which_sample_it_was():
    with pytest.raises(OSError, match="the disk is gone") as caught:
        list(Loader(Broken(OSError("the disk is gone"), 3), 2, shuffle=False, num_epochs=1))
    assert caught.value.__notes__ == ["while Broken[3] was read"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "must have a length .* but got NoneType; define __len__ and __getitem__"),
        ({1.0, 2.0}, "but got set; define"),
        (iter(PAIRS), "or be an IterableDataset, but got list_iterator"),
        ((pair for pair in PAIRS), "or be an IterableDataset, but got generator"),
        (
            {"train": PAIRS, "test": PAIRS},
            r"a dict with the keys 'train', 'test'; give one of its parts, .*\['train'\]",
        ),
        ([], "the data set is empty"),
        (TensorDataset(), r"must know its length, but that of TensorDataset raises IndexError\(.*; give it samples"),
    ],
    ids=["None", "set", "iterator", "generator", "mapping", "empty", "no tensors"],
)
def test_what_is_no_data_set_is_refused(data, words):
    with pytest.raises((DataError, SettingsError), match=words):
        Loader(data, 2)


def test_a_source_makes_its_own_batches():
    class Halves(Source):
        def __len__(self):
            return 4

        def read(self, indices):
            return torch.from_numpy(indices) / 2

    assert first_batch(Halves()).data.tolist() == [0.0, 0.5]
    with pytest.raises(SettingsError, match=r"collate_fn must be left out .* with a Halves; .* MapSource\(dataset"):
        Loader(Halves(), 2, collate_fn=default_collate)


@pytest.mark.parametrize("name", ["global_batch", "num_epochs", "num_steps", "num_micro_batches"])
@pytest.mark.parametrize("count", [0, -1, 2.5, 4.0, "2"])
def test_counts_that_are_none_are_refused(name, count):
    with pytest.raises(SettingsError, match=f"{name} must be a whole number of at least 1, but got {count!r}"):
        Loader(PAIRS, **({"global_batch": 2} | {name: count}))


def test_counts_of_numpy_are_counts():
    loader = Loader(PAIRS, np.int64(4), num_epochs=np.int32(1), changes=[(1, np.int64(3))])
    assert [type(number) for batch in loader for number in batch.interval] == [int] * 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "global_batch must be given"),
        ({"global_batch": 2, "drop_last": True, "join_epochs": True}, "must not both be true"),
        ({"global_batch": 11, "drop_last": True}, "at most the data set's 10 samples with drop_last, .* but got 11"),
        ({"global_batch": 5, "drop_last": True, "changes": [(3, 12)]}, "at most the data set's 10 .* but got 12"),
        ({"global_batch": 5, "num_epochs": 1, "dispatcher": object()}, "must be left out with a dispatcher"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, words):
    with pytest.raises(SettingsError, match=words):
        Loader(PAIRS, **options)


def test_a_batch_that_drop_last_would_drop_is_refused_while_training_too():
    loader = Loader(PAIRS, 5, drop_last=True)
    with pytest.raises(SettingsError, match=r"at most the data set's 10 .* but got 12"):
        loader.change_batch(12)


def test_a_loader_without_an_end_has_no_length():
    with pytest.raises(TypeError, match="only with num_epochs or num_steps"):
        len(Loader(PAIRS, 2))
    assert len(Loader(PAIRS, 3, num_epochs=2)) == 8


def test_epochs_that_end_in_another_way_than_the_checkpoints_are_refused():
    with pytest.raises(DataError, match=r"way to end an epoch \(drop_last, join_epochs\) .* got drop instead of short"):
        Loader(PAIRS, 3, drop_last=True).load_state_dict(Loader(PAIRS, 3).state_dict())


# DataLoaders


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        ({"batch_size": 3}, {"global_batch": 3, "shuffle": False}),
        ({"batch_size": 3, "shuffle": True, "drop_last": True}, {"global_batch": 3, "drop_last": True}),
        ({}, {"global_batch": 1, "shuffle": False}),
        ({"batch_sampler": BatchSampler(RandomSampler(PAIRS), 4, True)}, {"global_batch": 4, "drop_last": True}),
        ({"batch_size": 4, "num_workers": 1, "pin_memory": False, "sampler": SequentialSampler(PAIRS)}, None),
        ({"batch_size": 2, "collate_fn": lambda samples: torch.tensor(samples), "prefetch_factor": None}, None),
    ],
)
def test_a_data_loader_is_taken_apart(parts, options):
    options = options or {"global_batch": parts["batch_size"], "shuffle": False, "collate_fn": parts.get("collate_fn")}
    taken = Loader(DataLoader(PAIRS, **parts), num_epochs=2)
    assert same(*([batch.data for batch in loader] for loader in (taken, Loader(PAIRS, num_epochs=2, **options))))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "order",
    [lambda: {"shuffle": True, "generator": seeded(7)}, lambda: {"sampler": RandomSampler(PAIRS, generator=seeded(7))}],
)
def test_the_seed_of_a_data_loaders_generator_is_that_of_the_order(order):
    assert Loader(DataLoader(PAIRS, 3, **order())).order.seed == 7
    assert Loader(DataLoader(PAIRS, 3, **order()), seed=8).order.seed == 8
    assert Loader(DataLoader(PAIRS, 3, shuffle=True)).order.seed == Loader(PAIRS, 3).order.seed == 0


def test_what_is_given_beside_a_data_loader_goes_before_it():
    loader = DataLoader(PAIRS, 3, collate_fn=lambda samples: 1 / 0)
    options = {"shuffle": True, "collate_fn": torch.tensor, "num_epochs": 1}
    assert same(*([b.data for b in Loader(data, 4, **options)] for data in (loader, PAIRS)))


class Reversed(DataLoader):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class Chunks(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": WeightedRandomSampler([1.0] * 10, 10)}, r"a WeightedRandomSampler; .* chooses: torch.*Subset\("),
        (
            {"sampler": DistributedSampler(PAIRS, 2, 0)},
            "a DistributedSampler; .* Loader divides samples among the work",
        ),
        ({"sampler": RandomSampler(PAIRS, replacement=True)}, "a RandomSampler with replacement; .* with shuffle"),
        ({"sampler": RandomSampler(PAIRS, num_samples=4)}, "a RandomSampler of 4 samples; .* cut to those"),
        ({"sampler": SequentialSampler(range(5))}, "a SequentialSampler of 5 samples; .* cut to those"),
        ({"sampler": [1, 2, 3]}, "a list; .* of the samples that the sampler chooses"),
        ({"batch_size": None}, "no batch_size; .* with global_batch"),
        ({"batch_sampler": Chunks(SequentialSampler(PAIRS), 2, False)}, "a Chunks; .* with global_batch"),
        ({"batch_sampler": [[1, 2], [3]]}, "a list; .* with global_batch"),
        ({"worker_init_fn": print}, "a worker_init_fn; .* the same when it reads its first sample"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_data_loader_of_ones_own_order_is_refused_with_what_to_give_instead(options, words):
    with pytest.raises(SettingsError, match=f"torch's own order, .* but got {words}"):
        Loader(DataLoader(PAIRS, **options))


def test_a_data_loader_that_iterates_in_its_own_way_is_refused():
    with pytest.raises(SettingsError, match="a Reversed, which iterates in its own way; give Loader the data set"):
        Loader(Reversed(PAIRS, 2))
