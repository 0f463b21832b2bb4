"""Servers with standbys: the worker beside a server is lost when some workers have its reply, and others not."""

import threading

import pytest
from reforming_threads import LOST_STEP, run_threads
from test_reforming_servers import EXACT, LOSSES, assert_plain_sgd, gone_on
from test_reforming_standbys import SERVERS, WITHOUT_W0

from paceline.monitor.events import StepFinished
from paceline.monitor.reader import select
from paceline.sync.parameter_server.server import RequestKind, Server


def withhold_replies(monkeypatch, callers):
    """Let servers beside the lost worker reply to these callers of the last step only when they have failed."""
    real = Server.handle

    def handle(self, caller, header, body):
        wait = real(self, caller, header, body)
        is_last = header.kind == RequestKind.SWAP and header.start == LOST_STEP - 1
        if not is_last or caller not in callers or self.copy is None:
            return wait

        def wait_for_failure():
            with self._changed:
                while self._failure is None:
                    self._changed.wait(20)
            return wait()

        return wait_for_failure

    monkeypatch.setattr(Server, "handle", handle)


@pytest.mark.parametrize("callers", [(1,), (2,), (2, 3), (1, 2), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("sync", SERVERS.values(), ids=SERVERS)
def test_workers_without_the_last_reply_go_on_with_those_that_have_it(tmp_path, monkeypatch, sync, callers):
    withhold_replies(monkeypatch, callers)
    lose = LOSSES["once it has new parameters"]
    _, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W0, lose, "w0", **EXACT)
    assert gone_on(records, 3).event.lost == ""
    steps = [record.step for record in select(records, StepFinished)]
    assert len(set(steps)) == len(steps), "no update is made twice"
    assert_plain_sgd(tmp_path)
