"""Agents of other machines, and the launcher that takes their workers; both in this process, with processes faked."""

import json
import signal
import threading
import time

import pytest

from paceline.comm.control import ControlAccess, ControlServer, ControlStore
from paceline.elastic.facts import Died, HostLost, Offered, Ready, StartWorker, Voted, Withdrawn
from paceline.elastic.protocol import Coordinator, MembershipSettings
from paceline.errors import SettingsError
from paceline.launch import agent as agent_module
from paceline.launch import agents as agents_module
from paceline.launch.agent import LauncherLostError, _prepare, _Service, _take_folder, serve_launcher
from paceline.launch.agent_messages import (
    INVITATION,
    MAIL,
    NUM_AGENTS,
    Demand,
    Invitation,
    Offer,
    demand_key,
    digest_code,
    find_versions,
    offer_key,
    read,
    write,
)
from paceline.launch.agents import SpreadWorkforce
from paceline.launch.exit_codes import ExitCode
from paceline.launch.signals import StopRequest
from paceline.monitor.events import Warned
from paceline.monitor.log import EventLog
from paceline.monitor.reader import read_log
from paceline.recipes.transformer_lm import run as make_run
from paceline.training.run_file import RunFile


class Processes:
    """What stands for the processes of one machine."""

    def __init__(self):
        self.running, self.ended, self.started, self.signals = set(), [], [], []

    def start(self, name, slot, epoch):
        self.started.append((name, slot, epoch))
        self.running.add(name)

    def end(self, name, end, reason):
        self.running.discard(name)
        self.ended.append((name, end, reason))

    def kill(self, name):
        if name in self.running:
            self.end(name, "killed", f"{name} was killed by SIGKILL")

    def wait(self, timeout_s):
        time.sleep(min(timeout_s, 0.005))
        ended, self.ended = self.ended, []
        return ended

    def read_news(self):
        return []

    def forget(self, name):
        pass

    def signal(self, number):
        self.signals.append(number)

    def end_all(self):
        self.running.clear()

    def kill_all_running(self):
        for name in list(self.running):
            self.kill(name)

    kill_all = kill_all_running

    @property
    def is_running(self):
        return bool(self.running)


class Lab:
    """A launcher with one worker, which trains, and an agent."""

    def __init__(self, tmp_path, server, *, num_workers=2, most_workers=8, notice_s=20.0):
        self.log = tmp_path / "events.jsonl"
        self.folder = tmp_path / "agent"
        self.folder.mkdir()
        (self.folder / "events.jsonl").write_bytes(b"of an earlier time\n")
        self.local, self.remote, self.stop, self.told = Processes(), Processes(), StopRequest(), []
        self.spread = SpreadWorkforce(
            self.local, ControlStore(server.access), EventLog(self.log, run="r", rank=-1), most_workers, "the samples"
        )
        self.coordinator = Coordinator(MembershipSettings(1))
        self.do(self.coordinator.begin())
        self.feed(Ready("w0"))
        self.store = ControlStore(server.access)
        self.store._client._patience_s = 0.2
        offer = Offer("b", num_workers)
        service = _Service(self.store, self.remote, offer, self.folder, self.stop, notice_s, self.told.append)
        self.result = []

        def run():
            try:
                self.result.append(service.run())
            except Exception as error:
                self.result.append(error)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def do(self, actions):
        for action in actions:
            if isinstance(action, StartWorker):
                self.spread.start(action.name, action.slot, self.coordinator.epoch + 1)

    def feed(self, fact):
        self.do(self.coordinator.handle(fact))

    def wait_for_fact(self):
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s:
            if facts := self.spread.read_facts(self.coordinator):
                (fact,) = facts
                self.feed(fact)
                return fact
            time.sleep(0.005)
        raise AssertionError("nothing came")

    def wait_until(self, condition):
        deadline_s = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline_s
            assert not self.spread.read_facts(self.coordinator)
            time.sleep(0.005)

    def finish(self):
        self.thread.join(20)
        (result,) = self.result
        return result


@pytest.fixture
def server():
    with ControlServer() as server:
        yield server


def test_workers_that_are_offered_are_started_there_and_their_ends_and_logs_come_back(tmp_path, server):
    lab = Lab(tmp_path, server)
    assert lab.wait_for_fact() == Offered("b", 2)
    lab.wait_until(lambda: len(lab.remote.started) == 2)
    assert lab.remote.started == [("w0@b", 0, 1), ("w1@b", 1, 1)]
    with EventLog(lab.folder / "events.jsonl", run="r", rank=1) as log:
        log.write(Warned(message="it is warm here"), step=3)
        log.write(Warned(message=(long := "long " * 10**5)), step=4)
    lab.remote.end("w0@b", "killed", "w0@b was killed by SIGSEGV")
    ended = []
    lab.wait_until(lambda: ended.extend(lab.spread.wait(0)) or ended)
    time.sleep(0.3)
    assert not lab.spread.read_facts(lab.coordinator)
    assert [*ended, *lab.spread.wait(0)] == [("w0@b", "killed", "w0@b was killed by SIGSEGV")]
    messages = [record.event.message for record in read_log(lab.log)]
    assert messages == ["it is warm here", long]
    lab.spread.kill("w1@b")
    lab.wait_until(lambda: not lab.remote.running)
    assert lab.local.started == [("w0", 0, 0)]
    lab.spread.close("the run is over")
    assert lab.finish() is ExitCode.FINISHED
    assert lab.told == ["the run is over"]


def test_signals_reach_workers_elsewhere_and_a_restart_ends_them(tmp_path, server):
    lab = Lab(tmp_path, server)
    lab.wait_for_fact()
    lab.wait_until(lambda: lab.remote.running)
    lab.spread.signal(signal.SIGINT)
    lab.wait_until(lambda: lab.remote.signals == [signal.SIGINT])
    threading.Timer(0.2, lab.remote.kill_all).start()
    lab.spread.end_all()
    assert lab.remote.signals == [signal.SIGINT, signal.SIGTERM]
    assert not lab.remote.running
    assert lab.spread.wait(0) == [], "the supervisor has ended them itself"
    lab.spread.close("")


def test_a_signal_to_a_worker_elsewhere_that_was_just_forked_asks_all_to_stop(tmp_path, server):
    lab, asked = Lab(tmp_path, server), []
    lab.local.tell_asked = asked.append
    lab.wait_for_fact()
    lab.wait_until(lambda: len(lab.remote.running) == 2)
    end = lab.remote.end

    def end_by_signal(timeout_s):
        lab.remote.wait = wait
        lab.remote.tell_asked(signal.SIGTERM)
        end("w1@b", "killed", "w1@b was killed by SIGTERM")
        return wait(timeout_s)

    wait, lab.remote.wait = lab.remote.wait, end_by_signal
    ended = []
    lab.wait_until(lambda: ended.extend(lab.spread.wait(0)) or ended)
    time.sleep(0.6)  # two more signs of life
    assert not lab.spread.read_facts(lab.coordinator)
    assert asked == [signal.SIGTERM]
    lab.remote.kill_all()
    lab.spread.close("the run is over")


def test_a_log_that_somebody_has_removed_there_ends_nobody(tmp_path, server):
    lab = Lab(tmp_path, server)
    lab.wait_for_fact()
    lab.wait_until(lambda: len(lab.remote.running) == 2)
    (lab.folder / "events.jsonl").unlink()
    beat = lab.spread._agents[0].offer.beat
    lab.wait_until(lambda: lab.spread._agents[0].offer.beat > beat)
    with EventLog(lab.folder / "events.jsonl", run="r", rank=1) as log:
        log.write(Warned(message="begun anew"), step=3)
    lab.wait_until(lambda: [record.event.message for record in read_log(lab.log)] == ["begun anew"])
    lab.remote.kill_all()
    lab.spread.close("the run is over")
    assert lab.finish() is ExitCode.FINISHED


def test_a_machine_that_gives_no_sign_of_life_is_lost_and_told_so_if_it_comes_back(tmp_path, server, monkeypatch):
    monkeypatch.setattr(agents_module, "SILENCE_S", 0.8)
    lab = Lab(tmp_path, server)
    lab.wait_for_fact()
    lab.wait_until(lambda: lab.remote.running)
    held = threading.Event()
    lab.remote.wait = lambda timeout_s: held.wait(20) and []
    lost = lab.wait_for_fact()
    assert isinstance(lost, HostLost)
    assert lost.host == "b"
    assert "no sign of life for" in lost.reason
    assert (lab.coordinator.target, lab.coordinator.places) == (1, {})
    held.set()
    error = lab.finish()
    assert isinstance(error, LauncherLostError)
    assert "they were stopped: b was lost: no sign of life" in str(error)
    assert not lab.remote.running


def test_a_machine_whose_workers_take_long_to_start_is_not_lost(tmp_path, server, monkeypatch):
    monkeypatch.setattr(agents_module, "SILENCE_S", 1.2)
    lab = Lab(tmp_path, server)
    start = lab.remote.start
    lab.remote.start = lambda *arguments: time.sleep(1.5) or start(*arguments)
    lab.wait_for_fact()
    lab.wait_until(lambda: len(lab.remote.running) == 2)
    lab.remote.kill_all()
    lab.spread.close("the run is over")
    assert lab.finish() is ExitCode.FINISHED


def test_a_signal_lets_the_machine_leave_at_a_boundary(tmp_path, server):
    lab = Lab(tmp_path, server)
    lab.wait_for_fact()
    lab.wait_until(lambda: len(lab.remote.running) == 2)
    for name in ("w0@b", "w1@b"):
        lab.feed(Ready(name))
    lab.feed(Voted("w0", 0, 2))
    assert lab.coordinator.view.size == 3
    lab.stop.number = signal.SIGTERM
    assert lab.wait_for_fact() == Withdrawn("b")
    for name in lab.coordinator.members:
        lab.feed(Voted(name, 1, 5))
    assert lab.coordinator.view.names == ("w0",)
    for name in ("w0@b", "w1@b"):
        lab.remote.end(name, "done", "")
    deadline_s = time.monotonic() + 20
    while lab.coordinator.places:
        assert time.monotonic() < deadline_s
        for fact in lab.spread.read_facts(lab.coordinator):
            assert fact == HostLost("b", "its workers have left")
            lab.feed(fact)
        for name, end, reason in lab.spread.wait(0.01):
            lab.feed(Died(name, end, reason))
    assert lab.finish() is ExitCode.FINISHED
    assert lab.told == ["SIGTERM: the workers of this machine leave within 20 s", "its workers have left"]


def test_who_reaches_no_boundary_in_time_is_killed(tmp_path, server):
    lab = Lab(tmp_path, server, notice_s=0.3)
    lab.wait_for_fact()
    lab.wait_until(lambda: len(lab.remote.running) == 2)
    lab.stop.number = signal.SIGTERM
    assert lab.finish() is ExitCode.FINISHED
    assert not lab.remote.running


def test_more_workers_than_the_run_can_have_are_refused(tmp_path, server):
    lab = Lab(tmp_path, server, most_workers=2)
    deadline_s = time.monotonic() + 20
    while not lab.result:
        assert time.monotonic() < deadline_s
        assert not lab.spread.read_facts(lab.coordinator)
    assert "--workers must be at most 1, as the run has 1 and can have 2, the samples, but got 2" in str(lab.finish())
    assert isinstance(lab.finish(), SettingsError)


def test_without_its_launcher_an_agent_stops_its_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_module, "_STOP_S", 0.2)
    remote = Processes()
    monkeypatch.setattr(agent_module, "LocalWorkforce", lambda *_, **__: remote)
    monkeypatch.setattr(agent_module, "_prepare", lambda invitation, parent: _take_folder(parent, "r"))
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "events.jsonl").touch()
    with ControlServer() as server:
        store = ControlStore(server.access)
        write(store, INVITATION, Invitation("r", {}, 1, "", find_versions(), False))
        threading.Timer(0.5, server._end).start()
        remote.running.add("w0@b")
        with pytest.raises(LauncherLostError, match="launcher of r must answer, but no longer does, so the workers of"):
            serve_launcher(server.access, 1, name="b", out=tmp_path)
    assert remote.signals == [signal.SIGTERM]
    assert not remote.running


def make_invitation(**changes):
    file = RunFile(recipe="transformer_lm", num_workers=1, run=make_run().model_dump(mode="json"))
    given = {
        "name": "r",
        "file": file.model_dump(mode="json"),
        "num_samples": 1,
        "code": "",
        "leaves_on_sigterm": False,
    }
    return Invitation(**({"versions": find_versions()} | given | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"versions": {"paceline": "0.0.9"}},
            r"paceline must be the same on all .*, but is .* and 0\.0\.9 where",
        ),
        ({"versions": {"torch": "2.0.0"}}, r"torch must be the same on all machines, .*; install torch 2\.0\.0 here"),
        ({"code": "other"}, "must be the same file on all machines, but another one lies here"),
        ({"file": {"recipe": "/nowhere/mine.py:run", "num_workers": 1, "run": {}}}, "must lie under the same path"),
        ({}, r"must be the same on all machines, but has \d+ samples here and 1 where the launcher runs"),
    ],
)
def test_a_machine_that_does_not_fit_the_run_is_told_why(tmp_path, changes, words):
    with pytest.raises(SettingsError, match=words):
        _prepare(make_invitation(**changes), tmp_path)
    assert not (tmp_path / "r").exists()


def test_two_agents_of_one_folder_have_a_folder_each(tmp_path):
    file = make_invitation().file
    num_samples = len(make_run().open_data().train)
    fit = make_invitation(num_samples=num_samples, code=digest_code(file["recipe"]))
    directory, lock = _prepare(fit, tmp_path)
    second, second_lock = _prepare(fit, tmp_path)
    assert (directory, second) == (tmp_path / "r", tmp_path / "r-2")
    for folder in (directory, second):
        assert {path.name for path in folder.iterdir()} == {".lock", "events.jsonl", "run.json", "workers"}
    lock.release()
    third, third_lock = _prepare(fit, tmp_path)
    assert third == directory, "the agent that had it has ended"
    for held in (second_lock, third_lock):
        held.release()


def test_gpus_are_refused_as_their_workers_could_not_join(tmp_path, server, monkeypatch):
    write(ControlStore(server.access), INVITATION, make_invitation())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(SettingsError, match="must compute on CPUs yet, but this machine has 2 GPUs for 1"):
        serve_launcher(server.access, 1, name="b", out=tmp_path)


def test_missing_data_are_one_sentence(tmp_path):
    file = make_invitation().file
    file["run"]["data"] = {"name": "text", "path": str(tmp_path / "none")}
    with pytest.raises(SettingsError, match=r"the data of the run must lie under the same path on this machine, but"):
        _prepare(make_invitation(file=file), tmp_path)


def test_a_wrong_token_and_a_launcher_that_takes_no_workers_are_one_sentence(tmp_path, server):
    with pytest.raises(SettingsError, match="must take workers of other machines, but does not"):
        serve_launcher(server.access, 1, out=tmp_path)
    wrong = ControlAccess(server.access.host, server.access.port, bytes(32))
    with pytest.raises(SettingsError, match=r"with the token of its run, but could not: .* the token is another run's"):
        serve_launcher(wrong, 1, out=tmp_path)


def test_an_invitation_of_another_version_is_refused_by_that_version_and_not_by_its_fields(server):
    store = ControlStore(server.access)
    document = {"versions": {"paceline": "9.9.9"}, "field_to_come": 1}
    store.set(INVITATION, json.dumps(document))
    with pytest.raises(SettingsError, match=r"paceline must be the same on all machines, .* install paceline 9\.9\.9"):
        serve_launcher(server.access, 1, name="b")
    store.set(INVITATION, json.dumps(document | {"versions": find_versions()}))
    with pytest.raises(
        SettingsError, match=r"agents/run of the control store must be .* field_to_come is not a field here"
    ):
        serve_launcher(server.access, 1, name="b")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "must be what Paceline"),
        ("[]", "must be what Paceline"),
        ('{"host": "c", "num_workers": 1, "field_to_come": 1}', "field_to_come is not a field here"),
        ('{"host": "w0@c", "num_workers": 1}', "host must"),
        ('{"host": "c", "num_workers": 0}', "num_workers must be"),
        ('{"host": "c", "num_workers": 1, "ended": {"w0@c": "dead"}}', "ended"),
        (
            '{"host": "c", "num_workers": 1, "num_chunks": 1}',
            "the 1 pieces of the log that it names, but agents/2/log/0",
        ),
    ],
)
def test_an_agent_that_writes_nonsense_is_refused_and_the_other_one_stays(tmp_path, server, content, words):
    lab = Lab(tmp_path, server)
    assert lab.wait_for_fact() == Offered("b", 2)
    assert lab.store.add(NUM_AGENTS, 1) == 2
    lab.store.set(offer_key(2), content)
    lab.store.add(MAIL, 1)
    lab.wait_until(lambda: lab.store.check([demand_key(2)]))
    demand = read(lab.store, demand_key(2), Demand)
    assert demand.is_refused
    assert words in demand.over
    (record,) = read_log(lab.log)
    assert words in record.event.message
    lab.wait_until(lambda: len(lab.remote.running) == 2)
    lab.remote.kill_all()
    lab.spread.close("the run is over")
    assert lab.finish() is ExitCode.FINISHED


def test_an_agent_that_does_not_understand_the_launcher_stops_its_workers_and_says_so(tmp_path, server):
    lab = Lab(tmp_path, server)
    lab.wait_for_fact()
    lab.wait_until(lambda: lab.remote.running)
    lab.store.set(demand_key(1), '{"field_to_come": 1}')
    assert "agents/1/demand of the control store must be" in str(lab.finish())
    assert not lab.remote.running
    lost = lab.wait_for_fact()
    assert lost == HostLost("b", "b was lost: its agent has ended")


def test_a_machine_that_the_others_cannot_connect_to_is_told_why_and_not_taken_again(tmp_path, server):
    lab = Lab(tmp_path, server)
    lab.wait_for_fact()
    lab.wait_until(lambda: len(lab.remote.running) == 2)
    assert lab.spread.drop_host("c", "it is not known") == []
    (lost,) = lab.spread.drop_host("b", "b is dropped: w0 could not connect to w0@b at 10.0.0.2:7")
    assert lost == HostLost("b", "b is dropped: w0 could not connect to w0@b at 10.0.0.2:7")
    lab.feed(lost)
    error = lab.finish()
    assert (type(error), str(error)) == (SettingsError, lost.reason)
    assert not lab.remote.running
    assert (lab.coordinator.target, lab.coordinator.places) == (1, {})
    assert not lab.spread.read_facts(lab.coordinator)
