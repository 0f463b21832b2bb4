"""Servers with standbys: the worker beside a server is lost when some workers have its reply, and others not."""

import threading

import pytest
from reforming_threads import LOST_STEP, lose_in, run_threads
from test_reforming_servers import EXACT, LOSSES, assert_plain_sgd, gone_on
from test_reforming_standbys import (
    ASGD,
    ASYNCHRONOUS_LOSSES,
    COUNTING,
    SERVERS,
    WITHOUT_W0,
    assert_counted_once,
)

from paceline.monitor.events import StepFinished
from paceline.monitor.reader import select
from paceline.sync.parameter_server import settings
from paceline.sync.parameter_server.link import ServerLink
from paceline.sync.parameter_server.meeting import Meeting
from paceline.sync.parameter_server.server import RequestKind, Server
from paceline.sync.parameter_server.shard import Shard
from paceline.sync.parameter_server.standby import Standbys
from paceline.sync.parameter_server.worker import ServedWorker

CAMPAIGN = [pytest.mark.slow, pytest.mark.campaign]


def is_of_last_step(header):
    return header.start == LOST_STEP - 1


def withhold_replies(monkeypatch, callers, is_last=is_of_last_step):
    """Let servers with standbys reply to the last pushes of these callers only when they have failed."""
    real = Server.handle

    def handle(self, caller, header, body):
        wait = real(self, caller, header, body)
        is_served = header.kind != RequestKind.SWAP or not is_last(header) or caller not in callers
        if is_served or self.copy is None or len(self._mirrors) < 4:  # not after the loss
            return wait

        def wait_for_failure():
            with self._changed:
                while self._failure is None:
                    self._changed.wait(20)
            return wait()

        return wait_for_failure

    monkeypatch.setattr(Server, "handle", handle)


@pytest.mark.parametrize(
    "callers",
    [(1,), (2, 3), (1, 2, 3), *(pytest.param(callers, marks=CAMPAIGN) for callers in ((2,), (1, 2)))],
    ids=str,
)
@pytest.mark.parametrize("sync", SERVERS.values(), ids=SERVERS)
def test_workers_without_the_last_reply_go_on_with_those_that_have_it(tmp_path, monkeypatch, sync, callers):
    withhold_replies(monkeypatch, callers)
    lose = LOSSES["once it has new parameters"]
    _, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W0, lose, "w0", **EXACT)
    assert gone_on(records, 3).event.lost == ""
    steps = [record.step for record in select(records, StepFinished)]
    assert len(set(steps)) == len(steps), "no update is made twice"
    assert_plain_sgd(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_all_start_again_if_a_standby_lacks_a_step_that_another_server_has_done(tmp_path, monkeypatch):
    """A worker is lost once the second server has applied its push, and the first one's standby has not."""
    done, both, standing, reasons = set(), threading.Event(), set(), []
    note, handle, make, find = Shard.note_used, Server.handle, Standbys.__init__, settings.find_missing

    def note_used(self, push):
        note(self, push)
        if push.start == LOST_STEP:
            done.add(self.blocks[0].name)
            if len(done) == 2:
                both.set()

    def make_standbys(self, *arguments):
        make(self, *arguments)
        standing.update(map(id, self.servers.values()) if 0 in self.servers else ())

    def handle_late(self, caller, header, body):
        if id(self) in standing and header.kind == RequestKind.SWAP and header.start == LOST_STEP:
            with self._changed:
                while self._failure is None:
                    self._changed.wait(20)
        return handle(self, caller, header, body)

    def find_missing(held, **options):
        reasons.append(find(held, **options))
        return reasons[-1]

    monkeypatch.setattr(Shard, "note_used", note_used)
    monkeypatch.setattr(Server, "handle", handle_late)
    monkeypatch.setattr(Standbys, "__init__", make_standbys)
    monkeypatch.setattr(settings, "find_missing", find_missing)
    lose = lose_in(ServedWorker, "after_update", lambda own, step: step.number == LOST_STEP and both.wait(20))
    with pytest.raises(AssertionError, match="there is no other epoch"):  # the script has no restart
        run_threads(tmp_path, monkeypatch, SERVERS["two servers"], WITHOUT_W0, lose, "w0", **EXACT)
    assert set(reasons) == {"a worker was lost while some servers had done a step, and others not"}


@pytest.mark.parametrize("callers", [(1,), (2, 3), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("num_servers", [1, 2])
def test_samples_count_once_without_the_last_reply_at_their_own_pace(tmp_path, monkeypatch, num_servers, callers):
    withhold_replies(monkeypatch, callers, lambda header: header.clock >= LOST_STEP - 2)
    # A push that is under way to two servers may reach one of them, which is told of as lost.
    phase = "with its push under way" if num_servers == 1 else "before its push"
    sync, lose = ASGD | {"num_servers": num_servers}, ASYNCHRONOUS_LOSSES[phase]
    _, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W0, lose, "w0", **COUNTING)
    assert gone_on(records, 3, 15).event.lost == ""
    assert_counted_once(tmp_path)


IN_THE_MEETING = {
    "bodies are collected": lose_in(Meeting, "collect", lambda own, mine: True),
    "servers are loaded": lose_in(ServerLink, "go_on", lambda *_: True),
    "parameters are read": lose_in(ServedWorker, "_resume", lambda own, what: what == "went on"),
}


@pytest.mark.parametrize("phase", IN_THE_MEETING)
@pytest.mark.parametrize("dying", ["w2", "w3"])
def test_another_loss_while_workers_go_on_leaves_plain_sgd(tmp_path, monkeypatch, dying, phase):
    names = ["w1", "w2", "w3"]
    epochs = [*WITHOUT_W0, [[name for name in names if name != dying]]]
    LOSSES["once it has new parameters"](monkeypatch, "w0")
    lose, sync = IN_THE_MEETING[phase], SERVERS["one server"]
    run_threads(tmp_path, monkeypatch, sync, epochs, lose, dying, **EXACT)
    assert_plain_sgd(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_all_start_again_if_the_only_holder_is_lost_while_workers_go_on(tmp_path, monkeypatch):
    reasons, find = [], settings.find_missing

    def find_missing(held, **options):
        reasons.append(find(held, **options))
        return reasons[-1]

    monkeypatch.setattr(settings, "find_missing", find_missing)
    LOSSES["once it has new parameters"](monkeypatch, "w0")
    epochs = [*WITHOUT_W0, [["w2", "w3"]]]
    lose, sync = IN_THE_MEETING["bodies are collected"], SERVERS["one server"]
    with pytest.raises(AssertionError, match="there is no other epoch"):  # the script has no restart
        run_threads(tmp_path, monkeypatch, sync, epochs, lose, "w1", **EXACT)
    assert "all servers are lost with the workers beside which they ran" in reasons
