"""The file of a run outlives what the run does not."""

import os
from pathlib import Path

import pytest

from paceline.errors import SettingsError
from paceline.training.run_file import RunFile


def test_what_a_power_cut_leaves_is_whole(tmp_path, monkeypatch):
    synced, fsync, replace = set(), os.fsync, Path.replace

    def note(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def check(self, target):
        assert self.stat().st_ino in synced, "it would have its place before its content"
        synced.discard(tmp_path.stat().st_ino)
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "replace", check)
    files = [RunFile(recipe="transformer_lm", num_workers=number, run={}) for number in (1, 2)]
    for file in files:
        file.save(tmp_path)
        assert tmp_path.stat().st_ino in synced
    assert sorted(os.listdir(tmp_path)) == ["run-1.json", "run.json"]
    assert RunFile.load(tmp_path) == files[1]


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000])
def test_a_damaged_file_is_told_in_one_sentence(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(SettingsError, match=r"run\.json must be JSON, but"):
        RunFile.load(tmp_path)
