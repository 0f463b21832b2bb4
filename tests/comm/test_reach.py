"""Ranks of several machines try to connect to each other before they open a group."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

from paceline.comm import reach
from paceline.comm.control import ControlServer, ControlStore, EpochBrokenError, store_of_epoch
from paceline.comm.progress import PROGRESS
from paceline.comm.reach import UnreachableError, check_reach, try_connections
from paceline.comm.torch_group import HOST_ADDRESS
from paceline.elastic import StoreMember
from paceline.elastic.facts import View
from paceline.errors import CommunicationError


@pytest.fixture
def silent():
    """Return an address that does not answer: the queue of connections that nobody accepts is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        waiting = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
            waiting.append(one)
        yield listener.getsockname()
        for one in waiting:
            one.close()


def test_who_does_not_answer_is_told_with_address_time_and_reason(silent):
    with socket.create_server(("127.0.0.1", 0)) as open_door:
        found = try_connections({1: silent, 2: open_door.getsockname()}, 0.2)
    assert found == {1: f"127.0.0.1:{silent[1]} within 0.2 s (timed out)"}


def test_all_ranks_know_which_connections_cannot_be_opened(silent, monkeypatch):
    monkeypatch.setattr(reach, "REACH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(4) as pool:
        addresses = [door.getsockname(), silent, None, silent]
        hosts = ["a", "b", "c", "a"]  # the last one is never tried by the first, which is on its machine
        store = dist.HashStore()
        opened = [pool.submit(check_reach, store, rank, addresses, hosts, timeout_s=30, epoch=0) for rank in range(4)]
        errors = [one.exception() for one in opened]
    assert {type(error) for error in errors} == {UnreachableError}
    found = [(one.rank, one.other) for one in errors[2].obstructions]
    assert found == [(0, 1), (1, 3), (2, 1), (2, 3), (3, 1)]
    words = f"rank 0 could not connect to rank 1 at 127.0.0.1:{silent[1]} within 0.2 s"
    assert all(str(error).startswith(words) for error in errors)
    assert all("; and 3 more such connections; let connections" in str(error) for error in errors)


def test_who_tries_to_connect_is_told_that_another_worker_is_lost(silent, monkeypatch):
    monkeypatch.setattr(reach, "REACH_S", 1000)
    with ControlServer() as server, ThreadPoolExecutor(1) as pool:
        store = ControlStore(server.access)
        tried = pool.submit(
            check_reach, store_of_epoch(store, 4), 0, [None, silent], ["a", "b"], timeout_s=1000, epoch=4
        )
        while not PROGRESS.connects_to:
            assert not tried.done()
        store.break_epoch(4)
        with pytest.raises(EpochBrokenError):
            tried.result(30)
        monkeypatch.undo()
        store.close()


@pytest.mark.parametrize("is_open", [True, False])
def test_workers_of_two_machines_open_a_group_only_where_they_reach_each_other(monkeypatch, is_open):
    """The second machine lets nobody in."""
    monkeypatch.setenv(HOST_ADDRESS, "127.0.0.1")
    monkeypatch.setattr(reach, "REACH_S", 0.2)
    monkeypatch.setattr(import_module("paceline.comm.join"), "host_key", lambda: threading.current_thread().name[-1])
    real = socket.create_server

    def listen(*arguments, **options):
        listener = real(*arguments, **options)
        if threading.current_thread().name[-1] == "1" and not is_open:
            address = listener.getsockname()
            listener.close()
            listener = type("Closed", (), {"__enter__": lambda s: s, "__exit__": lambda *_: None})()
            listener.getsockname = lambda: address
        return listener

    monkeypatch.setattr(reach.socket, "create_server", listen)
    store, names = dist.HashStore(), ("w0", "w0@far")
    members = [StoreMember(lambda: store, name) for name in names]
    errors = {}

    def open_group(rank):
        view = View(0, rank, 2, names, (None, None), 0, "")
        document = asdict(view) | {"rank": 0}
        dist.PrefixStore("control", store).set("view", json.dumps(document))
        try:
            members[rank].open_group(members[rank].next_view(20), torch.device("cpu"), 20, "auto").close()
        except CommunicationError as error:
            errors[rank] = str(error)
            members[rank].report_loss(0, is_whole=True, reason=str(error))

    threads = [threading.Thread(target=open_group, args=(rank,), name=f"rank {rank}") for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for member in members:
        member.close()
    if is_open:
        assert errors == {}
        return
    assert set(errors) == {0, 1}
    assert all(said.startswith("w0 could not connect to w0@far at 127.0.0.1:") for said in errors.values())
    assert [member._status.unreachable for member in members] == [(("w0", "w0@far"),)] * 2
