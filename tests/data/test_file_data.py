"""Files as the data of a run: which leaf the model gets, and what is held out."""

import numpy as np
import pytest
import torch
from file_samples import draw_image, make_images, write_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm import LocalGroup
from paceline.data import FileData, FileSource, Images, Mixture, NoIndexWarning, Spec
from paceline.data.content import agree_on_content
from paceline.data.formats.held_out import PartOfSource
from paceline.data.formats.index import write_index
from paceline.data.formats.opening import open_place
from paceline.data.image_decoding import decode_image
from paceline.errors import BadSample, DataError, SettingsError


def test_images_of_a_folder_and_of_shards_are_the_same_samples(tmp_path):
    write_shards(tmp_path / "folder", "folder", make_images(20), num_shards=1)
    write_shards(tmp_path / "tar", "tar", make_images(20))
    folder, tar = (FileData(path=str(tmp_path / name), size=8).open() for name in ("folder", "tar"))
    assert folder.train.spec == tar.train.spec == Spec(3, (3, 8, 8))
    for one, other in ((folder.train, tar.train), (folder.held_out, tar.held_out)):
        here, there = (source.read(np.arange(len(source))) for source in (one, other))
        assert torch.equal(here[0], there[0])
        assert torch.equal(here[1], there[1])
    number = tar.train._map(np.arange(1)).item()
    first = decode_image(make_images(20)[number]["image"], 8, name="") / 127.5 - 1
    np.testing.assert_allclose(tar.train.read(np.arange(1))[0][0].permute(1, 2, 0), first, atol=1e-6)


def test_the_held_out_part_and_the_rest_are_all_samples_once(tmp_path):
    write_shards(tmp_path, "tar", make_images(23), num_shards=3)
    splits = FileData(path=str(tmp_path), size=8, held_out_fraction=0.25).open()
    assert (len(splits.train), len(splits.held_out)) == (17, 6)
    source = splits.train.source
    mine = [source.locate(part._map(np.arange(len(part)))) for part in (splits.train, splits.held_out)]
    assert sorted(mine[0] + mine[1]) == sorted(source.locate(np.arange(23)))
    assert sum(splits.train.shard_sizes) == 17
    assert [
        a + b for a, b in zip(splits.train.shard_sizes, splits.held_out.shard_sizes, strict=True)
    ] == source.shard_sizes
    assert splits.train.fingerprint == source.fingerprint
    other = FileData(path=str(tmp_path), size=8, held_out=str(tmp_path)).open()
    assert (len(other.train), len(other.held_out)) == (23, 23)
    with pytest.raises(
        DataError, match=r"must hold at least 100 samples for some of them to be held out .*, but has 23 samp"
    ):
        FileData(path=str(tmp_path), held_out_fraction=0.01).open()


class Numbered:
    """As much of a `FileSource` as `PartOfSource` asks for."""

    spec, is_thread_safe, stacks, collate_fn, fingerprint = Spec(), True, True, None, ""

    def __init__(self, shard_sizes, *, grows=False):
        self.shard_sizes, self.grows = shard_sizes, grows

    def __len__(self):
        return sum(self.shard_sizes)


def list_parts(source, fraction):
    parts = [PartOfSource(source, fraction, held_out=held_out) for held_out in (False, True)]
    ends = np.cumsum(source.shard_sizes)
    found = [part._map(np.arange(len(part))) for part in parts]
    for part, indices in zip(parts, found, strict=True):
        assert np.array_equal(indices, np.sort(indices))
        assert part.shard_sizes == np.bincount(np.searchsorted(ends, indices, "right"), minlength=len(ends)).tolist()
    assert sorted(np.concatenate(found).tolist()) == list(range(len(source)))
    return found


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=6),
    fraction=st.sampled_from([0.001, 0.1, 0.25, 1 / 3, 0.4, 0.5, 0.6, 0.63, 0.9, 0.999]),
    grows=st.booleans(),
)
def test_any_fraction_is_held_out_of_any_number_of_samples(sizes, fraction, grows):
    num_samples = sum(sizes)
    expected = num_samples * fraction
    try:
        train, held_out = list_parts(Numbered(sizes, grows=grows), fraction)
    except DataError:
        assert min(expected, num_samples - expected) < (100 if grows else 1)
        return
    if not grows:
        assert abs(len(held_out) - expected) <= 0.5 + 1e-9
    more = list_parts(Numbered([*sizes, 70], grows=True), fraction)
    if grows:
        assert [side[side < num_samples].tolist() for side in more] == [train.tolist(), held_out.tolist()]


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.1, 0.2, 0.4, 0.5, 0.6, 0.9])
@pytest.mark.parametrize("period", [2, 5, 10, 11])
def test_what_is_held_out_has_no_period_of_the_data(fraction, period):
    _, held_out = list_parts(Numbered([100_000]), fraction)
    counts = np.bincount(held_out % period, minlength=period)
    assert counts.sum() == round(100_000 * fraction)
    spread = np.sqrt(100_000 / period * fraction * (1 - fraction))
    assert np.abs(counts - 100_000 / period * fraction).max() < 4 * spread


@pytest.mark.parametrize(("name", "kind"), [("a.bin", "<u2"), ("a.npy", "int32"), ("a.txt", "uint8")])
def test_tokens_and_text_are_windows(tmp_path, name, kind):
    row = (np.arange(103) % 100).astype(kind)
    if name == "a.npy":
        np.save(tmp_path / name, row)
    else:
        (tmp_path / name).write_bytes(row.tobytes())
    write_index(open_place(tmp_path), "auto")
    splits = FileData(path=str(tmp_path), sequence_length=10, held_out_fraction=0.5).open()
    assert (len(splits.train), len(splits.held_out)) == (5, 5), "two tokens are left over"
    first = splits.held_out._map(np.array([1])).item() * 10
    inputs, targets = splits.held_out.read(np.array([0, 1]))
    assert inputs[1].tolist() == list(range(first, first + 10))
    assert targets[1].tolist() == list(range(first + 1, first + 11))
    assert splits.train.source.shard_sizes == [10]
    with pytest.raises(
        BadSample,
        match=rf"below data.vocab_size = 20, but got {first} to {first + 10}; set data.vocab_size to {first + 11}",
    ):
        FileData(path=str(tmp_path), sequence_length=10, vocab_size=20, held_out_fraction=0.5).open().held_out.read(
            np.array([1])
        )


def test_short_texts_are_filled_up_and_ask_nothing_there(tmp_path):
    texts = ["abcdefgh", "x", ""]
    write_shards(tmp_path, "tar", [{"__key__": str(i), "story": text} for i, text in enumerate(texts * 2)])
    inputs, targets = (
        FileData(path=str(tmp_path), sequence_length=4, held_out=str(tmp_path)).open().train.read(np.arange(3))
    )
    assert inputs.tolist() == [[97, 98, 99, 100], [120, 0, 0, 0], [0, 0, 0, 0]]
    assert targets.tolist() == [[98, 99, 100, 101], [-100] * 4, [-100] * 4]


def test_the_leaf_that_is_named_is_taken_of_a_tree(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {"__key__": str(i), "in": {"a": rng.normal(size=3), "b": rng.normal(size=5)}, "kind": i % 2} for i in range(4)
    ]
    from paceline.data.formats.leaves import flatten

    write_shards(tmp_path, "tar", [flatten(row) for row in rows])
    train = FileData(path=str(tmp_path), input="in.b", target="kind", held_out=str(tmp_path)).open().train
    assert train.spec == Spec(2, (5,))
    inputs, labels = train.read(np.arange(4))
    np.testing.assert_allclose(inputs, [row["in"]["b"] for row in rows], rtol=1e-6)
    assert labels.tolist() == [0, 1, 0, 1]
    with pytest.raises(
        DataError, match=r"must have the leaf data.input=c, but has in\.a, in\.b, kind; give --data.input"
    ):
        FileData(path=str(tmp_path), input="c").open()
    with pytest.raises(DataError, match=r"must have the leaf data.target=\(none found\), but has in\.a"):
        FileData(path=str(tmp_path)).open()


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_of_no_class_are_refused(tmp_path, label):
    write_shards(tmp_path, "jsonl", [{"x": [0.5], "label": label}] * 20)
    data = FileData(path=str(tmp_path), num_classes=3).open()
    with pytest.raises(BadSample, match=rf"must be from 0 to below data\.num_classes = 3, but leaf label is {label}"):
        data.train.read(np.arange(1))


@pytest.mark.parametrize("label", [0.9, float("nan"), float("inf"), "cat", [1, 2]])
def test_labels_that_are_no_whole_numbers_are_refused(tmp_path, label):
    write_shards(tmp_path, "jsonl", [{"x": [0.5], "label": label}] * 20)
    data = FileData(path=str(tmp_path), num_classes=3, target="label", input="x").open()
    with pytest.raises(BadSample, match=r"labels must be whole numbers, but leaf label is .*--data\.target"):
        data.train.read(np.arange(1))


def test_classes_that_nobody_knows_must_be_given(tmp_path):
    write_shards(tmp_path, "tar", make_images(4), indexed=False)
    with pytest.warns(NoIndexWarning), pytest.raises(SettingsError, match=r"data.num_classes must be given for"):
        FileData(path=str(tmp_path)).open()
    with pytest.warns(NoIndexWarning):
        assert FileData(path=str(tmp_path), num_classes=7, held_out_fraction=0.5).open().train.spec.num_classes == 7


def write_classes(folder, *classes):
    for name in classes:
        (folder / name).mkdir(parents=True)
        (folder / name / "0.png").write_bytes(draw_image(0))
    write_index(open_place(folder), "auto")
    return str(folder)


def read_labels(source):
    return source.read(np.arange(len(source)))[1].tolist()


def test_classes_have_one_number_in_all_folders_of_a_run(tmp_path):
    train, some, other = (
        write_classes(tmp_path / "-".join(names), *names)
        for names in (("cat", "dog", "owl"), ("dog", "owl"), ("bird", "cat"))
    )
    splits = FileData(path=train, held_out=some, size=8).open()
    assert (read_labels(splits.train), read_labels(splits.held_out)) == ([0, 1, 2], [1, 2])
    one = write_classes(tmp_path / "one", "owl")
    assert read_labels(FileData(path=train, held_out=one, size=8).open().held_out) == [2]
    with pytest.raises(DataError, match=r"must be among cat, dog, owl, but got bird; name all classes in --data"):
        FileData(path=train, held_out=other, size=8).open()
    whole = ("bird", "cat", "dog", "owl")
    splits = FileData(path=train, held_out=other, classes=whole, size=8).open()
    assert splits.train.spec == Spec(4, (3, 8, 8))
    assert (read_labels(splits.train), read_labels(splits.held_out)) == ([1, 2, 3], [0, 1])
    for classes in (("bird", "cat", "cat"), ("a", "b")):
        with pytest.raises((DataError, SettingsError), match=r"data\.classes"):
            FileData(path=other, held_out=other, classes=classes).open()
    write_shards(tmp_path / "tar", "tar", make_images(4))
    with pytest.raises(SettingsError, match=r"data\.classes must be different names, for a folder of images"):
        FileData(path=str(tmp_path / "tar"), held_out=some, classes=whole).open()


def test_mixed_folders_number_their_classes_alike(tmp_path):
    names = (("cat", "dog"), ("bird", "cat"))
    folders = [write_classes(tmp_path / str(number), *each) for number, each in enumerate(names)]
    alike = Mixture(
        sources=[FileData(path=each, held_out=each, size=8, classes=("bird", "cat", "dog")) for each in folders]
    ).open()
    assert (read_labels(alike.train), alike.train.spec.num_classes) == ([1, 2, 0, 1], 3)
    for number, each in enumerate(names):
        for side in ("train", "val"):
            write_classes(tmp_path / "Images" / str(number) / side, *each)
    files = [FileData(path=each, held_out=each, size=8) for each in folders]
    images = [Images(path=tmp_path / "Images" / str(number), size=8) for number in range(2)]
    for sources in (files, images):
        with pytest.raises(DataError, match=r"the same numbers, but got .* classes: \[\"bird\", \"cat\", \"dog\"\]"):
            Mixture(sources=sources).open()


def test_a_class_that_appears_while_data_grows_is_refused(tmp_path):
    source = FileSource(write_classes(tmp_path, "b", "c"), grows=True)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "0.png").write_bytes(draw_image(1))
    write_index(open_place(tmp_path), "auto")
    shards = source.list_shards(looks=True)
    with pytest.raises(DataError, match=r"class folders of .* must be among b, c, but got d"):
        source.take_shards(len(shards))


def test_ranks_of_a_run_agree_on_the_content(tmp_path):
    for rank in range(2):
        write_shards(tmp_path / str(rank), "tar", make_images(8 + rank), num_shards=1)
    sources = [FileData(path=str(tmp_path / str(rank)), held_out=str(tmp_path / "0")).open().train for rank in range(2)]
    LocalGroup.run(2, lambda group: agree_on_content(sources[0], group))
    with pytest.raises(DataError, match=r"all ranks must have the same data, but rank 0 has b3-.*, and rank 1 has b3-"):
        LocalGroup.run(2, lambda group: agree_on_content(sources[group.rank], group))
