"""Processes of a supervisor: how they end, and where what they print lies."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from paceline.comm.control import ControlAccess
from paceline.launch import forking, processes, workforce
from paceline.launch.process_record import ProcessRecord
from paceline.launch.starting import StartingProcess
from paceline.launch.workforce import LocalWorkforce


def act(directory, epoch, name):
    print(f"{name} in epoch {epoch}, rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
    endings = {"w0": 0, "w1": 75, "w2": 69, "w3": 2, "w4": 3, "w5": -signal.SIGKILL, "w6": -signal.SIGABRT}
    if name == "frozen":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (directory / "frozen").touch()
        time.sleep(1000)
    sys.stdout.flush()
    if endings[name] < 0:
        os.kill(os.getpid(), -endings[name])
    os._exit(endings[name])


def open_workforce(tmp_path):
    (tmp_path / "workers").mkdir()
    return LocalWorkforce(act, tmp_path, 7, ControlAccess("127.0.0.1", 1, bytes(32)))


def test_how_each_ended_is_told_once(tmp_path):
    force = open_workforce(tmp_path)
    for slot in range(7):
        force.start(f"w{slot}", slot, epoch=4)
    found = []
    while any(isinstance(process, StartingProcess) for process in force._running.values()):
        found += force.wait(0)  # on a busy machine
    if "w3" in force._running:
        assert (tmp_path / "workers" / "w3.pid").read_text() == f"{force._running['w3'].pid}\n"
    while len(found) < 7:
        found += force.wait(5)
    assert not list((tmp_path / "workers").glob("*.pid"))
    ends = {name: end for name, end, _ in found}
    assert ends == dict(zip(["w0", "w1", "w2", "w3", "w4", "w5", "w6"], [
        "done", "done", "gave_up", "failed", "killed", "killed", "gave_up"], strict=True))  # fmt: skip
    assert {name: words for name, _, words in found}["w5"] == "w5 was killed by SIGKILL"
    assert force.ended.failures == {1: 75, 2: 69, 3: 2, 4: 3, 5: -signal.SIGKILL, 6: -signal.SIGABRT}
    assert (tmp_path / "workers" / "rank4.out").read_text() == "w4 in epoch 4, rank 4 of 7\n"
    force.start("w0", 5, epoch=5)
    while not force.wait(5):
        pass
    assert 5 not in force.ended.failures, "it was replaced"
    assert "---- started again" in (tmp_path / "workers" / "rank5.out").read_text()


def end_by_signal(directory, epoch, name):
    os.kill(os.getpid(), int(name))


@pytest.mark.parametrize(("stop_signal", "told"), [(signal.SIGTERM, [15, 2]), (signal.SIGINT, [2])])
def test_a_signal_to_one_that_was_just_forked_asks_all_to_stop(tmp_path, stop_signal, told):
    (tmp_path / "workers").mkdir()
    access, found = ControlAccess("127.0.0.1", 1, bytes(32)), []
    force = LocalWorkforce(end_by_signal, tmp_path, 1, access, stop_signal=stop_signal)
    force.tell_asked = found.append
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        force.start(str(int(number)), 0, epoch=0)
        while not (ended := force.wait(5)):
            pass
        assert ended[0][1] == "killed"
    assert found == told, "unless it lets that one leave alone"
    force.start("15", 0, epoch=0)
    force.signal(signal.SIGTERM)
    while not force.wait(5):
        pass
    assert found == told, "all know it"


def print_words(directory, epoch, name):
    print(epoch)
    print(f"{epoch}, loudly", file=sys.stderr)
    os._exit(0)  # without what Python does at its end


def test_what_is_printed_lies_by_rank_and_grows_from_start_to_start(tmp_path):
    (tmp_path / "workers").mkdir()
    force = LocalWorkforce(print_words, tmp_path, 2, ControlAccess("127.0.0.1", 1, bytes(32)))
    for epoch in (1, 2):
        for slot in range(2):
            force.start(f"w{slot}", slot, epoch)
        ended = []
        while len(ended) < 2:
            ended += force.wait(5)
    files = sorted(path.name for path in (tmp_path / "workers").iterdir())
    assert files == ["rank0.err", "rank0.out", "rank1.err", "rank1.out"]
    lines = (tmp_path / "workers" / "rank1.err").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("1, loudly", "2, loudly")
    assert lines[2].startswith("---- started again, ")
    assert (tmp_path / "workers" / "rank0.out").read_text().startswith("1\n")


def print_much(directory, epoch, name):
    print("much " * 10**5)
    print("more", file=sys.stderr)


def test_a_full_disk_takes_what_is_printed_and_ends_nobody(tmp_path):
    (tmp_path / "workers").mkdir()
    for end in ("out", "err"):
        (tmp_path / "workers" / f"rank0.{end}").symlink_to("/dev/full")
    force = LocalWorkforce(print_much, tmp_path, 1, ControlAccess("127.0.0.1", 1, bytes(32)))
    force.start("w0", 0, epoch=0)
    while not (ended := force.wait(5)):
        pass
    assert ended[0][1] == "done"


def test_a_worker_is_replaced_where_somebody_has_removed_the_folder_of_what_they_print(tmp_path):
    force = LocalWorkforce(print_words, tmp_path, 1, ControlAccess("127.0.0.1", 1, bytes(32)))
    force.start("w0", 0, epoch=3)
    while not (ended := force.wait(5)):
        pass
    assert ended[0][1] == "done"
    assert (tmp_path / "workers" / "rank0.out").read_text() == "3\n"


def test_what_a_full_disk_has_taken_is_told_once_there_is_room_again(tmp_path):
    descriptor = os.open("/dev/full", os.O_WRONLY)
    stream = processes._open_output(descriptor, "strict")
    print("lost", file=stream)
    with (tmp_path / "out").open("w") as file:
        os.dup2(file.fileno(), descriptor)
        print("kept", file=stream)
    assert (tmp_path / "out").read_text() == (
        "\n---- output is missing here: [Errno 28] No space left on device ----\nkept\n"
    )
    os.close(descriptor)


def test_who_does_not_end_in_time_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(workforce, "GRACE_S", 0.2)
    force = open_workforce(tmp_path)
    force.start("frozen", 0, epoch=0)
    while not (tmp_path / "frozen").exists():
        time.sleep(0.01)
    force.end_all()
    assert force.ended.exit_codes == {0: -signal.SIGKILL}
    assert not force.ended.failures, "it did not fail by itself"
    force.begin_again()
    assert not force.ended.exit_codes


def obey(directory, epoch, name):
    record = ProcessRecord.of_this_process(0)
    record.save(directory / "workers" / f"{name}.process")
    (directory / f"{name}.is_here").touch()
    while not (directory / f"{name}.ends").exists():
        time.sleep(0.01)
    replace(record, code=75).save(directory / "workers" / f"{name}.process")
    os._exit(75)


def wait_for(path):
    deadline_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.fixture
def stopped(tmp_path):
    """A worker that runs, and another one that is started while the process that forks it is stopped."""
    (tmp_path / "workers").mkdir()
    force = LocalWorkforce(obey, tmp_path, 2, ControlAccess("127.0.0.1", 1, bytes(32)))
    force.start("w0", 0, epoch=0)
    while not (tmp_path / "w0.is_here").exists():
        assert force.wait(0.01) == []
    os.kill(force._server, signal.SIGSTOP)
    try:
        force.start("w1", 1, epoch=0)
        yield force
    finally:
        os.kill(force._server, signal.SIGCONT)
        force.kill_all()


def test_a_start_that_does_not_answer_holds_up_nobody_and_people_are_told(tmp_path, monkeypatch, stopped):
    monkeypatch.setattr(workforce, "_STOPPED_S", 0.1)
    (tmp_path / "w0.ends").touch()
    while not (found := stopped.wait(0.1)):
        pass
    assert found == [("w0", "done", "w0 exited with code 75")]
    time.sleep(0.1)
    assert stopped.wait(0.1) == []
    (words,) = stopped.read_news()
    assert words.startswith("w1 is being started, but the process that workers are forked from (multiprocessing.forks")
    assert ": it is stopped, as by SIGSTOP; workers that train go on meanwhile" in words
    assert stopped.locate("w1") == f", since process {stopped._server}, which forks it, has not answered"
    stopped.signal(signal.SIGTERM)
    assert not (tmp_path / "w1.is_here").exists()
    os.kill(stopped._server, signal.SIGCONT)
    while not (found := stopped.wait(0.1)):
        pass
    assert found == [("w1", "killed", "w1 was killed by SIGTERM")], "signals reach it once it is there"
    assert stopped.read_news() == []


def test_a_start_that_does_not_answer_can_be_given_up(tmp_path, stopped):
    starting = stopped._running["w1"]
    stopped.kill("w1")
    assert stopped.wait(0.1) == [("w1", "killed", "w1 was killed by SIGKILL")]
    os.kill(stopped._server, signal.SIGCONT)
    starting._thread.join(30)
    deadline_s = time.monotonic() + 30
    while os.path.exists(f"/proc/{starting._popen.pid}"):
        assert time.monotonic() < deadline_s, "it is killed as soon as it is there"
        time.sleep(0.01)


def test_a_start_waits_for_its_own_process_alone(monkeypatch, stopped):
    waited = []
    monkeypatch.setattr(workforce, "is_stopped", lambda _: False)  # it does not answer for another reason
    monkeypatch.setattr(StartingProcess, "join", lambda process, within_s: waited.append(process))
    stopped.start("w0.2", 0, epoch=1)
    assert isinstance(stopped._running["w1"], StartingProcess)
    assert waited == [stopped._running["w0.2"]], "many starts would hold up the launcher for long"


@pytest.mark.slow
def test_a_start_is_made_again_where_the_process_that_forks_is_killed(tmp_path, stopped):
    os.kill(stopped._server, signal.SIGKILL)
    (tmp_path / "w1.ends").touch()
    found = []
    while not found:
        found = stopped.wait(0.1)
    assert found == [("w1", "done", "w1 exited with code 75")]


@pytest.fixture
def bereft(tmp_path):
    """Two workers that the process which they were forked from has left."""
    (tmp_path / "workers").mkdir()
    force = LocalWorkforce(obey, tmp_path, 2, ControlAccess("127.0.0.1", 1, bytes(32)))
    for slot in range(2):
        force.start(f"w{slot}", slot, epoch=0)
        wait_for(tmp_path / f"w{slot}.is_here")
    assert force.read_news() == []
    server = forking.find_server()
    os.kill(server, signal.SIGKILL)
    deadline_s = time.monotonic() + 20
    while not (news := force.read_news()):
        assert force.wait(0.05) == []
        assert time.monotonic() < deadline_s
    assert news == [
        f"the process that workers are forked from (multiprocessing.forkserver, pid {server}) was killed by SIGKILL; "
        "another one is started, and w0, w1 train on"
    ]
    yield force
    force.kill_all()


def test_workers_outlive_the_process_that_they_were_forked_from(tmp_path, bereft):
    assert bereft.wait(0.05) == []
    (tmp_path / "w0.ends").touch()
    while not (found := bereft.wait(5)):
        pass
    assert found == [("w0", "done", "w0 exited with code 75")]
    bereft.kill("w1")
    while not (found := bereft.wait(5)):
        pass
    assert found == [("w1", "killed", "w1 was killed by SIGKILL")]


@pytest.mark.slow
def test_new_workers_are_forked_from_another_process_then(tmp_path, monkeypatch, bereft):
    monkeypatch.setattr(workforce, "_ANSWER_S", 1e9)  # it imports torch first
    bereft.start("w0.2", 0, epoch=1)
    (tmp_path / "w0.2.ends").touch()
    while not (found := bereft.wait(5)):
        pass
    assert found == [("w0.2", "done", "w0.2 exited with code 75")]
    assert bereft.read_news() == []


def test_a_process_to_fork_from_that_is_no_child_here_is_seen_to_run_and_to_end(tmp_path):
    """A program that was forked from one with such a process uses it too."""
    script = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    grandchild = int(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout)
    try:
        assert forking.find_end(grandchild) == ""
    finally:
        os.kill(grandchild, signal.SIGKILL)
    deadline_s = time.monotonic() + 30
    while forking.find_end(grandchild) != "ended":
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
