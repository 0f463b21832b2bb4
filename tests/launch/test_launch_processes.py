"""Processes of one machine: what they return, and how they end."""

import os
import signal
import time
from pathlib import Path

import pytest

from paceline.comm.control import ControlAccess, ControlStore
from paceline.comm.join import open_store
from paceline.launch import local, processes
from paceline.launch.processes import ProcessesError, make_environment, run_in_processes, watch_processes
from paceline.launch.signals import StopRequest


def tell_place(num_bytes):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return [int(os.environ[name]) for name in names], b"x" * num_bytes


def test_each_returns_a_value_however_large():
    values = run_in_processes(3, tell_place, 1_000_000)
    assert {rank: place for rank, (place, _) in values.items()} == {rank: [rank, rank, 3, 3] for rank in range(3)}
    assert {len(text) for _, text in values.values()} == {1_000_000}


def end_somehow(endings):
    """End as told: by a signal, with a code, or never."""
    ending = endings[int(os.environ["RANK"])]
    if ending is None:
        time.sleep(1000)
    if ending < 0:
        os.kill(os.getpid(), -ending)
    os._exit(ending)


def watch(endings):
    with StopRequest() as stop:
        return watch_processes(len(endings), end_somehow, endings, stop=stop)


def test_where_one_is_killed_the_others_are_told_to_end():
    ended = watch([None, -signal.SIGKILL, None])
    assert ended.exit_codes == {0: -signal.SIGTERM, 1: -signal.SIGKILL, 2: -signal.SIGTERM}
    assert ended.failures == {1: -signal.SIGKILL}


def leave_before_the_other(leaving):
    if os.environ["RANK"] == "0":
        leaving.write_text(f"{os.getpid()}\n")
        os._exit(75)
    while not (leaving.exists() and leaving.read_text().endswith("\n")):
        time.sleep(0.01)
    while Path("/proc", leaving.read_text().strip()).exists():
        time.sleep(0.01)
    time.sleep(0.3)  # for a launcher that would end this one too
    return "still here"


def test_one_that_was_preempted_ends_nobody_else(tmp_path):
    with StopRequest() as stop:
        ended = watch_processes(2, leave_before_the_other, tmp_path / "leaving", stop=stop)
    assert ended.exit_codes == {0: 75, 1: 0}
    assert ended.values == {1: "still here"}


def freeze_or_fail(frozen):
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        frozen.touch()
        time.sleep(1000)
    while not frozen.exists():
        time.sleep(0.01)
    os._exit(3)


def test_who_does_not_end_in_time_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    with StopRequest() as stop:
        ended = watch_processes(2, freeze_or_fail, tmp_path / "frozen", stop=stop)
    assert ended.exit_codes == {0: -signal.SIGKILL, 1: 3}
    assert ended.failures == {1: 3}


def stop_launcher_and_wait(launcher, number, folder):
    """Have the launcher told to stop, by one of its workers, and return what comes back."""
    came = []
    signal.signal(number, lambda *_: came.append(number))
    (folder / os.environ["RANK"]).touch()
    while not came:
        if os.environ["RANK"] == "0" and (folder / "1").exists():
            os.kill(launcher, number)
        time.sleep(0.05)
    return came[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_is_handed_on_and_waited_for(number, tmp_path):
    with StopRequest() as stop:
        ended = watch_processes(2, stop_launcher_and_wait, os.getpid(), int(number), tmp_path, stop=stop)
    assert stop.number == number
    assert ended.values == {0: number, 1: number}


def test_a_file_gives_this_user_access_while_it_runs(tmp_path, monkeypatch):
    path, seen = tmp_path / "workers" / "control.json", {}

    def look(*arguments, **_settings):
        ControlStore(ControlAccess.load(path)).set("key", "value")
        (access,) = (one for one in arguments if isinstance(one, ControlAccess))
        for name, value in make_environment(0, 1, access).items():
            monkeypatch.setenv(name, value)
        seen.update(value=open_store().get("key"), mode=path.stat().st_mode & 0o777)
        raise ZeroDivisionError

    monkeypatch.setattr(local, "LocalWorkforce", look)
    with pytest.raises(ZeroDivisionError):
        local.launch(tmp_path, 1)
    assert seen == {"value": b"value", "mode": 0o600}
    assert not path.exists()


def fail():
    raise ZeroDivisionError("mine")


def test_a_failure_is_an_error_with_every_exit_code():
    with pytest.raises(ProcessesError, match="every process must return, but rank 0 ended with 1; read what"):
        run_in_processes(1, fail)


def ask_to_stop(process):
    os.kill(process, signal.SIGTERM)
    time.sleep(1000)


def test_a_signal_to_stop_ends_all_with_its_code_and_without_a_traceback():
    with pytest.raises(SystemExit) as raised:
        run_in_processes(2, ask_to_stop, os.getpid())
    assert raised.value.code == 128 + signal.SIGTERM
