"""A worker's connection to the coordinator, where what it does in two threads meets."""

import contextlib
import json
import time
from dataclasses import asdict

import torch
import torch.distributed as dist

from paceline.comm.progress import Progress
from paceline.elastic import StoreMember
from paceline.elastic import member as member_module
from paceline.elastic.facts import View


class BeatsMeanwhile(StoreMember):
    """A member whose beat looks for changes just before it has entered an epoch."""

    def _say(self, **changes):
        if changes.get("phase") == "opening":
            self._look_for_change()
        super()._say(**changes)


def test_a_change_of_the_epoch_before_is_none_of_the_next_one():
    store = dist.HashStore()
    control, member = dist.PrefixStore("control", store), BeatsMeanwhile(lambda: store, "w0")
    for epoch in (0, 1):
        view = View(epoch, 0, 1, ("w0",), (None,), 3, "")
        control.set("view", json.dumps(asdict(view)))
        assert member.next_view(5).epoch == epoch
        assert not member.change_is_pending()
        control.set("change", json.dumps({"epoch": epoch, "is_broken": True}))
    member._look_for_change()
    assert member.change_is_pending()
    member.close()


def test_a_worker_says_with_whom_it_connects_and_that_it_waits_for_them(monkeypatch):
    monkeypatch.setattr(member_module, "PROGRESS", progress := Progress())
    store = dist.HashStore()
    control, member = dist.PrefixStore("control", store), StoreMember(lambda: store, "w1")
    control.set("view", json.dumps(asdict(View(0, 0, 3, ("w0", "w1", "w2"), (None,) * 3, 3, ""))))
    member.next_view(5)
    said = []
    for ranks in ([0, 2], []):
        with progress.connecting(ranks) if ranks else contextlib.nullcontext():
            member._say()
        status = json.loads(control.get("status/w1"))
        said.append((status["connecting"], status["waits"]))
    assert said == [("w0, w2", True), ("", False)]
    member.close()


def test_a_worker_builds_until_it_is_ready_and_from_each_join_to_the_next_step(monkeypatch):
    monkeypatch.setattr(member_module, "PROGRESS", progress := Progress())
    store = dist.HashStore()
    control, member = dist.PrefixStore("control", store), StoreMember(lambda: store, "w0")

    def is_building():
        member._say()
        return json.loads(control.get("status/w0"))["is_building"]

    def join(epoch):
        view = View(epoch, 0, 1, ("w0",), (None,), 3, "")
        control.set("view", json.dumps(asdict(view)))
        view = member.next_view(5)
        assert not is_building()
        member.open_group(view, torch.device("cpu"), 5, "auto")

    assert is_building()
    join(0)
    assert is_building()
    progress.enter(time.monotonic(), b"data")
    assert is_building()
    progress.enter(time.monotonic(), b"save")
    assert not is_building()
    progress.enter(time.monotonic(), b"forward")
    assert is_building()
    progress.stamp(4, time.monotonic(), b"save")
    assert not is_building()
    member.report_loss(4, is_whole=True, reason="gone")
    join(1)
    assert is_building()
    progress.stamp(5, time.monotonic(), b"loop")
    assert not is_building()
    member.close()
