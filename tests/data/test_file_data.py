"""Files as the data of a run: which leaf the model gets, and what is held out."""

import numpy as np
import pytest
import torch
from file_samples import make_images, write_shards

from paceline.comm import LocalGroup
from paceline.data import FileData, NoIndexWarning, Spec
from paceline.data.content import agree_on_content
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
    first = decode_image(make_images(20)[1]["image"], 8, name="") / 127.5 - 1
    np.testing.assert_allclose(tar.train.read(np.arange(1))[0][0].permute(1, 2, 0), first, atol=1e-6)


def test_the_held_out_part_and_the_rest_are_all_samples_once(tmp_path):
    write_shards(tmp_path, "tar", make_images(23), num_shards=3)
    splits = FileData(path=str(tmp_path), size=8, held_out_fraction=0.25).open()
    assert (len(splits.train), len(splits.held_out)) == (17, 6)
    source = splits.train.source
    mine = [source.locate(part._map(np.arange(len(part)))) for part in (splits.train, splits.held_out)]
    assert sorted(mine[0] + mine[1]) == sorted(source.locate(np.arange(23)))
    assert mine[1][0] == source.locate(np.array([0]))[0]
    assert sum(splits.train.shard_sizes) == 17
    assert [
        a + b for a, b in zip(splits.train.shard_sizes, splits.held_out.shard_sizes, strict=True)
    ] == source.shard_sizes
    assert splits.train.fingerprint == source.fingerprint
    other = FileData(path=str(tmp_path), size=8, held_out=str(tmp_path)).open()
    assert (len(other.train), len(other.held_out)) == (23, 23)
    with pytest.raises(DataError, match="must hold at least 100 samples for one of them to be held out, but holds 23"):
        FileData(path=str(tmp_path), held_out_fraction=0.01).open()


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
    inputs, targets = splits.held_out.read(np.array([0, 1]))
    assert inputs[1].tolist() == list(range(20, 30))
    assert targets[1].tolist() == list(range(21, 31))
    assert splits.train.source.shard_sizes == [10]
    with pytest.raises(BadSample, match=r"below data.vocab_size = 20, but got 20 to 30; set data.vocab_size to 31"):
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


@pytest.mark.parametrize("label", [0.9, "cat", [1, 2]])
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


def test_ranks_of_a_run_agree_on_the_content(tmp_path):
    for rank in range(2):
        write_shards(tmp_path / str(rank), "tar", make_images(8 + rank), num_shards=1)
    sources = [FileData(path=str(tmp_path / str(rank)), held_out=str(tmp_path / "0")).open().train for rank in range(2)]
    LocalGroup.run(2, lambda group: agree_on_content(sources[0], group))
    with pytest.raises(DataError, match=r"all ranks must have the same data, but rank 0 has b3-.*, and rank 1 has b3-"):
        LocalGroup.run(2, lambda group: agree_on_content(sources[group.rank], group))
