"""All workers that were killed are known where all start again."""

import threading
import time

import pytest
from supervised_threads import Threads, supervise

from paceline.elastic.protocol import MembershipSettings
from paceline.elastic.supervisor import EndVerdict


def list_killed(tmp_path, settings, script, supervisors, **options):
    """Return who is known to be killed when all start again; the supervisor is the last one of a list meanwhile."""
    killed = []

    def judge(epoch):
        killed.extend(supervisors[-1].killed.values())
        return EndVerdict(True, 0, "")

    supervise(tmp_path, settings, script, judge=judge, tell=supervisors.append, **options)
    return sorted(killed)


@pytest.mark.parametrize("size", [3, 4])
def test_all_that_were_killed_are_named_where_all_start_again_not_who_gave_up_for_them(tmp_path, size):
    is_one_dead = threading.Event()

    def script(member):
        view = member.next_view(20)
        if member.name in ("w1", "w2"):
            return "killed"
        if member.name == "w3":
            is_one_dead.wait(20)
            return "gave_up"
        while len(supervisors[-1].killed) < 2:
            time.sleep(0.01)
        is_one_dead.set()
        member.report_loss(view.step, is_whole=True, reason="gone")
        member.next_view(20)
        return "done"

    supervisors = []
    settings = MembershipSettings(size, min_workers=3)
    assert list_killed(tmp_path, settings, script, supervisors) == ["w1 was lost", "w2 was lost"]


def test_both_are_named_that_were_killed_at_once_where_the_first_lets_all_start_again(tmp_path, monkeypatch):
    def wait_for_both(workforce, timeout_s):
        time.sleep(timeout_s)
        return [workforce.ended.get() for _ in range(2)] if workforce.ended.qsize() == 2 else []

    def script(member):
        member.next_view(20)
        if member.name != "w0":
            return "killed"
        member.next_view(20)
        return "done"

    monkeypatch.setattr(Threads, "wait", wait_for_both)
    assert list_killed(tmp_path, MembershipSettings(3), script, [], obstacle="the model is split") == [
        "w1 was lost",
        "w2 was lost",
    ]
