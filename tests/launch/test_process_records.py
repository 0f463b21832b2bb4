"""Records of processes, on disks that become full."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.checkpoint.durable import WriterLock
from paceline.comm.control import ControlAccess
from paceline.comm.stacks import started_at
from paceline.errors import StorageError
from paceline.launch import launcher_watch, processes
from paceline.launch.launcher_watch import LauncherWatch
from paceline.launch.left_run import LeftProcess
from paceline.launch.place import LAUNCHER_FILE, LauncherPlace, ReplacedError
from paceline.launch.process_record import ProcessRecord
from paceline.launch.processes import describe_exit

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def fill(monkeypatch):
    """Return a function after which no new file can be written."""

    def begin():
        def refuse(self, data):
            self.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, "write_bytes", refuse)

    return begin


def test_a_record_is_written_over_the_one_before_where_the_disk_is_full(tmp_path, fill):
    path, record = tmp_path / "w0.process", ProcessRecord.of_this_process(3)
    record.save(path)
    fill()
    ended = replace(record, code=1)
    ended.save(path)
    assert ProcessRecord.load(path) == ended
    assert os.listdir(tmp_path) == ["w0.process"], "nothing else is left"


def test_a_copy_of_a_folder_has_no_processes_of_its_own(tmp_path):
    path, record = tmp_path / "workers" / "w0.process", ProcessRecord.of_this_process(3)
    path.parent.mkdir()
    record.save(path)
    shutil.copytree(path.parent, tmp_path / "copy")
    assert ProcessRecord.load(tmp_path / "copy" / path.name) is None, "or the copy would stop, or kill, the original's"
    path.parent.rename(tmp_path / "moved")
    assert ProcessRecord.load(tmp_path / "moved" / path.name) == record


def test_a_snapshot_of_the_volume_has_no_processes_of_its_own(tmp_path, monkeypatch):
    path, stat = tmp_path / "w0.process", Path.stat
    ProcessRecord.of_this_process(3).save(path)

    def stat_elsewhere(self, **options):
        return os.stat_result([*stat(self, **options)[:2], -1, *stat(self, **options)[3:]])

    monkeypatch.setattr(Path, "stat", stat_elsewhere)
    assert ProcessRecord.load(path) is None, "its folder has the same number on another volume"


@pytest.mark.parametrize("content", ["[" * 100_000, "[1]", "{}", '{"pid": ', "\x00"])
def test_what_is_no_record_is_none(tmp_path, content):
    path = tmp_path / "launcher.json"
    path.write_text(content)
    assert ProcessRecord.load(path) is None


class EndedError(Exception):
    """The process would have ended."""


@pytest.mark.parametrize(("is_known", "is_other"), [(False, True), (True, True), (False, False)])
def test_a_worker_that_another_launcher_does_not_know_ends(tmp_path, monkeypatch, capsys, is_known, is_other):
    def end(*arguments):
        raise EndedError(arguments[-1])

    monkeypatch.setattr(launcher_watch.os, "_exit", end)
    monkeypatch.setattr(launcher_watch.os, "kill", end)
    first = replace(ProcessRecord.of_this_process(1), started=1)  # it has ended
    watch = LauncherWatch(tmp_path, "w0", 1, timeout_s=0.01, signal_number=signal.SIGTERM)
    replace(first, number=2 if is_other else 1).save(tmp_path / "launcher.json")
    if is_known:
        watch._write()
    with pytest.raises(EndedError) as ended:
        watch._keep_looking(first)
    is_unknown = is_other and not is_known
    assert ended.value.args == (69 if is_unknown else signal.SIGTERM,)
    assert ("w0.process is gone" in capsys.readouterr().err) is is_unknown


def test_the_record_of_another_process_is_not_written_over(tmp_path, fill):
    path, record = tmp_path / "w0.process", ProcessRecord.of_this_process(3)
    record.save(path)
    fill()
    with pytest.raises(OSError, match="No space left"):
        replace(record, number=4).save(path)
    assert ProcessRecord.load(path) == record
    assert os.listdir(tmp_path) == ["w0.process"]


def test_a_left_worker_that_a_full_disk_ended_was_not_killed(tmp_path, fill):
    path = tmp_path / "w0.process"
    record = replace(ProcessRecord.of_this_process(3), started=1)  # it has ended
    record.save(path)
    fill()
    replace(record, code=1).save(path)
    left = LeftProcess(path, tmp_path / "rank0.err")
    assert left.exitcode == 1
    left.close()


def test_who_fails_on_a_full_disk_is_told_with_it(tmp_path, monkeypatch):
    assert describe_exit("w1", 1, tmp_path) == "w1 exited with code 1"
    assert describe_exit("w1", -signal.SIGKILL, tmp_path) == "w1 was killed by SIGKILL"
    monkeypatch.setattr(processes.shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 0))
    assert describe_exit("w1", 1, tmp_path) == f"w1 exited with code 1; the disk of {tmp_path} is full"


def test_an_access_that_cannot_be_written_leaves_no_file(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(StorageError):
        ControlAccess("127.0.0.1", 1, bytes(32)).save(tmp_path / "control.json")
    assert os.listdir(tmp_path) == []


def test_without_patience_a_worker_goes_on_as_long_as_its_launcher_is_there(tmp_path, monkeypatch):
    asked = threading.Event()
    monkeypatch.setattr(launcher_watch, "_LOOK_S", 0.01)
    monkeypatch.setattr(LauncherWatch, "_keep_asking", lambda _: asked.set())
    with subprocess.Popen(["sleep", "60"]) as launcher:
        record = replace(ProcessRecord.of_this_process(1), pid=launcher.pid, started=started_at(launcher.pid))
        record.save(tmp_path / LAUNCHER_FILE)
        watch = LauncherWatch(tmp_path, "w0", 1, timeout_s=0.0, signal_number=signal.SIGTERM)
        assert watch.begin()
        try:
            assert not asked.wait(0.3)
        finally:
            launcher.kill()
    assert asked.wait(30)


@pytest.mark.parametrize("content", ["[" * 100_000, "", None])
def test_a_launcher_whose_record_is_damaged_holds_its_run_and_writes_it_again(tmp_path, content):
    (tmp_path / "workers").mkdir()
    lock = WriterLock(tmp_path)
    lock.acquire()
    place, path = LauncherPlace(tmp_path / "workers"), tmp_path / "workers" / LAUNCHER_FILE
    before = ProcessRecord.load(path)
    assert before is not None
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    place.check()
    assert ProcessRecord.load(path) == before, "workers, and who takes the run over, read it"
    lock.release()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_launcher_that_another_one_has_replaced_finds_a_foreign_lock(tmp_path, has_ended):
    (tmp_path / "workers").mkdir()
    lock = WriterLock(tmp_path)
    lock.acquire()
    place, path = LauncherPlace(tmp_path / "workers"), tmp_path / "workers" / LAUNCHER_FILE
    (tmp_path / ".new").write_text(f"process 1 on {socket.gethostname()}\n")
    (tmp_path / ".new").replace(tmp_path / ".lock")
    if has_ended:
        path.unlink()
    else:
        ProcessRecord(1, 2, "other", 2).save(path)
    with pytest.raises(ReplacedError, match="has taken the place of this one"):
        place.check()
    place.release()
    assert path.exists() is not has_ended, "that is the other's"
    lock.release()
