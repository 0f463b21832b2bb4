"""Workers that open groups while another one of their epoch is lost: they wait for it no longer."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline.comm import SharedMemoryGroup, TorchGroup
from paceline.comm import torch_group as torch_group_module
from paceline.comm.connecting import connect
from paceline.comm.control import (
    ControlServer,
    ControlStore,
    ControlTimeoutError,
    EpochBrokenError,
    KeyValues,
    store_of_epoch,
)
from paceline.comm.local_group import LocalGroup
from paceline.comm.progress import PROGRESS
from paceline.comm.shared_memory import exchange_documents, rendezvous
from paceline.errors import CommunicationError
from paceline.parallel.mesh import Mesh
from paceline.topology.layout import Layout

EPOCH, LONG_S = 3, 1000.0


@pytest.fixture
def key_values():
    return KeyValues()


@pytest.fixture
def store(key_values):
    with ControlServer(key_values=key_values) as server:
        store = ControlStore(server.access, timeout_s=LONG_S)
        store.announce_epoch(EPOCH)
        yield store
        store.close()


def wait_for(condition):
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_whoever_waits_for_keys_of_the_epoch_is_told_and_nobody_else(store, key_values):
    inside, beside = store_of_epoch(store, EPOCH), store_of_epoch(store, EPOCH + 1)
    inside.set("here", "there")
    with ThreadPoolExecutor(2) as pool:
        lost, other = [pool.submit(one.wait, ["key"], timedelta(seconds=LONG_S)) for one in (inside, beside)]
        wait_for(lambda: len(key_values._waiting) == 2)
        store.check_epoch(EPOCH)
        store.break_epoch(EPOCH)
        with pytest.raises(EpochBrokenError, match="a worker of epoch 3 was lost while others waited for it"):
            lost.result()
        for ask in (lambda: inside.get("key"), lambda: store.check_epoch(EPOCH)):
            with pytest.raises(EpochBrokenError):
                ask()
        assert inside.get("here") == b"there", "what is there can be read"
        inside.set("late", "word")
        assert inside.get("late") == b"word"
        store.check_epoch(EPOCH + 1)
        assert not other.done()
        beside.set("key", "")
        other.result()
    with pytest.raises(ControlTimeoutError):
        beside.wait(["key 2"], timedelta(seconds=0.01))


def test_another_launcher_knows_that_the_epoch_is_broken(key_values):
    key_values.handle({"do": "announce", "number": EPOCH})
    key_values.handle({"do": "break", "number": EPOCH})
    again = KeyValues()
    for message in key_values.list_requests():
        again.repeat(message)
    assert again.handle({"do": "wait", "keys": [f"paceline/epoch{EPOCH}/a"], "timeout_s": 9.0}) == {"broken": EPOCH}


def open_two_of_three(store, act):
    """Open a shared-memory group as ranks 0 and 1 of three, act as what rank 2 does, and return the errors."""
    with ThreadPoolExecutor(2) as pool:
        opened = [
            pool.submit(SharedMemoryGroup, store_of_epoch(store, EPOCH), rank, 3, timeout_s=LONG_S, epoch=EPOCH)
            for rank in range(2)
        ]
        act()
        store.break_epoch(EPOCH)
        return [one.exception(timeout=30) for one in opened]


def test_ranks_wait_no_longer_for_the_document_of_one_that_is_lost(store, key_values):
    errors = open_two_of_three(store, lambda: wait_for(lambda: key_values._waiting))
    assert [type(error) for error in errors] == [EpochBrokenError] * 2
    assert not PROGRESS.connects_to + tuple(PROGRESS.waits)


def test_ranks_wait_no_longer_for_a_socket_of_one_that_is_lost(store, key_values, monkeypatch):
    monkeypatch.setattr(rendezvous, "_HANDSHAKE_S", LONG_S)
    control = dist.PrefixStore("open", dist.PrefixStore("control", store_of_epoch(store, EPOCH)))
    errors = open_two_of_three(store, lambda: exchange_documents(control, 2, 3, [None, None], 30))
    assert [type(error) for error in errors] == [EpochBrokenError] * 2


@pytest.fixture
def stuck():
    """Return a function that connects ranks in vain, and an event that is set once it has begun."""
    has_begun, ends = threading.Event(), threading.Event()

    def run(*_, **__):
        has_begun.set()
        ends.wait(60)
        raise RuntimeError("timed out")

    yield run, has_begun
    ends.set()


@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_ranks_wait_no_longer_where_native_code_connects_them(store, stuck, kind, monkeypatch):
    run, has_begun = stuck
    monkeypatch.setattr(torch_group_module, "_make_backend", run)
    monkeypatch.setattr(dist, "init_process_group", run)
    inside = store_of_epoch(store, EPOCH)

    def open_group():
        if kind == "group":
            return TorchGroup(inside, 0, 2, device=torch.device("cpu"), timeout_s=LONG_S, epoch=EPOCH)
        world = LocalGroup(epoch=EPOCH)
        world.size, world.store, world.timeout_s, world.names = 2, inside, LONG_S, [0, 1]
        return Mesh(world, Layout(data=2).resolve(2)).device_mesh

    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(open_group)
        assert has_begun.wait(30)
        wait_for(lambda: PROGRESS.connects_to == (1,))
        store.break_epoch(EPOCH)
        assert type(opened.exception(timeout=30)) is EpochBrokenError
    assert not PROGRESS.connects_to


def test_native_code_that_connects_ranks_has_the_time_that_it_is_given(stuck):
    run, _ = stuck
    with pytest.raises(CommunicationError, match=r"ranks must connect with ranks 1, 2 within 0\.1 s, but did not"):
        connect(run, dist.HashStore(), 0, [1, 2], 0.1)


def test_what_native_code_says_is_an_error_of_communication():
    def fail():
        raise RuntimeError("refused")

    with pytest.raises(CommunicationError, match="ranks could not connect: refused"):
        connect(fail, dist.HashStore(), 0, [1], 10)
    with pytest.raises(ZeroDivisionError):
        connect(lambda: 1 // 0, dist.HashStore(), 0, [1], 10)
    assert connect(lambda: 7, None, 0, [1], 10) == 7
