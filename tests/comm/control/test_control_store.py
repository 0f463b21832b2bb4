"""The store over a control server: it answers as torch's own, to threads, forks and other processes at once."""

import itertools
import os
import re
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.control import (
    ControlAccess,
    ControlClient,
    ControlError,
    ControlServer,
    ControlStore,
    ControlTimeoutError,
    EpochOverError,
    connection,
    store_of_epoch,
)
from paceline.comm.control import store as control_store
from paceline.errors import SettingsError

CERTIFICATE = Path(__file__).with_name("localhost.pem")


@pytest.fixture(scope="module")
def server():
    with ControlServer() as server:
        yield server


@pytest.fixture(scope="module")
def store(server):
    store = ControlStore(server.access, timeout_s=10)
    yield store
    store.close()


@pytest.fixture(scope="module")
def impatient_store(server):
    store = ControlStore(server.access, timeout_s=0.001)
    yield store
    store.close()


@pytest.fixture
def fresh():
    """Return a function that opens stores of a server of their own."""
    with ControlServer() as server:
        stores = []

        def open_store(**options):
            stores.append(ControlStore(server.access, **options))
            return stores[-1]

        open_store.server = server
        yield open_store
        for store in stores:
            store.close()


keys = st.sampled_from("abc")
numbers = st.sampled_from(["n", "m"])
texts = st.text(max_size=4)
operations = st.one_of(
    st.tuples(st.just("set"), keys, texts),
    st.tuples(st.just("get"), keys),
    st.tuples(st.just("check"), st.lists(keys | numbers, min_size=1, max_size=3)),
    st.tuples(st.just("add"), numbers, st.integers(-5, 5)),
    st.tuples(st.just("compare_set"), keys, st.sampled_from(["", "x", "y"]), st.sampled_from(["x", "y"])),
    st.tuples(st.just("append"), keys, texts),
    st.tuples(st.just("delete_key"), keys | numbers),
    st.tuples(st.just("multi_set"), st.lists(keys, min_size=2, max_size=2, unique=True), st.tuples(texts, texts)),
    st.tuples(st.just("multi_get"), st.lists(keys, min_size=1, max_size=3)),
    st.tuples(st.just("wait"), st.lists(keys, min_size=1, max_size=2), st.just(timedelta(milliseconds=1))),
    st.tuples(st.just("num_keys")),
)
_numbers = itertools.count()


@settings(deadline=None, max_examples=60)
@given(st.lists(operations, min_size=1, max_size=25))
def test_it_answers_as_torchs_store_does(impatient_store, operations):
    store = impatient_store
    theirs = dist.HashStore()
    theirs.set_timeout(timedelta(milliseconds=1))
    prefix = f"example{next(_numbers)}"
    before = store.num_keys()
    stores = [dist.PrefixStore(prefix, each) for each in (store, theirs)]
    for name, *arguments in operations:
        mine, torchs = (_do(each, name, arguments) for each in stores)
        if name == "num_keys":
            mine -= before
        assert mine == torchs, (name, arguments)


def _do(store, name, arguments):
    try:
        return getattr(store, name)(*map(list_of, arguments))
    except RuntimeError as error:
        if not re.search("(?i)time.?out|must be set within", str(error)):
            raise
        return "time-out"


def list_of(argument):
    return list(argument) if isinstance(argument, tuple) else argument


def test_bytes_that_are_no_text_arrive(store):
    dist.PrefixStore("bytes", store).set("all", bytes(range(256)).decode("latin1"))
    store.set("all", bytes(range(256)))
    assert store.get("all") == bytes(range(256))


def test_one_that_waits_holds_up_no_other_thread(store):
    waiter = ThreadPoolExecutor(4)
    waits = [waiter.submit(store.get, "late") for _ in range(3)]
    for _ in range(20):
        store.set("other", "")
    assert not any(wait.done() for wait in waits)
    store.set("late", "here")
    assert [wait.result(timeout=10) for wait in waits] == [b"here"] * 3
    waiter.shutdown()


def test_a_key_that_is_deleted_while_another_is_waited_for_is_waited_for_again(fresh, monkeypatch):
    monkeypatch.setattr(connection, "_WAIT_S", 60.0)
    store = fresh()
    wait = ThreadPoolExecutor(1).submit(store.multi_get, ["first", "second"])
    while not fresh.server._key_values._waiting:
        time.sleep(0.001)
    store.set("first", "old")
    store.delete_key("first")
    store.set("second", "2")
    assert not wait.done()
    store.set("first", "new")
    assert wait.result(timeout=10) == [b"new", b"2"]


def test_a_long_wait_asks_again_and_again(store, monkeypatch):
    monkeypatch.setattr(connection, "_WAIT_S", 0.01)
    with ThreadPoolExecutor(1) as waiter:
        wait = waiter.submit(store.get, "much later")
        for _ in range(50):
            store.set("other", "")
            time.sleep(0.001)
        assert not wait.done()
        store.set("much later", "here")
        assert wait.result(timeout=10) == b"here"


def test_a_time_out_names_what_is_missing(store):
    store.set("there", "")
    with pytest.raises(ControlTimeoutError, match=r"must be set within 0.01 s, but \['gone', 'lost'\] were not"):
        store.wait(["there", "lost", "gone"], timedelta(seconds=0.01))
    with pytest.raises(dist.DistStoreError, match="gone"):  # what torch itself expects, through C++
        dist.PrefixStore("prefix", store).wait(["gone"], timedelta(seconds=0.01))


def test_what_cannot_be_done_says_so(store):
    store.set("word", "word")
    with pytest.raises(SettingsError, match="must hold a number, but 'word' does not"):
        store.add("word", 1)
    with pytest.raises(SettingsError, match="a control message must have at most"):
        store.set("large", b"x" * 2**22)
    for part in range(3):
        store.set(f"part{part}", b"x" * 2**21)
    with pytest.raises(SettingsError, match="a control message must have at most"):
        store.multi_get([f"part{part}" for part in range(3)])
    assert store.get("word") == b"word", "the connection goes on"


def test_64_clients_at_once_lose_and_double_nothing(fresh):
    stores = [fresh() for _ in range(64)]
    with ThreadPoolExecutor(64) as threads:
        sums = list(threads.map(lambda store: [store.add("sum", 1) for _ in range(20)], stores))
    assert sorted(itertools.chain(*sums)) == list(range(1, 64 * 20 + 1))


def add_in_child(store):
    store.add("children", 1)


def test_a_fork_makes_connections_of_its_own(store):
    store.add("children", 1)  # so that there is one to inherit
    children = [get_context("fork").Process(target=add_in_child, args=(store,)) for _ in range(3)]
    for child in children:
        child.start()
    for _ in range(50):
        store.add("parent", 1)
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert (store.add("children", 0), store.add("parent", 0)) == (4, 50)


def test_its_python_half_outlives_what_only_torch_refers_to(fresh):
    prefixed = dist.PrefixStore("prefix", ControlStore(fresh.server.access))
    prefixed.set("key", "value")
    assert prefixed.get("key") == b"value"
    for store in [store for store in control_store._open if store._client.access == fresh.server.access]:
        store.close()


def test_it_goes_on_with_a_server_that_was_started_again(fresh):
    access = fresh.server.access
    store = fresh()
    store.set("before", "")
    waiting = ThreadPoolExecutor(1).submit(store.get, "after")
    while not fresh.server._key_values._waiting:
        time.sleep(0.001)
    fresh.server.close()
    with ControlServer(access.host, access.port, token=access.token):
        assert not store.check(["before"]), "the values are the new server's"
        store.set("after", "here")
        assert waiting.result(timeout=10) == b"here"


def test_without_a_server_it_says_so_soon():
    with ControlServer() as server:
        access = server.access
    client = ControlClient(access, patience_s=0.1)
    with pytest.raises(ControlError, match=rf"control server at {access.address} could not be reached"):
        client.request({"do": "count"})


def test_a_closed_one_says_so(fresh):
    store = fresh()
    store.set("a", "")
    store.close()
    with pytest.raises(ControlError, match="was closed here"):
        store.set("a", "")


def test_another_token_is_refused(fresh):
    access = fresh.server.access
    client = ControlClient(ControlAccess(access.host, access.port, b"x" * 32), patience_s=0.1)
    with pytest.raises(ControlError, match="closed a connection in its handshake, as it does where the token is an"):
        client.request({"do": "count"})
    assert "must be sealed with the key" in fresh.server.refusals[-1].reason


def test_an_epoch_that_is_over_can_only_be_read(fresh, monkeypatch):
    monkeypatch.setattr(connection, "_WAIT_S", 60.0)  # so that who waits is told, and does not ask
    store = fresh()
    zombie, member = store_of_epoch(fresh(), 1), store_of_epoch(store, 2)
    store.announce_epoch(1)
    zombie.set("board", "old")
    blocked = ThreadPoolExecutor(1).submit(zombie.get, "never")
    while not fresh.server._key_values._waiting:
        time.sleep(0.001)
    store.announce_epoch(2)
    over = "must belong to the newest epoch of membership, 2, but this one belongs to 1"
    with pytest.raises(EpochOverError, match=over):
        blocked.result(timeout=10)
    member.set("board", "new")
    for write in (
        lambda: zombie.set("board", "zombie"),
        lambda: zombie.multi_set(["board"], ["zombie"]),
        lambda: zombie.add("count", 1),
        lambda: zombie.append("board", "zombie"),
        lambda: zombie.compare_set("board", "old", "zombie"),
        lambda: zombie.delete_key("board"),
        lambda: zombie.get("never"),
        lambda: zombie.wait(["never"], timedelta(seconds=1)),
    ):
        with pytest.raises(EpochOverError, match=over):
            write()
    assert (zombie.get("board"), member.get("board"), zombie.check(["count"])) == (b"old", b"new", False)
    with pytest.raises(EpochOverError, match="2, but this one belongs to 1"):
        store.announce_epoch(1)
    store.announce_epoch(2)


def test_keys_that_only_look_like_an_epochs_are_shared(fresh):
    store = fresh()
    store.announce_epoch(5)
    for key in ("paceline/epoch1", "paceline/epoch/1", "paceline/epoch-1/a", "paceline/epoch²/a", "paceline/epochs/1"):
        store.set(key, "shared")
    with pytest.raises(EpochOverError):
        store.set("paceline/epoch1/a", "fenced")


def test_1000_epochs_keep_the_keys_of_two(fresh):
    store = fresh()
    store.set("shared", "")
    for epoch in range(1, 1001):
        store.announce_epoch(epoch)
        store_of_epoch(store, epoch).set("key", "")
    assert store.num_keys() == 3


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_server_listens_on_one_interface(host):
    with pytest.raises(SettingsError, match="must listen on one interface"):
        ControlServer(host)


def test_a_port_that_is_taken_is_named(server):
    with pytest.raises(SettingsError, match=rf"but 127.0.0.1:{server.access.port} is not: .*in use"):
        ControlServer(port=server.access.port)


def test_tls_changes_nothing_else():
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(CERTIFICATE)
    theirs = ssl.create_default_context(cafile=CERTIFICATE)
    with ControlServer(ssl_context=ours) as server:
        store = ControlStore(server.access, ssl_context=theirs)
        store.set("large", b"x" * 10**6)
        assert store.get("large") == b"x" * 10**6
        assert store.add("count", 2) == 2
        store.close()
        with pytest.raises(ControlError, match="closed a connection"):
            ControlClient(server.access, patience_s=0.1).request({"do": "count"})


def test_closing_leaves_no_thread_and_no_descriptor():
    def count():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(20):
        with ControlServer() as server:
            store = ControlStore(server.access)
            store.set("a", "")
            store.close()
    assert count() == before
