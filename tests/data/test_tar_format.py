"""Tar shards with WebDataset names."""

import io
import tarfile

import numpy as np
import pytest
import torch

from paceline.data.formats.leaves import decode_leaves, encode_leaves, flatten, nest
from paceline.data.formats.tar import Tar
from paceline.data.storage import LocalStorage
from paceline.errors import BadSample, DataError


def write_tar(folder, entries, form=tarfile.USTAR_FORMAT):
    with tarfile.open(folder / "s.tar", "w", format=form) as shard:
        for name, content in entries:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            shard.addfile(entry, io.BytesIO(content))
    storage = LocalStorage(folder)
    return storage, storage.find("s.tar")


def read_tar(folder):
    storage = LocalStorage(folder)
    file = storage.find("s.tar")
    scan = Tar().scan(storage, file)
    read = [storage.read("s.tar", start, size) for start, size in zip(scan.starts, scan.sizes, strict=True)]
    return [sample for content in read for sample in Tar().decode("s.tar", {}, 0, content)]


def test_an_empty_shard_has_no_samples(tmp_path):
    write_tar(tmp_path, [])
    assert read_tar(tmp_path) == []


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_up_to_the_first_dot_are_one_sample_in_every_dialect(tmp_path, form):
    folder = "deep/" * 18  # longer than a plain header holds
    long = "".join(folder) + "x" * 90 if form != tarfile.USTAR_FORMAT else "deep/a"
    write_tar(
        tmp_path,
        [
            (f"{long}.cls", b"7"),
            (f"{long}.seg.png", b"\x89PNG"),
            ("b.txt", b"caf\xc3\xa9"),
            ("b.json", b'{"n": [1, 2]}'),
        ],
        form,
    )
    first, second = read_tar(tmp_path)
    assert first == {"__key__": long, "cls": 7, "seg": b"\x89PNG"}
    assert second == {"__key__": "b", "txt": "café", "json": {"n": [1, 2]}}


def test_files_that_macos_puts_beside_others_are_no_data(tmp_path):
    names = ("._.DS_Store", ".DS_Store", "._a.cls", "a.cls", "._a.txt", "a.txt", "d/._b.cls", "d/b.cls")
    write_tar(tmp_path, [(name, b"7") for name in names])
    assert read_tar(tmp_path) == [{"__key__": "a", "cls": 7, "txt": "7"}, {"__key__": "d/b", "cls": 7}]


def test_parts_of_a_sample_that_are_apart_are_refused(tmp_path):
    write_tar(tmp_path, [("a.cls", b"1"), ("b.cls", b"2"), ("a.txt", b"x")])
    with pytest.raises(
        DataError, match=r"one after another, but a\.txt is apart from others of a; write the shard anew"
    ):
        read_tar(tmp_path)


def test_a_cut_or_overwritten_shard_is_refused(tmp_path):
    storage, _ = write_tar(tmp_path, [("a.bin", bytes(2000)), ("b.bin", bytes(2000))])
    content = storage.read("s.tar")
    storage.write("s.tar", content[: 3000 + 512])
    with pytest.raises(DataError, match=r"s\.tar must hold 2000 bytes from byte \d+ on, but has 3512; it was cut"):
        Tar().scan(storage, storage.find("s.tar"))
    broken = bytearray(content)
    broken[2] ^= 1
    storage.write("s.tar", bytes(broken))
    with pytest.raises(DataError, match=r"s\.tar must have a whole header at byte 0, but got another checksum"):
        Tar().scan(storage, storage.find("s.tar"))
    with pytest.raises(BadSample, match="another checksum"):
        Tar().decode("s.tar", {}, 0, bytes(broken[:2560]))
    write_tar(tmp_path, [("a.cls", b"seven")])
    with pytest.raises(BadSample, match="sample 'a' must be whole, but: invalid literal"):
        read_tar(tmp_path)


def test_a_shard_that_ends_anywhere_before_its_end_mark_is_refused(tmp_path):
    storage, file = write_tar(
        tmp_path, [("a.bin", bytes(100)), ("a.cls", b"1"), ("b.bin", bytes(100)), ("b.cls", b"2")]
    )
    content = storage.read("s.tar")
    whole = 4 * 1024
    for size in {0, 1, 512, 700, 1024, file.num_bytes // 2 % whole, 1536, 2047, 2048, 3072, 4000, whole, whole + 511}:
        storage.write("s.tar", content[:size])
        with pytest.raises(DataError, match=r"s\.tar must .*was cut"):
            Tar().scan(storage, storage.find("s.tar"))
    storage.write("s.tar", content[: whole + 512])
    assert [sample["cls"] for sample in read_tar(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (tarfile.LNKTYPE, r"b\.txt is a second link to a file; pack with --hard-dereference"),
        (tarfile.SYMTYPE, r"b\.txt is a link to a file; pack with --dereference"),
        (tarfile.GNUTYPE_SPARSE, r"b\.txt is a file with holes; pack without --sparse"),
        (tarfile.FIFOTYPE, r"b\.txt is an entry of type 6; leave it out"),
        ("GNU.sparse.major", r"b\.txt is a file with holes; pack without --sparse"),
    ],
)
def test_entries_without_a_file_of_their_own_are_refused(tmp_path, kind, message):
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.PAX_FORMAT) as shard:
        shard.addfile(tarfile.TarInfo("a.txt"))
        entry = tarfile.TarInfo("b.txt")
        if isinstance(kind, bytes):
            entry.type, entry.linkname = kind, "a.txt"
        else:
            entry.pax_headers = {kind: "1"}
        shard.addfile(entry)
    with pytest.raises(DataError, match=r"s\.tar must hold files with their content, but " + message):
        read_tar(tmp_path)


def test_a_name_twice_and_joined_shards_are_refused(tmp_path):
    write_tar(tmp_path, [("a.cls", b"1"), ("a.txt", b"x"), ("a.cls", b"2")])
    with pytest.raises(DataError, match=r"s\.tar must have each name once, but has a\.cls twice"):
        read_tar(tmp_path)
    storage, _ = write_tar(tmp_path, [("a.cls", b"1")])
    one = storage.read("s.tar")
    storage.write("s.tar", one + one)
    with pytest.raises(DataError, match=r"must end with its first block of 512 zeros, at byte 1024, but has more at"):
        read_tar(tmp_path)


def test_a_folder_with_a_long_name_does_not_name_the_file_after_it(tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.GNU_FORMAT) as shard:
        folder = tarfile.TarInfo("x" * 150)
        folder.type = tarfile.DIRTYPE
        shard.addfile(folder)
        shard.addfile(tarfile.TarInfo("b.txt"))
    assert read_tar(tmp_path) == [{"__key__": "b", "txt": ""}]


def test_an_id_that_is_no_plain_number_is_text(tmp_path):
    write_tar(tmp_path, [(f"{place}.id", content) for place, content in enumerate([b"img_1", b"007", b"-7"])])
    assert [sample["id"] for sample in read_tar(tmp_path)] == ["img_1", "007", -7]


TREE = {
    "image": b"\x89PNG\r\n\x1a\nrest",
    "mask": np.arange(6, dtype=np.int16).reshape(2, 3),
    "label": 4,
    "weight": 0.1,
    "words": "ä b",
    "raw": b"\x00\x01",
    "facts": [1, "two", None],
    "nested": {"left": torch.arange(3.0), "right": {"flag": True}},
}


def test_a_tree_of_leaves_returns_as_it_was(tmp_path):
    flat = flatten(TREE)
    assert list(flat)[-2:] == ["nested.left", "nested.right.flag"]
    back = nest(decode_leaves(encode_leaves(flat)))
    assert back.keys() == TREE.keys()
    np.testing.assert_array_equal(back.pop("mask"), TREE["mask"])
    np.testing.assert_array_equal(back["nested"].pop("left"), [0.0, 1.0, 2.0])
    assert back["nested"] == {"right": {"flag": True}}
    plain = ("image", "label", "weight", "words", "raw", "facts")
    assert [back[name] for name in plain] == [TREE[name] for name in plain]
    names = [name for name, _ in encode_leaves(flat)]
    assert names[:4] == ["image.png", "mask.npy", "label.cls", "weight.json"]


def test_shards_are_the_same_bytes_and_keys_stay_apart():
    samples = [flatten({"__key__": "same.key", **TREE})] * 2
    assert Tar().encode(samples) == Tar().encode(samples)
    with tarfile.open(fileobj=io.BytesIO(Tar().encode(samples))) as shard:
        names = shard.getnames()
    assert names[0] == "same_key.image.png"
    assert len({name.split(".")[0] for name in names}) == 2


def test_what_no_format_stores_is_refused():
    with pytest.raises(
        DataError, match="a leaf must be bytes, text, a number, an array or JSON, but x is set; convert it"
    ):
        encode_leaves({"x": {1}})
    with pytest.raises(DataError, match="a leaf must hold a value or further leaves, but a holds both"):
        nest({"a": 1, "a.b": 2})
