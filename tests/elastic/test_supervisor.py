"""The supervisor, with threads as workers; and whole runs whose workers are lost."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from supervised_threads import Threads, supervise

from paceline.comm.control import ControlServer, ControlStore
from paceline.comm.progress import PROGRESS
from paceline.elastic import member as member_module
from paceline.elastic import watch as watch_module
from paceline.elastic.facts import LeaveAsked, Ready, Scaled, StopAsked
from paceline.elastic.journal import Journal, read_journal
from paceline.elastic.member import Lateness
from paceline.elastic.protocol import Coordinator, MembershipSettings
from paceline.elastic.requests import RequestBox
from paceline.elastic.supervisor import Supervisor
from paceline.elastic.watch import Patience
from paceline.errors import CommunicationError


class Unmeasured(Lateness):
    """Lateness of a machine that is never starved."""

    def note(self, late_s):
        pass


def test_survivors_go_on_with_the_most_advanced_state_and_a_new_worker(tmp_path):
    views = {}

    def script(member):
        while True:
            view = member.next_view(20)
            views.setdefault(view.epoch, {})[view.rank] = view
            if view.epoch == 0 and member.name == "w1":
                return "killed"
            if view.size == 3 and view.epoch > 0:
                return "done"
            if view.epoch == 0:
                member.report_loss(6 if member.name == "w2" else 5, is_whole=member.name != "w0", reason="gone")
            else:
                while not member.change_is_pending():
                    time.sleep(0.01)
                member.at_boundary(7)

    supervisor, workforce = supervise(tmp_path, MembershipSettings(3), script)
    assert [view.step for view in views[1].values()] == [6] * views[1][0].size
    assert views[1][0].names[:2] == ("w2", "w0")
    assert views[1][0].previous[:2] == (2, 0)
    assert views[1][1].rank == 1
    last = views[max(views)][0]
    assert sorted(last.names) == ["w0", "w1.2", "w2"]
    assert workforce.slots["w1.2"] == 1
    assert workforce.num_restarts == 0
    again = read_journal(tmp_path / "journal")
    assert (again.epoch, again.view, again.is_over) == (supervisor.coordinator.epoch, supervisor.coordinator.view, True)


def test_workers_join_and_leave_as_asked(tmp_path):
    sizes = {}

    def script(member):
        while True:
            view = member.next_view(20)
            sizes[view.epoch] = view.names
            if view.names == ("w0", "w2"):
                return "done"
            while not member.change_is_pending():
                time.sleep(0.01)
            member.at_boundary(view.epoch + 1)

    requests = [(0, Scaled(3)), (1, Scaled(2)), (1, LeaveAsked("w1"))]
    _, workforce = supervise(tmp_path, MembershipSettings(2), script, requests=requests)
    assert (sizes[0], sizes[1], sizes[max(sizes)]) == (("w0", "w1"), ("w0", "w1", "w2"), ("w0", "w2"))
    assert (workforce.num_restarts, workforce.killed) == (0, [])


def test_a_worker_that_does_not_vote_and_gives_no_sign_of_life_is_killed(tmp_path):
    def script(member):
        view = member.next_view(20)
        if view.epoch == 0 and member.name == "w1":
            member.close()  # no sign of life any more
            time.sleep(30)
        if view.epoch == 0:
            member.report_loss(1, is_whole=True, reason="it took too long")
            member.next_view(20)
        return "done"

    supervisor, workforce = supervise(tmp_path, MembershipSettings(2), script, patience=Patience(vote_s=0.6))
    assert workforce.killed[0] == "w1"
    assert "w1 stands still: no sign of life for" in supervisor.coordinator.view.reason


def test_a_worker_that_hangs_by_the_verdict_of_another_is_killed_though_it_beats(tmp_path):
    def script(member):
        view = member.next_view(20)
        if view.epoch == 0 and member.name == "w1":
            time.sleep(30)
        if view.epoch == 0:
            member.report_loss(1, is_whole=True, reason="rank 1 hangs", accused=("w1",))
            member.next_view(20)
        return "done"

    supervisor, workforce = supervise(tmp_path, MembershipSettings(2), script)
    assert workforce.killed[0] == "w1"
    assert "w1 hangs: rank 1 hangs" in supervisor.coordinator.view.reason
    assert read_journal(tmp_path / "journal").view == supervisor.coordinator.view


def test_who_opens_a_group_hears_at_once_that_another_worker_is_lost(tmp_path):
    """The others have come, and wait in the new group for what the lost one was about to say there."""
    reasons = {}

    def script(member):
        view = member.next_view(20)
        if view.epoch == 0 and member.name == "w2":
            member._store.set("entered/0/2", "")
            while not PROGRESS.connects_to or not member._store.check(["entered/0/0", "entered/0/1"]):
                time.sleep(0.01)
            return "killed"
        if view.epoch > 0:
            return "done"
        try:
            member.open_group(view, torch.device("cpu"), 1000, "shared_memory").close()
        except CommunicationError as error:
            reasons[member.name] = str(error)
            member.report_loss(0, is_whole=True, reason=str(error))
            member.next_view(20)
        return "done"

    with ControlServer() as server:
        store = ControlStore(server.access)
        supervisor, _ = supervise(tmp_path, MembershipSettings(3), script, store=store)
        store.close()
    assert set(reasons) == {"w0", "w1"}
    assert set(reasons.values()) <= {
        "a worker of epoch 0 was lost before all had come",
        "worker w0 could not join epoch 0: a worker of epoch 0 was lost while others waited for it",
        "worker w1 could not join epoch 0: a worker of epoch 0 was lost while others waited for it",
    }
    assert (supervisor.coordinator.epoch, supervisor.coordinator.view.reason[:11]) == (1, "w2 was lost")


def test_who_builds_alone_and_does_not_end_is_replaced_alone_and_people_are_told(tmp_path):
    told = []

    def script(member):
        if member.name == "w1":
            time.sleep(30)
        member.next_view(20)
        return "done"

    options = {"patience": Patience(standstill_s=2.0), "tell_standstill": told.append}
    supervisor, workforce = supervise(tmp_path, MembershipSettings(2), script, **options)
    assert (workforce.killed, workforce.num_restarts) == (["w1"], 0)
    assert supervisor.coordinator.view.names == ("w0", "w1.2")
    *warned, killed = [words for words in told if words.startswith("w1 has been building for ")]
    assert warned
    assert killed.endswith("; it is killed, and w1.2 is started in its place"), told


@pytest.mark.parametrize(
    ("phase", "waits", "is_killed"), [(b"forward", {}, True), (b"save", {}, False), (b"reduce", {1: 1}, False)]
)
def test_who_does_not_stop_as_asked_is_killed_unless_it_saves_or_waits(tmp_path, monkeypatch, phase, waits, is_killed):
    monkeypatch.setattr(PROGRESS, "waits", waits)

    def script(member):
        PROGRESS.stamp(3, time.monotonic(), phase)
        member.open_group(member.next_view(20), torch.device("cpu"), 20, "auto")
        time.sleep(30 if is_killed else 2)
        return "done"

    options = {"patience": Patience(stop_s=0.5), "requests": [(0, StopAsked())]}
    supervisor, workforce = supervise(tmp_path, MembershipSettings(1), script, **options)
    assert workforce.killed == (["w0"] if is_killed else [])
    told = "w0 is in phase forward of step 3, and made no progress for "
    assert [words.startswith(told) for words in supervisor.killed_at_stop.values()] == [True] * is_killed


def test_a_worker_that_has_voted_hangs_by_no_verdict(tmp_path):
    """w0 accuses w1, which has voted, and w2 takes its time."""
    reported = {"w0": threading.Event(), "w1": threading.Event()}

    def script(member):
        view = member.next_view(20)
        if view.epoch == 0:
            before = {"w0": ["w1"], "w1": [], "w2": ["w0", "w1"]}[member.name]
            accused = {"w0": ("w1",), "w1": (), "w2": ("w0", "w1")}[member.name]
            for name in before:
                reported[name].wait(20)
            if member.name == "w2":
                time.sleep(0.5)
            member.report_loss(1, is_whole=True, reason="they hang", accused=accused)
            if member.name in reported:
                reported[member.name].set()
            member.next_view(20)
        return "done"

    _, workforce = supervise(tmp_path, MembershipSettings(3), script)
    assert workforce.killed == []


@pytest.mark.parametrize("module", [member_module, watch_module], ids=["workers", "launcher"])
@pytest.mark.parametrize("late_s", [0.0, 2.0], ids=["quiet", "starved"])
def test_silence_is_borne_for_longer_where_the_machine_is_starved(tmp_path, monkeypatch, module, late_s):
    class Known(Lateness):
        def note(self, measured_s):
            self.late_s = late_s

    for each in (member_module, watch_module):
        monkeypatch.setattr(each, "Lateness", Known if each is module else Unmeasured)

    def script(member):
        view = member.next_view(20)
        if view.epoch == 0 and member.name == "w1":
            time.sleep(0.6)  # a beat tells of the lateness
            member.close()
            time.sleep(0.9)
        elif view.epoch == 0:
            time.sleep(0.6)
        if view.epoch == 0:
            member.report_loss(1, is_whole=True, reason="it took too long")
            member.next_view(20)
        return "done"

    _, workforce = supervise(tmp_path, MembershipSettings(2), script, patience=Patience(vote_s=0.3))
    assert (workforce.killed[:1] == ["w1"]) == (late_s == 0.0)


def test_lateness_is_forgotten_in_time():
    lateness = Lateness()
    lateness.note(1.0)
    for _ in range(7):
        lateness.note(0.01)
    assert lateness.late_s == pytest.approx(0.9**7)
    lateness.note(2.0)
    assert lateness.late_s == 2.0


@pytest.mark.parametrize("beats", [True, False], ids=["they beat", "they do not"])
def test_people_are_told_where_workers_are_that_all_stand_still(tmp_path, beats):
    told_once = threading.Event()

    def script(member):
        PROGRESS.stamp(3, time.monotonic(), b"forward")
        member.next_view(20)
        if not beats:
            member.close()
        told_once.wait(20)
        return "done"

    class Told(list):
        def append(self, words):
            super().append(words)
            told_once.set()

    told = Told()
    _, workforce = supervise(
        tmp_path, MembershipSettings(2), script, patience=Patience(standstill_s=1.0), tell_standstill=told.append
    )
    assert told[0].startswith("no worker has made progress for 1 s: w0 is in phase forward of step 3; w1 is in")
    assert not workforce.killed


@pytest.mark.parametrize("obstacle", ["the model is split", ""])
def test_where_nobody_can_go_on_all_start_again_until_it_is_in_vain(tmp_path, obstacle):
    def script(member):
        view = member.next_view(20)
        if member.name.startswith("w1") or not obstacle:
            return "killed" if obstacle else "failed"
        while True:
            member.report_loss(view.step, is_whole=True, reason="gone")
            member.next_view(20)

    supervisor, workforce = supervise(tmp_path, MembershipSettings(2, max_restarts=2), script, obstacle=obstacle)
    assert workforce.num_restarts == 3
    assert supervisor.gave_up == "gave up after 2 restarts without progress: as the log says"
    _, workforce = supervise(tmp_path, MembershipSettings(2), script, obstacle=obstacle, is_final=True)
    assert workforce.num_restarts == 1


def test_a_line_of_the_journal_that_was_cut_off_never_happened(tmp_path):
    path = tmp_path / "journal"
    assert read_journal(path) is None
    with Journal(path, MembershipSettings(2)) as journal:
        journal.append(Scaled(4))
        journal.append(Scaled(3))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert read_journal(path).target == 4
    path.write_bytes(whole)
    assert read_journal(path).target == 3


def test_a_worker_that_asks_to_leave_does_so_in_time_while_the_other_goes_on(tmp_path):
    def script(member):
        while True:
            view = member.next_view(20)
            if view.epoch and "w1" not in view.names and view.size == 2:
                return "done"
            if member.name == "w1":
                member.leave()
            while not member.change_is_pending():
                time.sleep(0.01)
            member.at_boundary(view.epoch + 1)

    supervisor, workforce = supervise(tmp_path, MembershipSettings(2), script, notice_s=20.0)
    assert workforce.killed == []
    assert "w1" not in supervisor.coordinator.view.names
    assert '"fact": "LeaveAsked", "name": "w1", "within_s": 20.0' in (tmp_path / "journal").read_text()


@pytest.mark.timeout(30)
def test_who_is_alone_hands_its_state_on_and_leaves_though_nobody_says_anything_more(tmp_path):
    def script(member):
        while True:
            view = member.next_view(20)
            if "w0" not in view.names:
                return "done"
            if view.epoch == 0:
                member.leave()
            while not member.change_is_pending():
                time.sleep(0.01)
            member.at_boundary(view.epoch + 1)

    supervisor, workforce = supervise(tmp_path, MembershipSettings(1), script, notice_s=60.0)
    assert supervisor.coordinator.view.names == ("w1",)
    assert supervisor.coordinator.view.reason == "w0 left"
    assert (workforce.killed, workforce.num_restarts) == ([], 0)


def test_who_must_leave_and_reaches_no_boundary_in_time_is_killed(tmp_path):
    def script(member):
        view = member.next_view(20)
        if view.epoch == 0 and member.name == "w1":
            member.leave()
            time.sleep(30)
        while view.epoch == 0:
            if len(workers["supervisor"].coordinator.members) == 1:
                member.report_loss(1, is_whole=True, reason="gone")
                view = member.next_view(20)
            time.sleep(0.01)
        return "done"

    workers = {}
    original = Supervisor.__init__

    def keep(self, *arguments, **options):
        workers["supervisor"] = self
        original(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Supervisor, "__init__", keep)
        supervisor, workforce = supervise(tmp_path, MembershipSettings(2), script, notice_s=0.5)
    assert workforce.killed[0] == "w1"
    assert "w1 had to leave, and reached no step boundary in time" in supervisor.coordinator.view.reason


def test_where_the_last_worker_must_leave_all_are_asked_to_stop_in_time(tmp_path):
    asked = threading.Event()

    def script(member):
        member.next_view(20)
        member.leave()
        return "done" if asked.wait(20) else "killed"

    def start_nobody(self, name, slot, epoch):
        if name == "w0":
            start(self, name, slot, epoch)

    start = Threads.start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Threads, "start", start_nobody)
        patch.setattr(Threads, "kill", lambda self, name: self.ended.put((name, "killed", "it is not needed")))
        supervisor, _ = supervise(tmp_path, MembershipSettings(1), script, notice_s=1.0, ask_to_stop=asked.set)
    assert asked.is_set()
    assert supervisor.is_stopping


def test_a_file_asks_a_worker_to_leave_within_a_time(tmp_path):
    coordinator = Coordinator(MembershipSettings(2))
    coordinator.begin()
    box = RequestBox(tmp_path, 8, "the samples", notice_s=30.0)
    for name in ("w0", "w1"):
        coordinator.handle(Ready(name))
    folder = tmp_path / "requests"
    (folder / "w1.leave").touch()
    assert box.read(coordinator) == [LeaveAsked("w1", 30.0)]
    (folder / "w0.leave").write_text("12.5\n")
    assert box.read(coordinator) == [LeaveAsked("w0", 12.5)]
    assert list(folder.iterdir()) == []
    for name, said, words in (
        ("w7", "", "must be one of w0, w1, but got w7"),
        ("w0", "soon", "must hold the seconds in which the worker leaves, or nothing, but holds 'soon'; write"),
        ("w1", "-1", "must be more than 0 seconds, but got -1"),
    ):
        (folder / f"{name}.leave").write_text(said)
        assert box.read(coordinator) == []
        assert words in (folder / f"{name}.leave.refused").read_text()


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("x.request", lambda path: path.write_text("not json"), "a request must be JSON, but"),
        ("x.request", lambda path: path.write_text("[" * 100_000), "a request must be JSON, but"),
        ("x.request", lambda path: path.write_text("[3]"), "must be an object of JSON, but"),
        (
            "x.request",
            lambda path: path.write_text('{"target": true}'),
            "must be from 1 to 8, the samples, but got True",
        ),
        ("x.request", lambda path: path.write_text('{"leave": ["w1"]}'), "must be one of w0, w1, but got ['w1']"),
        (
            "x.request",
            lambda path: path.write_text('{"leave": "w1", "within_s": true}'),
            "more than 0 seconds, but got",
        ),
        (
            "x.request",
            lambda path: path.write_text('{"leave": "w1", "within_s": 1' + "0" * 400 + "}"),
            "more than 0 seconds, but got 1000",
        ),
        ("x.request", lambda path: path.mkdir(), "a request must be a file, but"),
        ("\udcff.leave", Path.touch, r"must be one of w0, w1, but got \udcff"),
        ("w1.leave", lambda path: path.mkdir(), "a request must be a file, but"),
        ("w1.leave", os.mkfifo, "a request must be a file, but"),
        ("w1.leave", lambda path: path.symlink_to(path), "must be readable by the launcher, but is not"),
        ("w1.leave", lambda path: path.write_bytes(b"\xff"), "must hold the seconds in which the worker leaves"),
    ],
)
@pytest.mark.parametrize("is_left_over", [False, True])
def test_what_is_no_request_is_refused_once_and_the_run_goes_on(tmp_path, name, make, words, is_left_over):
    coordinator = Coordinator(MembershipSettings(2))
    coordinator.begin()
    for worker in ("w0", "w1"):
        coordinator.handle(Ready(worker))
    path = tmp_path / "requests" / name
    answer = path.with_suffix(".answer" if name.endswith(".request") else ".leave.refused")
    path.parent.mkdir()
    if is_left_over:
        make(path)
    box = RequestBox(tmp_path, 8, "the samples")
    if is_left_over and not path.is_dir():
        assert box.read(coordinator) == []
        assert list(path.parent.iterdir()) == [], "it is of an earlier time"
        return
    if not is_left_over:
        make(path)
    assert box.read(coordinator) == []
    said = answer.read_text()
    assert words in (json.loads(said)["words"] if name.endswith(".request") else said)
    answer.unlink()
    assert box.read(coordinator) == []
    assert not answer.exists()
    if path.is_dir():
        path.rmdir()
        assert box.read(coordinator) == []
    path.with_name("w1.leave").write_text("5")
    assert box.read(coordinator) == [LeaveAsked("w1", 5.0)]


def test_the_folder_of_requests_may_vanish_and_a_request_be_taken_back(tmp_path):
    coordinator = Coordinator(MembershipSettings(2))
    coordinator.begin()
    box = RequestBox(tmp_path, 8, "the samples")
    (tmp_path / "requests" / "gone.request").symlink_to(tmp_path / "nothing")
    assert box.read(coordinator) == []
    (tmp_path / "requests" / "gone.request").unlink()
    (tmp_path / "requests").rmdir()
    assert box.read(coordinator) == []
