"""Files of a folder as a storage."""

import pytest

from paceline.data.storage import LocalStorage
from paceline.errors import DataError


def test_files_are_listed_read_in_ranges_and_written_whole(tmp_path):
    storage = LocalStorage(tmp_path)
    storage.write("b/two.bin", b"0123456789")
    storage.write("a.bin", b"abc")
    assert [(file.path, file.num_bytes) for file in storage.list_files()] == [("a.bin", 3), ("b/two.bin", 10)]
    assert [file.path for file in storage.list_files("b/")] == ["b/two.bin"]
    assert storage.read("b/two.bin") == b"0123456789"
    assert storage.read("b/two.bin", 7) == b"789"
    assert storage.read_ranges("b/two.bin", [(8, 2), (0, 3)]) == [b"89", b"012"]
    before = storage.find("a.bin")
    storage.write("a.bin", b"abcd")
    assert storage.find("a.bin").version != before.version
    assert storage.find("c.bin") is None


def test_a_missing_or_short_file_is_named(tmp_path):
    storage = LocalStorage(tmp_path)
    with pytest.raises(DataError, match=r"none\.bin must be readable, but: No such file"):
        storage.read("none.bin")
    storage.write("a.bin", b"abc")
    with pytest.raises(DataError, match=r"a\.bin must have 6 bytes, but has 3"):
        storage.read("a.bin", 2, 4)


def test_folders_that_are_links_are_listed_and_those_that_lead_round_are_not(tmp_path):
    for name in ("root/a", "root/b", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "1").write_bytes(b"1")
    (tmp_path / "root" / "c").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "round").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "a" / "b").symlink_to(tmp_path / "root" / "b")
    (tmp_path / "root" / "b" / "a").symlink_to(tmp_path / "root" / "a")
    found = [file.path for file in LocalStorage(tmp_path / "root").list_files()]
    assert found == ["a/1", "a/b/1", "b/1", "b/a/1", "c/1"]
