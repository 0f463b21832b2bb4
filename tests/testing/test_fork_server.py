import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline.launch.forking import prepare_to_fork
from paceline.testing import run_processes

OWNER = """
import sys
from paceline.testing import run_processes
run_processes(1, f"{sys.argv[1]}:tell_and_wait", {"file": sys.argv[2]})
"""


def say_where(number):
    os.environ["PACELINE_LEFT_BEHIND"] = "yes"
    is_known = "test_fork_server" in sys.modules
    return [number, os.getcwd(), os.environ.get("PACELINE_TOLD"), is_known, torch.get_num_threads()]


def find_left_behind():
    return os.environ.get("PACELINE_LEFT_BEHIND")


def tell_and_wait(file):
    Path(file).write_text(f"{os.getpid()} {os.getppid()}")
    signal.pause()


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_each_start_is_as_if_it_were_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_TOLD", "this")
    (first,) = run_processes(1, say_where, {"number": 1})
    assert first.value == [1, str(tmp_path), "this", True, 1]
    (second,) = run_processes(1, find_left_behind)
    assert (second.exit_code, second.value) == (0, None)


def test_what_does_not_end_in_time_is_ended_and_the_next_start_works(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.testing.processes._GRACE_S", -10.0)  # before the fork's own time is out
    with pytest.raises(TimeoutError, match="must end in time"):
        run_processes(1, tell_and_wait, {"file": str(tmp_path / "pids")}, timeout_s=14.0)
    monkeypatch.undo()
    assert run_processes(1, find_left_behind)[0].exit_code == 0
    rank, starter = (int(pid) for pid in (tmp_path / "pids").read_text().split())
    deadline = time.monotonic() + 50
    while is_there(rank) or is_there(starter):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_nothing_outlives_a_killed_owner(tmp_path):
    file = tmp_path / "pids"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, __file__, str(file)])
    deadline = time.monotonic() + 50
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [int(pid) for pid in file.read_text().split()]
    assert all(is_there(pid) for pid in pids)
    owner.kill()
    owner.wait()
    while any(is_there(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def list_blocked_signals():
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))


@pytest.mark.slow
def test_ranks_hear_signals_though_a_launcher_has_started_the_fork_server():
    multiprocessing.forkserver._forkserver._stop()
    prepare_to_fork()
    (result,) = run_processes(1, list_blocked_signals)
    assert result.value == []
