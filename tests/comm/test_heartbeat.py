import json
import os
import re
import subprocess
import threading
from dataclasses import asdict

import pytest
import torch.distributed as dist

from paceline.comm import heartbeat
from paceline.comm.heartbeat import Heartbeat, HeartbeatBoard
from paceline.comm.heartbeat_record import MESSAGE
from paceline.comm.stacks import find_host_of_processes, started_at


@pytest.fixture
def open_board(monkeypatch):
    """Open boards of one store that post quickly, and close them at the end."""
    monkeypatch.setattr(heartbeat, "POST_INTERVAL_S", 0.02)
    store, boards = dist.HashStore(), []

    def open_one(rank, size=6):
        boards.append(HeartbeatBoard(store, rank, range(size)))
        return boards[-1]

    open_one.store = store
    yield open_one
    for board in boards:
        board.close()


def freeze_at(store, rank, begun, name):
    """Leave the last post of a process that posts no more."""
    store.set(f"heartbeat/{rank}", json.dumps(asdict(Heartbeat("far", 7, begun=begun, begun_name=name))))


def test_causes_come_before_victims(open_board):
    mine = open_board(0)
    mine.begin(8, "bucket 3")
    behind, fine = open_board(1), open_board(2)
    behind.begin(7, "bucket 2")
    fine.begin(8, "bucket 3")
    open_board(3).close("ValueError: no space left")
    freeze_at(open_board.store, 4, 7, "bucket 2")
    parts = mine.describe_others(8).split("; ")
    assert len(parts) == 5, "itself is not among the others"
    ranks = [int(part.split()[1]) for part in parts]
    assert set(ranks[:2]) == {4, 5}, f"what is gone comes first: {parts}"
    assert ranks[2:] == [3, 1, 2], f"then who stopped, who is behind, and who is fine: {parts}"
    text = dict(zip(ranks, parts, strict=True))
    assert text[5] == "rank 5 has posted no heartbeat yet"
    assert "(host far, pid 7) is dead or frozen" in text[4]
    assert "its last heartbeat came after it had begun operation 7 'bucket 2'" in text[4]
    assert text[3].endswith("stopped after it had begun no operation: ValueError: no space left")
    assert "is alive but behind: it has begun operation 7 'bucket 2' and computes" in text[1]
    assert text[2].endswith("is alive and has begun operation 8 'bucket 3'")


@pytest.mark.parametrize("words", ["CommunicationError: lost", "PeerTimeoutError: must finish within 1 s"])
def test_a_rank_that_only_lost_its_peers_is_not_put_before_the_one_that_is_late(open_board, words):
    mine, victim, late = open_board(0, 3), open_board(1, 3), open_board(2, 3)
    victim.begin(4, "sum")
    late.begin(3, "sum")
    victim.close(words)
    parts = mine.describe_others(4).split("; ")
    assert parts[0].startswith("rank 2 "), parts
    assert "lost its peers too" in parts[1]


def test_who_comes_late_repeats_what_those_that_gave_up_said(open_board):
    """Or its own line, the last of all, would name innocents."""
    late, victim, witness = open_board(2, 3), open_board(0, 3), open_board(1, 3)
    victim.close("CommunicationError: operation 4 on rank 0 lost its peers")
    verdict = (
        "operation 4 'sum' on rank 1 must finish within 1 s, but did not: rank 2 (host a, pid 3) is alive but behind"
    )
    witness.close(f"PeerTimeoutError: {verdict}")
    first, second = late.describe_others(5).split("; ")
    assert re.fullmatch(rf"rank 1 \(host \S+, pid \d+\) gave up: {re.escape(verdict)}", first)
    assert second.startswith("rank 0 ")
    assert "lost its peers too" in second


def test_a_rank_that_is_only_slow_is_not_called_dead(open_board):
    """As on a busy machine, where a thread may not run for a while."""
    mine, slow, dead = open_board(0, 3), open_board(1, 3), open_board(2, 3)
    for board in (slow, dead):
        board._closed.set()
        board._thread.join()
    threading.Timer(0.12, slow._post).start()
    first, second = mine.describe_others(1).split("; ")
    assert first.startswith("rank 2 "), first
    assert "is dead or frozen" in first
    assert "is alive" in second


@pytest.fixture
def start_process():
    """Start processes of this host that only live, until they are killed."""
    processes = []

    def start():
        processes.append(subprocess.Popen(["sleep", "600"]))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def post_as(store, rank, process):
    """Post the heartbeat of a living process of this host, as itself would."""
    here = {"host_key": find_host_of_processes(), "started": started_at(process.pid)}
    one = Heartbeat("here", process.pid, begun=2, begun_name="sum", **here)
    store.set(f"heartbeat/{rank}", json.dumps(asdict(one)))


def leave_between_looks(board, store, rank, process):
    """Let a rank say that it lost its peers and end, as soon as the board has read its heartbeat."""
    read = board._read

    def read_then_leave():
        heartbeats = read()
        if process.poll() is None:
            words = "CommunicationError: operation 2 lost its peers"
            store.set(f"heartbeat/{rank}", json.dumps(asdict(heartbeats[rank]) | {"last_words": words}))
            process.kill()
            process.wait()
        return heartbeats

    board._read = read_then_leave


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="processes cannot be seen here")
@pytest.mark.parametrize("is_judging", [False, True], ids=["after an error", "while it waits"])
def test_a_rank_that_leaves_with_its_reason_between_two_looks_is_not_called_dead(
    open_board, start_process, monkeypatch, is_judging
):
    """Or a victim that ended while it was looked at would be blamed before the one that was killed."""
    store, victim, killed = open_board.store, start_process(), start_process()
    mine = open_board(0, 3)
    mine.close()  # its thread would look by itself
    post_as(store, 1, victim)
    post_as(store, 2, killed)
    killed.kill()
    killed.wait()
    leave_between_looks(mine, store, 1, victim)
    if is_judging:
        monkeypatch.setattr(heartbeat, "_WATCH_AFTER_S", 0.0)
        told = []
        monkeypatch.setattr(mine, "end_by", lambda verdict: told.append(verdict.words))
        mine.wait_in(2)
        mine._judge()
        first, second = told[0].split("; ")
        assert re.match(r"rank 2 \(host here, pid \d+\) is dead: ", first), told
    else:
        first, second = mine.describe_others(2).split("; ")
        assert re.match(r"rank 2 \(host here, pid \d+\) is dead or frozen: ", first), first
    assert second.startswith("rank 1 "), second
    assert "lost its peers" in second


def test_waiting_is_told_with_its_operation(open_board):
    mine, other = open_board(0, 2), open_board(1, 2)
    other.begin(5, "bucket 4")
    other.wait_in(3)
    assert "it has begun operation 5 'bucket 4' and waits in operation 3 since " in mine.describe_others(6)
    other.wait_in(0)
    assert "it has begun operation 5 'bucket 4' and computes" in mine.describe_others(6)


def test_waiting_for_a_message_is_told(open_board):
    """Also in a group that has begun no operation, where the message has no number to go by."""
    mine, other = open_board(0, 2), open_board(1, 2)
    other.wait_in(MESSAGE)
    assert "is alive but behind: it has begun no operation and waits for a message since " in mine.describe_others(1)


def test_a_rank_that_finished_says_so(open_board):
    mine, other = open_board(0, 2), open_board(1, 2)
    other.close()
    assert mine.describe_others(1).endswith("it has finished")


def test_closing_twice_keeps_the_last_words(open_board):
    mine, other = open_board(0, 2), open_board(1, 2)
    other.close("ValueError: first")
    other.close()
    assert "ValueError: first" in mine.describe_others(1)
