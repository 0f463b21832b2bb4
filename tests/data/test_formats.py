"""All formats: what is written is read again, by any index, and damage is noticed where there are digests."""

import gzip
import json
import struct

import numpy as np
import pytest
import torch
from file_samples import make_images, write_shards

from paceline.data import FileSource
from paceline.data.formats import FORMATS, tfrecord
from paceline.data.formats.columns import import_pyarrow
from paceline.data.formats.crc32c import masked_crc32c
from paceline.data.formats.index import write_index
from paceline.data.formats.leaves import decode_leaves, flatten, nest
from paceline.data.formats.mds import MDS
from paceline.data.formats.opening import open_place
from paceline.data.formats.prepare import prepare
from paceline.data.storage import LocalStorage
from paceline.errors import BadSample, DataError

TREES = sorted(FORMATS.keys() - {"folder", "tokens", "text"})


def make_trees(num_samples):
    rng = np.random.default_rng(0)
    return [
        {
            "__key__": f"{number:04d}",
            "image": make_images(1)[0]["image"] + bytes([number]),
            "mask": rng.integers(0, 2, (2, 3), dtype=np.uint8),
            "row": rng.integers(0, 99, 1 + number % 4),
            "label": number % 5,
            "weight": number / 7,
            "half": number / 2,
            "is_good": number % 3 == 0,
            "words": "ä\n" * number,
            "boxes": [[number, 1], [2, "x"]],
            "both": {"left": rng.normal(size=(2, 2)).astype(np.float32), "right": {"name": "r", "empty": b""}},
        }
        for number in range(num_samples)
    ]


def assert_same(here, there):
    assert flatten(here).keys() == flatten(there).keys()
    for (name, one), other in zip(flatten(here).items(), flatten(there).values(), strict=True):
        if isinstance(other, np.ndarray):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), name
            np.testing.assert_array_equal(one, other)
        else:
            assert (type(one), one) == (type(other), other), name


@pytest.mark.parametrize("name", TREES)
def test_trees_of_all_kinds_of_leaves_return_as_they_were(tmp_path, name):
    trees = make_trees(30)
    write_shards(tmp_path, name, [flatten(tree) for tree in trees], num_shards=2)
    source = FileSource(tmp_path)
    assert source.manifest.format == name, "found by the files' names"
    assert source.shard_sizes == [15, 15]
    order = np.random.default_rng(1).permutation(30)
    for read, index in zip(source.read_trees(order), order, strict=True):
        by_name = {leaf: read[leaf] for leaf in trees[index]}
        assert_same(by_name, trees[index])
        assert read.keys() == trees[index].keys()
    assert source.manifest.about["largest"] == {"label": 4}


@pytest.mark.parametrize("name", TREES)
def test_one_sample_and_the_same_bytes_for_the_same_samples(tmp_path, name):
    for folder in ("a", "b"):
        write_shards(tmp_path / folder, name, [flatten(tree) for tree in make_trees(1)], num_shards=1)
    assert FileSource(tmp_path / "a").fingerprint == FileSource(tmp_path / "b").fingerprint
    assert len(FileSource(tmp_path / "a")) == 1


@pytest.mark.parametrize("name", TREES)
def test_the_loader_gives_batches_of_trees(tmp_path, name):
    samples = make_images(6)
    write_shards(tmp_path, name, samples)
    batch = FileSource(tmp_path).read(np.array([5, 0]))
    assert batch["image"].shape == (2, 3, 12, 12)
    assert batch["label"].tolist() == [samples[5]["label"], samples[0]["label"]]
    assert batch["label"].dtype == torch.int64


def test_groups_are_read_by_their_range_and_only_once(tmp_path, monkeypatch):
    big = [{"x": np.arange(4_000), "label": number} for number in range(40)]
    write_shards(tmp_path, "parquet", big, num_shards=1)
    source = FileSource(tmp_path)
    [first, last] = source.locate(np.array([0, 39]))
    assert first.num_bytes < source.manifest.files[0].num_bytes / 4
    reads = []
    read = LocalStorage.read_ranges
    monkeypatch.setattr(LocalStorage, "read_ranges", lambda *given: reads.append(given[2]) or read(*given))
    assert [tree["label"] for tree in source.read_trees(np.array([39, 0, 39, 1]))] == [39, 0, 39, 1]
    source.read_trees(np.array([0, 38]))
    assert [[tuple(place) for place in given] for given in reads] == [[last[1:]], [first[1:]]]


@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
def test_lines_of_spaces_are_passed_over_like_empty_ones(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'  \n{"x": 1}\r\n \t\r\n\n{"x": 2}\n   ')
    assert FileSource(tmp_path).read_trees(np.arange(2)) == [{"x": 1}, {"x": 2}]
    assert len(FileSource(tmp_path)) == 2


def test_lines_that_others_wrote(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one", "meta": {"id": 1}}\n\n{"text": "two", "list": [1.5, 2]}')
    write_index(open_place(tmp_path), "auto")
    assert FileSource(tmp_path).read_trees(np.arange(2)) == [
        {"text": "one", "meta": {"id": 1}},
        {"text": "two", "list": [1.5, 2]},
    ]
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n[1]\n')
    with pytest.raises(
        BadSample, match=r"a\.jsonl: the line at byte 12 must be a JSON object, but: it is no object but list"
    ):
        write_index(open_place(tmp_path), "auto")


def test_frames_that_end_inside_a_line_are_joined(tmp_path):
    lines = b"".join(json.dumps({"n": number}).encode() + b"\n" for number in range(10))[:-1]
    (tmp_path / "a.jsonl.gz").write_bytes(
        b"".join(gzip.compress(part) for part in (lines[:12], lines[12:27], lines[27:]))
    )
    write_index(open_place(tmp_path), "auto")
    source = FileSource(tmp_path)
    assert [tree["n"] for tree in source.read_trees(np.arange(10))] == list(range(10))
    content = (tmp_path / "a.jsonl.gz").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(content[:-5])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz must end with a whole frame, but that at byte \d+ was cut"):
        write_index(open_place(tmp_path), "auto")


@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
@pytest.mark.parametrize("name", ["jsonl_gz", "jsonl_zst"])
@pytest.mark.parametrize(
    "parts",
    [
        [b'{"n": 0}\n{"n": 1}', b""],  # as bgzip ends a file
        [b'{"n": 0}\n{"n"', b"", b": 1}\n"],
        [b'\n \n{"n": 0}  \n\n', b" \r\n", b'  {"n": 1}', b"  \n \t", b""],
        [b"", b'{"n": 0}', b"\n", b" ", b'{"n": 1}\n  '],
    ],
)
def test_empty_frames_and_lines_of_spaces_lose_no_line(tmp_path, name, parts):
    form = FORMATS[name]()
    (tmp_path / f"a{form.suffixes[0]}").write_bytes(b"".join(map(form.pack, parts)))
    source = FileSource(tmp_path)
    assert [tree["n"] for tree in source.read_trees(np.arange(len(source)))] == [0, 1]


@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
def test_gzip_members_may_have_zeros_behind_them(tmp_path):
    zeros, more = bytes(700), bytes((1 << 20) + 5)
    parts = [b'{"n": 0}\n{"n"', zeros, b": 1}\n", more, b'{"n": 2}', zeros]
    packed = [gzip.compress(part) if part.strip(b"\0") else part for part in parts]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(packed))
    source = FileSource(tmp_path)
    assert [tree["n"] for tree in source.read_trees(np.arange(len(source)))] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
def test_a_key_that_hides_another_and_text_of_another_coding_are_bad_samples(tmp_path):
    for name, content, words in (
        ("a.jsonl", b'{"n": 1}\n{"n": 1, "n": 2}\n', r"a\.jsonl: the line at byte 9 .* key 'n' is there twice"),
        ("b.jsonl", b'{"a": {"n": 1, "n": 2}}\n', "key 'n' is there twice"),
        ("d.jsonl", b'{"a.b": 1, "a": 2}\n', r"d\.jsonl must be readable, but: .* a holds both"),
        ("c.txt", "abc größe".encode("latin-1"), r"c\.txt must be text in UTF-8, but byte 6 is 0xf6; convert it"),
    ):
        (tmp_path / name).write_bytes(content)
        source = FileSource(tmp_path / name)
        with pytest.raises(BadSample, match=words):
            source.read_trees(np.arange(len(source)))


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
def test_columns_in_the_names_of_folders_are_leaves(tmp_path, indexed):
    pyarrow = import_pyarrow()
    for folder, numbers in (("label=3/k=a%20b", [0, 1]), ("label=12/k=7", [2]), ("label=12/k=x", [3])):
        (tmp_path / "data" / folder).mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.table({"n": numbers}), tmp_path / "data" / folder / "part.parquet")
    null = tmp_path / "data/label=__HIVE_DEFAULT_PARTITION__"
    null.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"n": [4]}), null / "part.parquet")
    if indexed:
        assert write_index(open_place(tmp_path / "data"), "auto").about["largest"]["label"] == 12
    source = FileSource(tmp_path / "data")
    found = {tree["n"]: (tree.get("label"), tree.get("k")) for tree in source.read_trees(np.arange(len(source)))}
    assert found == {0: (3, "a b"), 1: (3, "a b"), 2: (12, "7"), 3: (12, "x"), 4: (None, None)}
    (tmp_path / "twice/n=1").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table({"n": [4]}), tmp_path / "twice/n=1/part.parquet")
    with pytest.raises(DataError, match=r"has n as one and in a folder's name; rename the folder"):
        FileSource(tmp_path / "twice")


def test_a_record_that_holds_another_number_of_samples_than_indexed_is_told(tmp_path):
    path, line = tmp_path / "a.jsonl.gz", b'{"n": 1}\n'
    path.write_bytes(gzip.compress(line * 2, compresslevel=0))
    write_index(open_place(tmp_path), "auto")
    size = path.stat().st_size
    path.write_bytes(gzip.compress(line.ljust(2 * len(line)), compresslevel=0))
    assert path.stat().st_size == size
    with pytest.raises(BadSample, match=r"but it holds 1 samples, not 2 as the index says; index the data again"):
        FileSource(tmp_path).read_trees(np.arange(2))


@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
@pytest.mark.parametrize("kind", ["file", "stream"])
def test_an_arrow_file_that_was_cut_between_record_batches_is_refused(tmp_path, kind):
    pyarrow = import_pyarrow()
    table = pyarrow.table({"a": list(range(10))})
    with getattr(pyarrow.ipc, f"new_{kind}")(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    source = FileSource(tmp_path)
    assert [tree["a"] for tree in source.read_trees(np.arange(10))] == list(range(10))
    content = (tmp_path / "a.arrow").read_bytes()
    starts = [extent.start for extent in source.locate(np.arange(10))]
    message = "must be a whole Arrow file" if kind == "file" else "must end with the mark of a stream's end"
    joined = [content + content] if kind == "stream" else []
    for changed in [*(content[:start] for start in starts[1:]), *joined]:
        (tmp_path / "a.arrow").write_bytes(changed)
        with pytest.raises(DataError, match=message):
            FileSource(tmp_path)
    if kind == "file":
        (tmp_path / "a.arrow").write_bytes(content[: starts[1]] + content[starts[2] :])
        with pytest.raises(DataError, match="must hold 4 record batches, as its footer says, but has 3"):
            FileSource(tmp_path)


@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
@pytest.mark.parametrize(("name", "named_by"), [("hf", "state.json"), ("mds", "index.json")])
def test_shards_that_the_list_beside_them_names_must_be_there_and_no_others(tmp_path, name, named_by):
    write_shards(tmp_path, name, make_images(6), indexed=False)
    assert len(FileSource(tmp_path)) == 6
    [first, second] = sorted(tmp_path.glob("shard-*"))
    other = first.with_stem("other")
    other.write_bytes(first.read_bytes())
    with pytest.raises(DataError, match=rf"also holds {other.name}; move it elsewhere, or name it there"):
        FileSource(tmp_path)
    other.unlink()
    second.unlink()
    with pytest.raises(DataError, match=rf"must hold {second.name}, which its {named_by} names; fetch it again"):
        FileSource(tmp_path)
    (tmp_path / named_by).write_text("[]")
    with pytest.raises(DataError, match=rf"{named_by} must .* fetch it again"):
        FileSource(tmp_path)


LIKE_TYPES = {
    "id": b"007",
    "text": b"hello",
    "json": b"{}",
    "cls": b"5",
    "a.txt": b"x",
    "name": "id",
    "b": {"json": [1], "id": "007", "txt": "t"},
    "big": {"id": 2**70, "npy": np.zeros((2, 2))},
}


@pytest.mark.parametrize("name", TREES)
def test_names_that_look_like_types_change_no_leaf(tmp_path, name):
    write_shards(tmp_path, name, [flatten(LIKE_TYPES)], num_shards=1)
    (read,) = FileSource(tmp_path).read_leaves(np.arange(1))
    assert_same({leaf: read.get(leaf) for leaf in flatten(LIKE_TYPES)}, flatten(LIKE_TYPES))
    assert read.keys() - {"__key__"} == flatten(LIKE_TYPES).keys()


@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
def test_features_that_others_wrote_stay_what_they_are(tmp_path):
    def feature(name, value):
        return tfrecord._field(1, tfrecord._field(1, name) + value)

    def of_bytes(content):
        return tfrecord._field(2, tfrecord._field(1, tfrecord._field(1, content)))

    entries = feature(b"id", of_bytes(b"img_1")) + feature(b"text", of_bytes("é".encode())) + feature(b"none", b"")
    entries += feature(b"map.json", of_bytes(b"1")) + feature(b"map", of_bytes(b"x"))
    payload = tfrecord._field(1, entries + feature(b"cls", of_bytes(b"7")) + feature(b"txt", of_bytes(b"\xff")))
    length = struct.pack("<Q", len(payload))
    crcs = [struct.pack("<I", masked_crc32c(part)) for part in (length, payload)]
    (tmp_path / "a.tfrecord").write_bytes(length + crcs[0] + payload + crcs[1])
    (read,) = FileSource(tmp_path).read_leaves(np.arange(1))
    assert read == {"id": b"img_1", "text": "é", "cls": b"7", "txt": b"\xff", "map.json": 1, "map": b"x"}


@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
def test_columns_keep_nulls_shapes_and_large_numbers_and_have_names_of_their_own(tmp_path):
    pyarrow = import_pyarrow()
    whole = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    rows = pyarrow.array([[1, None, 2**53 + 1], [4]], pyarrow.list_(pyarrow.int64()))
    table = pyarrow.table({"row": rows, "tensor": pyarrow.FixedShapeTensorArray.from_numpy_ndarray(whole)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    first, second = FileSource(tmp_path).read_trees(np.arange(2))
    assert first["row"] == [1, None, 2**53 + 1]
    assert second["row"].tolist() == [4]
    np.testing.assert_array_equal([first["tensor"], second["tensor"]], whole)
    for twice in (
        pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a.b", "a.b"]),
        pyarrow.table({"a.b": [1], "a": [{"b": 2}]}),
    ):
        pyarrow.parquet.write_table(twice, tmp_path / "a.parquet")
        with pytest.raises(DataError, match=r"a\.parquet must have each column once, but has a\.b twice"):
            FileSource(tmp_path)


def test_leaves_of_one_name_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a.b": 1, "a": {"b": 2}}\n')
    with pytest.raises(BadSample, match=r"a leaf must have a name of its own, but a\.b is there twice"):
        write_index(open_place(tmp_path), "auto")
    with pytest.raises(DataError, match="must hold a value or further leaves, but x holds both"):
        FORMATS["jsonl"]().write(LocalStorage(tmp_path), "s", [{"x": np.arange(2), "x.npy": b"z"}])
    for sample in ({"x.y": 1, "x": 2}, {"x": 2, "x.y": 1}):
        with pytest.raises(DataError, match="must hold a value or further leaves, but x holds both"):
            nest(sample)


@pytest.mark.parametrize("name", [*TREES, "text"])
def test_halves_of_characters_and_arrays_of_objects_are_refused(tmp_path, name):
    storage = LocalStorage(tmp_path)
    with pytest.raises(DataError, match="text must be of whole characters, but"):
        FORMATS[name]().write(storage, "s", [{"a": "x\ud800"}])
    if name != "text":
        with pytest.raises(DataError, match=r"an array must be of numbers|a leaf must be bytes, text"):
            FORMATS[name]().write(storage, "s", [{"a": np.array([{}], dtype=object)}])


def test_json_nested_too_deep_is_a_bad_sample(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
    with pytest.raises(BadSample, match=r"the line at byte 0 must be a JSON object, but: .*recursion"):
        write_index(open_place(tmp_path), "auto")


def test_what_a_format_cannot_hold_is_refused(tmp_path):
    storage = LocalStorage(tmp_path)
    with pytest.raises(DataError, match="must have the same leaves for format mds, but got a and b; take tar or jsonl"):
        MDS().write(storage, "s", [{"a": 1}, {"b": 1}])
    with pytest.raises(
        DataError, match="must have one image and at most one label for format folder, but got a; take tar"
    ):
        FORMATS["folder"]().write(storage, "s", [{"a": 1}])
    with pytest.raises(DataError, match="must have tokens for format tokens, but has a"):
        FORMATS["tokens"]().write(storage, "s", [{"a": 1}])
    with pytest.raises(DataError, match="tokens must be from 0 to 65535 for format tokens, but got 1 to 70000"):
        FORMATS["tokens"]().write(storage, "s", [{"tokens": [1, 70000]}])
    with pytest.raises(
        DataError, match=r"MDS shards must not be packed for single samples to be read, but got s.mds.zstd"
    ):
        MDS().choose([storage_file("s.mds.zstd")])


def storage_file(path):
    from paceline.data.storage import FileInfo

    return FileInfo(path, 1)


def test_pickled_columns_are_refused(tmp_path):
    content = MDS().encode([{"a": "x"}]).replace(b'["str"]', b'["pkl"]')
    LocalStorage(tmp_path).write("s.mds", content)
    with pytest.raises(DataError, match=r"column a of s\.mds must be of a type that can be read safely, but is pkl"):
        write_index(open_place(tmp_path), "mds")


@pytest.mark.parametrize("name", [*TREES, "folder", "tokens", "text"])
def test_flipped_bits_are_detected_by_the_manifest(tmp_path, name):
    """With `verify`, each of many random places; without it what the format's own digests cover."""
    samples = make_images(12) if name != "tokens" else [{"tokens": np.arange(100)}] * 4
    samples = samples if name != "text" else [{"text": "word " * 50}] * 4
    write_shards(tmp_path, name, samples, num_shards=1)
    settings = {"sequence_length": 10} if name in ("tokens", "text") else {}
    source = FileSource(tmp_path, **settings)
    rng = np.random.default_rng(0)
    touched = source.locate(np.arange(len(source)))
    for _ in range(40):
        extent = touched[rng.integers(len(touched))]
        file = tmp_path / extent.path
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[extent.start + rng.integers(extent.num_bytes)] ^= 1 << rng.integers(8)
        file.write_bytes(flipped)
        with pytest.raises(DataError, match="must be as when it was indexed, but bytes 0 to"):
            FileSource(tmp_path, verify=True, **settings).read_leaves(np.arange(len(source)))
        if FORMATS[name].has_digests:
            with pytest.raises(BadSample, match="must be whole"):
                FileSource(tmp_path).read_leaves(np.arange(len(source)))
        file.write_bytes(content)


@pytest.mark.parametrize("name", [*TREES, "prepared"])
def test_a_leaf_without_a_name_keeps_it(tmp_path, name):
    samples = [{"": value, "b": number} for number, value in enumerate([1, 2])]
    write_shards(tmp_path / "a", "tar" if name == "prepared" else name, samples, num_shards=1)
    source = FileSource(tmp_path / "a")
    if name == "prepared":
        prepare(source, tmp_path / "b", "arrow", 1000)
        source = FileSource(tmp_path / "b")
    read = [{leaf: value for leaf, value in one.items() if leaf != "__key__"} for one in source.read_leaves([0, 1])]
    assert read == samples


@pytest.mark.parametrize("name", ["jsonl", "jsonl_gz", "jsonl_zst"])
@pytest.mark.parametrize("sample", [{"base64": "eA=="}, {"x.base64": "eA==", "b": 1}, {"x": {"a": {"base64": 5}}}])
def test_text_is_not_written_where_it_would_be_read_as_bytes(name, sample):
    with pytest.raises(DataError, match="must not be named base64 alone for JSON lines"):
        FORMATS[name]().encode([sample])
    assert FORMATS[name]().encode([sample | {"x.c": 1, "c": 1}] if "x.base64" in sample else [{"b": 1}])


def test_a_line_that_is_one_value_is_a_bad_sample():
    with pytest.raises(BadSample, match="'base64' says that it is one value"):
        FORMATS["jsonl"]().decode("a.jsonl", {}, 0, b'{"base64": "eA=="}')


@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
@pytest.mark.parametrize("name", TREES)
def test_shards_without_samples_lie_between_others(tmp_path, name):
    write_shards(tmp_path, name, [{"a": 1}], num_shards=1, indexed=False)
    FORMATS[name]().write(LocalStorage(tmp_path), "shard-0", [])
    FORMATS[name]().finish(LocalStorage(tmp_path), open_place(tmp_path).list_files())
    for _ in range(2):
        source = FileSource(tmp_path)
        assert source.shard_sizes == [0, 1]
        assert source.read_leaves([0])[0]["a"] == 1
        write_index(open_place(tmp_path), "auto")


def test_leaves_whose_names_differ_by_their_endings_alone_keep_them():
    assert decode_leaves([("a.bin", b"x"), ("a.cls", b"1")]) == {"a.bin": b"x", "a.cls": 1}
    entries = b""
    for name, content in (("a.cls", b"1"), ("a", b"x")):
        feature = tfrecord._field(1, tfrecord._field(1, content))
        entries += tfrecord._field(1, tfrecord._field(1, name.encode()) + tfrecord._field(2, feature))
    assert tfrecord._read_example(tfrecord._field(1, entries)) == {"a.cls": 1, "a": b"x"}
