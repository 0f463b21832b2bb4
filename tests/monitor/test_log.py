import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from story import Clock, make_step

from paceline.monitor import EventError, EventLog, Warned, read_log, select


def append_lines(path: Path, rank: int, num_lines: int, together: Barrier | None = None) -> None:
    with EventLog(path, run="first", rank=rank) as log:
        if together is not None:
            together.wait(30)
        for step in range(num_lines):  # from short to far beyond a page and a pipe's atomic size
            log.write(Warned(message=str(rank) * (step * 37 % 9000)), step=step)


def test_lines_of_four_processes_never_interleave(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(4)
    writers = [context.Process(target=append_lines, args=(path, rank, 500, together)) for rank in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert b"\n\n" not in path.read_bytes()  # a line that is still being written was taken for a torn one
    records = read_log(path)
    assert records.num_skipped == 0
    for rank in range(4):
        own = [record for record in select(records, Warned) if record.rank == rank]
        assert [record.step for record in own] == list(range(500))
        assert all(set(record.event.message) <= {str(rank)} for record in own)


def test_a_frozen_writer_holds_up_nobody_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.monitor.log._LOCK_TIMEOUT_S", 0.05)
    append_lines(tmp_path / "log", 0, 3)
    with (tmp_path / "log").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        append_lines(tmp_path / "log", 1, 1)
    assert [record.rank for record in read_log(tmp_path / "log")] == [0, 0, 0, 1]


def test_a_forked_process_writes_though_the_lock_was_held(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log", run="first", rank=0) as log:
        log._lock.acquire()
        writer = multiprocessing.get_context("fork").Process(target=log.write, args=(make_step(1),), kwargs={"step": 1})
        thread = threading.Thread(target=writer.start)  # in the child this thread is the only one, and holds no lock
        thread.start()
        thread.join()
        writer.join(20)
        log._lock.release()
        exit_code = writer.exitcode
        writer.kill()
    assert exit_code == 0
    assert len(read_log(tmp_path / "log")) == 1


def test_a_log_that_is_removed_or_moved_is_begun_anew_by_all_who_write(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log"
    path.parent.mkdir()
    with EventLog(path, run="first", rank=0) as one, EventLog(path, run="first", rank=1) as other:
        one.write(Warned(message="before"), step=1)
        path.unlink()
        other.write(Warned(message="after"), step=2)
        one.write(Warned(message="too"), step=3)
        assert [record.step for record in read_log(path)] == [2, 3], "a launcher reads there how workers have ended"
        path.rename(tmp_path / "old")
        one.write(Warned(message="again"), step=4)
        assert [record.step for record in read_log(path)] == [4]
        path.parent.rename(tmp_path / "moved")
        one.write(Warned(message="moved"), step=5)
        assert [record.step for record in read_log(tmp_path / "moved" / "log")] == [4, 5]
        assert not one.num_lost


def test_a_process_that_goes_to_another_folder_writes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with EventLog("log", run="first", rank=0) as log:
        monkeypatch.chdir(tmp_path / "other")
        log.write(Warned(message="from there"), step=1)
    assert len(read_log(tmp_path / "log")) == 1
    assert not (tmp_path / "other" / "log").exists()


def test_threads_share_a_log(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log", run="first", rank=0) as log:
        threads = [
            threading.Thread(target=lambda: [log.write(make_step(step), step=step) for step in range(200)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    records = read_log(tmp_path / "log")
    assert sorted(record.step for record in records) == sorted([*range(200)] * 4)


def test_the_envelope_says_who_and_when(tmp_path: Path) -> None:
    clock = Clock()
    with EventLog(tmp_path / "log", run="first", rank=3, epoch=2, clock=clock) as log:
        clock.now_s = 12.5
        log.write(Warned(message="a"), step=7)
        log.epoch = 3
        log.write(Warned(message="b"), step=8)
    first, second = read_log(tmp_path / "log")
    assert (first.run, first.rank, first.epoch, first.step, first.time_s) == ("first", 3, 2, 7, 12.5)
    assert second.epoch == 3
    assert first.unix_s > 1.7e9


def test_a_torn_line_is_closed_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append_lines(path, 0, 3)
    torn = path.read_bytes()[:-20]
    path.write_bytes(torn)
    with EventLog(path, run="first", rank=1) as log:
        log.write(Warned(message="still here"), step=9)
    assert path.read_bytes().startswith(torn + b"\n{")
    records = read_log(path)
    assert [record.step for record in records] == [0, 1, 9]
    assert records.num_skipped == 1


def test_a_full_disk_warns_once_and_counts() -> None:
    with EventLog("/dev/full", run="first", rank=0) as log:
        with pytest.warns(RuntimeWarning, match=r"/dev/full must be writable, but got: No space left") as caught:
            log.write(make_step(1), step=1)
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            log.write(make_step(2), step=2)
        assert log.num_lost == 2


def test_a_log_says_what_it_lost_once_it_can(tmp_path: Path) -> None:
    """A limit on the size of files is a disk that is full: the line that crosses it is torn."""
    code = f"""
import resource, warnings
from paceline.monitor import EventLog, Warned
log = EventLog({str(tmp_path / "log")!r}, run="first", rank=0)
log.write(Warned(message="before"), step=0)
resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step in (1, 2, 3):
        log.write(Warned(message="x" * 300), step=step)
assert len(caught) == 1, caught
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.write(Warned(message="after"), step=4)
assert log.num_lost == 3
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    records = read_log(tmp_path / "log")
    assert records.num_skipped == 1
    messages = [record.event.message for record in select(records, Warned)]
    assert messages == ["before", "3 events are missing here: the log could not be written", "after"]


def test_a_log_that_is_closed_says_what_it_lost_and_counts_each_line_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b'{"one": 1}\n{"two": 2}\n{"three": 3}\n'

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with EventLog(tmp_path / "log", run="first", rank=0) as log:
        with monkeypatch.context() as full:
            full.setattr(os, "write", refuse)
            with pytest.warns(RuntimeWarning, match="No space left"):
                log.copy(lines)
        assert log.num_lost == 3
    (said,) = select(read_log(tmp_path / "log"), Warned)
    assert said.event.message == "3 events are missing here: the log could not be written"


def test_a_closed_log_refuses(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log", run="first", rank=0)
    log.close()
    log.close()
    with pytest.raises(EventError, match="must be open to be written to"):
        log.write(make_step(1), step=1)


def test_the_null_device_is_a_log_for_those_who_want_none() -> None:
    with EventLog(os.devnull, run="first", rank=0) as log:
        log.write(make_step(1), step=1)
        assert log.num_lost == 0
