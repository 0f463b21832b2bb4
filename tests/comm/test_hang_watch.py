"""Verdicts on ranks that hang: rules over scripted heartbeats, and real processes that hang in three ways."""

import itertools
import os
import queue
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.comm.hang_watch import SILENT_S, STILL_DATA_S, STILL_S, HangWatch
from paceline.comm.heartbeat import HeartbeatBoard
from paceline.comm.heartbeat_record import MESSAGE, Heartbeat
from paceline.comm.progress import PROGRESS
from paceline.comm.store_watch import NUM_TICKS, StoreWatch
from paceline.errors import CommunicationError, PeerTimeoutError
from paceline.testing import run_processes


class Watched:
    """A watch on one rank far away, whose heartbeats come as a script says."""

    def __init__(self, timeout_s=None, **fields):
        self.now_s = 0.0
        self.watch = HangWatch(timeout_s, clock=lambda: self.now_s)
        self.one = Heartbeat("far", 7, step=9, num_steps=9, phase="forward", longest_s=0.5, **fields)

    def look(self, after_s, *, beats=True, waiting=0, **fields):
        """Look `after_s` later; its heartbeat went on if it `beats`."""
        self.now_s += after_s
        still_s = self.one.still_s + after_s if beats else self.one.still_s
        self.one = replace(self.one, **{"beat": self.one.beat + beats, "still_s": still_s} | fields)
        verdict = self.watch.judge({1: self.one}, waiting)
        return verdict.words if verdict else ""


def test_a_rank_that_does_not_move_hangs_after_many_times_its_longest_phase():
    watched = Watched()
    assert not watched.look(STILL_S - 1)
    said = watched.look(2)
    assert said.startswith(
        "rank 1 (host far, pid 7) lives, but has made no progress for 21 s in phase forward of step 9"
    )
    error = watched.watch.judge({1: watched.one}).to_error("here")
    assert (type(error), error.hung_ranks) == (PeerTimeoutError, (1,))
    slow = Watched()
    slow.one = replace(slow.one, longest_s=STILL_S)
    assert not slow.look(9 * STILL_S), "its phases are long"
    assert slow.look(2 * STILL_S)


def test_a_rank_that_moves_waits_or_has_only_begun_does_not_hang():
    watched = Watched()
    assert not any(watched.look(STILL_S - 1, still_s=STILL_S - 1) for _ in range(9))
    assert not Watched().look(9 * STILL_S, waits=True), "it waits for others itself"
    assert not Watched().look(9 * STILL_S, num_steps=1), "the first steps compile"
    for phase in ("save", "evaluate", "loop"):
        assert not Watched().look(9 * STILL_S, phase=phase)
    assert not Watched().look(STILL_DATA_S - 1, phase="data"), "data may be far away"
    assert Watched().look(STILL_DATA_S + 1, phase="data")


def test_a_given_time_counts_in_every_phase():
    for phase in ("loop", "data", "evaluate"):
        watched = Watched(timeout_s=3)
        assert not watched.look(2, phase=phase)
        assert watched.look(2, phase=phase)


def test_a_rank_without_heartbeats_hangs_soon_unless_it_was_silent_before():
    watched = Watched()
    assert not watched.look(1)
    assert not watched.look(SILENT_S - 1, beats=False)
    assert "has posted no heartbeat for 6 s in phase forward of step 9" in watched.look(2, beats=False)
    often = Watched(longest_silence_s=SILENT_S)
    assert not often.look(1)
    assert not often.look(2 * SILENT_S, beats=False)
    assert often.look(2 * SILENT_S, beats=False)


def test_who_has_left_before_the_operation_is_told_at_once():
    watched = Watched(begun=3)
    assert not watched.look(1, waiting=3, last_words="it has finished"), "it has done its part"
    verdict = watched.watch.judge({1: watched.one}, 4)
    assert verdict.is_gone
    assert "stopped: it has finished" in verdict.words
    assert type(verdict.to_error("here")) is CommunicationError


def hang(transport, how):
    """Train some steps; then rank 1 hangs, and the others say what they see of it."""
    with paceline.join(transport=transport, timeout_s=50, hang_timeout_s=3) as group:
        numbers = torch.ones(3)
        group.all_reduce(numbers, name="sum").wait()
        if group.rank == 1:
            step, own = 0, getattr(group, "_network", group).board
            while own.latest.num_steps < 2:  # who has only begun is not judged
                step += 1
                PROGRESS.stamp(step, time.monotonic(), b"forward")
                time.sleep(0.02)
            PROGRESS.enter(time.monotonic(), b"backward")
            HANG[how]()
        try:
            group.all_reduce(numbers, name="last sum").wait()
        except CommunicationError as error:
            group.close(error)
            return {"error": type(error).__name__, "message": str(error)}


HANG = {
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "holding the lock": lambda: sum(itertools.repeat(1, 10**12)),
    "asleep": lambda: time.sleep(100),
}
SAID = {
    "stopped": "is stopped, as by SIGSTOP, in phase backward of step",
    "holding the lock": "has posted no heartbeat for",
    "asleep": "lives, but has made no progress for",
}


@pytest.mark.parametrize("transport", ["network", pytest.param("shared_memory", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", HANG)
def test_a_process_that_hangs_is_named_with_its_phase_and_line_long_before_time_is_out(transport, how):
    results = run_processes(3, hang, {"transport": transport, "how": how}, wait_for=[0, 2], timeout_s=40)
    told = [results[0].value, results[2].value]
    assert {one["error"] for one in told} <= {"PeerTimeoutError", "CommunicationError"}
    # One of the survivors may only hear that the other has given up.
    (first, *_) = [one["message"] for one in told if one["error"] == "PeerTimeoutError"]
    assert re.search(r"rank 1 \(host \S+, pid \d+\) " + re.escape(SAID[how]), first), first
    assert re.search(r"in phase backward of step \d+", first)
    if how != "stopped":
        assert re.search(r"it is at \S*test_hang_watch.py:\d+ in <lambda>", first), first


def test_a_thread_that_awaits_requests_lets_nobody_think_that_the_process_waits():
    def await_requests(serves):
        if serves:
            PROGRESS.serve()
        PROGRESS.wait_in(1, 7)
        return dict(PROGRESS.waits)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(await_requests, False).result() == {1: 7}
        PROGRESS.wait_in(1, 0)
        assert pool.submit(await_requests, True).result() == {}


def hang_at_once():
    """Train some steps before the first heartbeat, and then sleep on rank 1."""
    with paceline.join(timeout_s=50, hang_timeout_s=3) as group:
        model = nn.Linear(3, 1)
        replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)
        for step in range(5):
            if (step, group.rank) == (4, 1):
                HANG["asleep"]()
            try:
                replica.backward(model(torch.ones(2, 3)).square().mean(), weight=2)
                replica.update()
            except CommunicationError as error:
                group.close(error)
                return str(error)
    return ""


def test_a_rank_that_hangs_before_it_has_posted_a_step_is_named():
    """Steps may be shorter than the time between two heartbeats."""
    results = run_processes(2, hang_at_once, wait_for=[0], timeout_s=40)
    assert re.search(r"rank 1 \(host \S+, pid \d+\) lives, but has made no progress for", results[0].value)


def wait_for_messages():
    """Rank 1 is stopped; rank 0 waits for a message of it, and rank 2 for one of rank 0."""
    with paceline.join(transport="network", timeout_s=50, hang_timeout_s=3) as group:
        messages = group.duplicate("messages")
        if group.rank == 1:
            step = 0
            while messages.board.latest.num_steps < 2:  # who has only begun is not judged
                step += 1
                PROGRESS.stamp(step, time.monotonic(), b"forward")
                time.sleep(0.02)
            HANG["stopped"]()
        try:
            messages.receive(torch.zeros(1), {0: 1, 2: 0}[group.rank], tag=0, name="news").wait()
        except CommunicationError as error:
            group.close(error)
            return str(error)


def test_a_rank_that_hangs_is_named_by_who_waits_for_messages_alone():
    """Messages have no numbers, and their group has begun nothing else, as with gossip."""
    results = run_processes(3, wait_for_messages, wait_for=[0, 2], timeout_s=40)
    told = [results[0].value, results[2].value]
    assert any(re.search(r"message 'news' .* rank 1 \(host \S+, pid \d+\) is stopped", one or "") for one in told), told
    assert all(told), "both ended"


class ScriptedBoard:
    """A board whose looks end as a script says."""

    def __init__(self):
        self.num_looks, self.is_open, self.latest, self.verdicts = 0, True, Heartbeat("far", 7), []

    def end_by(self, verdict):
        self.verdicts.append(verdict)


@pytest.fixture
def watched_store(monkeypatch):
    """A watch of the stores of two boards, one of which never answers, while this process waits."""
    watch, silent, answering = StoreWatch(), ScriptedBoard(), ScriptedBoard()
    monkeypatch.setattr(StoreWatch, "_keep_looking", lambda self: None)
    monkeypatch.setattr(PROGRESS, "waits", {1: MESSAGE})
    watch.add(silent)
    watch.add(answering)

    def look(times):
        for _ in range(times):
            answering.num_looks += 1
            watch.look()
        return silent.verdicts + answering.verdicts

    return SimpleNamespace(look=look, silent=silent, answering=answering)


def test_a_silent_store_ends_all_that_this_process_waits_in(watched_store):
    assert not watched_store.look(NUM_TICKS)
    first, second = watched_store.look(1)
    assert first == second
    assert "the store has not answered host far (pid 7) for 15 s: this host is cut off" in first.words
    assert type(first.to_error("here")) is CommunicationError


def test_a_silent_store_ends_nothing_while_training_gets_on(watched_store, monkeypatch):
    assert not watched_store.look(NUM_TICKS)
    watched_store.silent.num_looks += 1
    assert not watched_store.look(NUM_TICKS), "it has answered"
    PROGRESS.enter(time.monotonic(), b"forward")
    assert not watched_store.look(NUM_TICKS), "another phase has begun"
    monkeypatch.setattr(PROGRESS, "waits", {})
    assert not watched_store.look(2 * NUM_TICKS), "nothing waits"
    watched_store.silent.is_open = False
    monkeypatch.setattr(PROGRESS, "waits", {1: 3})
    assert not watched_store.look(2 * NUM_TICKS), "the group is closed"


class FrozenStore(dist.Store):
    """A store that answers nothing after its first post."""

    def __init__(self):
        super().__init__()
        self.released, self.num_posts = threading.Event(), 0

    def set(self, key, value):
        self.num_posts += 1
        if self.num_posts > 1:
            self.released.wait()


def test_the_store_of_a_board_is_watched(monkeypatch):
    monkeypatch.setattr("paceline.comm.store_watch._TICK_S", 0.05)
    monkeypatch.setattr("paceline.comm.heartbeat.STORE_WATCH", watch := StoreWatch())
    store, told = FrozenStore(), queue.Queue()
    board = HeartbeatBoard(store, 0, range(2), told.put)
    try:
        board.wait_in(MESSAGE)
        assert "the store has not answered" in told.get(timeout=30).words
    finally:
        store.released.set()
        board.close()
        watch._closed.set()
