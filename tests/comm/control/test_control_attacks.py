"""A control server among strangers and broken networks: it lives, honest clients go on, memory stays flat."""

import contextlib
import gc
import random
import selectors
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.control import ControlConnection, ControlError, ControlServer, ControlStore, ServerLimits, connection
from paceline.comm.control.access import ControlAccess
from paceline.comm.control.frames import FrameWriter
from paceline.comm.control.handshake import ClientHandshake
from paceline.comm.threads import start_thread


@pytest.fixture(scope="module")
def server():
    with ControlServer(limits=ServerLimits(handshake_s=0.2, message_s=0.2, num_strangers=32)) as server:
        yield server


@pytest.fixture(scope="module")
def store(server):
    store = ControlStore(server.access, timeout_s=10)
    yield store
    store.close()


def connect(server):
    return socket.create_connection((server.access.host, server.access.port), timeout=10)


def was_ended(stranger):
    """Return whether the server ends the connection, whatever it has answered."""
    try:
        while stranger.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def shake_hands(server):
    """Return a socket and the writer of a session, as one who knows the token makes them."""
    stranger, handshake = connect(server), ClientHandshake(server.access.token)
    stranger.sendall(handshake.begin())
    while (welcome := handshake.reader.read()) is None:
        handshake.reader.feed(stranger.recv(1000))
    return stranger, handshake.finish(welcome)[1]


@settings(deadline=None, max_examples=100)
@given(st.binary(min_size=1, max_size=300), st.booleans())
def test_bytes_of_strangers_end_their_connection_alone(server, store, data, after_handshake):
    stranger, writer = shake_hands(server) if after_handshake else (connect(server), None)
    with stranger:
        stranger.sendall(writer.write({"do": "count"}) + data if writer else data)
        stranger.shutdown(socket.SHUT_WR)
        assert was_ended(stranger)
    assert store.add("honest", 1) > 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["do", "keys", "values", "number", "timeout_s", "id", "other"])
kinds = st.sampled_from(
    ["set", "get", "wait", "check", "add", "compare_set", "append", "delete", "count", "handle", "_put"]
)


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(names, json_values, max_size=4), kinds | json_values)
def test_requests_that_make_no_sense_end_their_connection_alone(server, store, message, kind):
    stranger, writer = shake_hands(server)
    with stranger:
        stranger.sendall(writer.write({**message, "do": kind}))
        stranger.shutdown(socket.SHUT_WR)
        assert was_ended(stranger)
    assert store.add("honest", 1) > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda frames: [frames[0], frames[0]], "message 1 must come next, but message 0 came"),
        (lambda frames: [frames[1]], "message 0 must come next, but message 1 came"),
        (lambda frames: [frames[0][:-1] + bytes([frames[0][-1] ^ 1])], "must be sealed"),
        (lambda frames: [frames[0][:20]], "a message must be complete within|the handshake must be complete"),
        (lambda frames: [frames[0], frames[1][:20]], "a message must be complete within"),
        (lambda frames: [b"\xff" * 12], "at most 4194304 bytes"),
    ],
    ids=["doubled", "lost", "forged", "slow first", "slow", "oversize"],
)
def test_the_reason_is_kept(server, store, change, words):
    stranger, writer = shake_hands(server)
    num_refused = server.num_refused
    with stranger:
        stranger.sendall(b"".join(change([writer.write({"do": "add", "keys": ["k"], "number": 1}) for _ in range(2)])))
        assert was_ended(stranger)
    while server.num_refused == num_refused:
        time.sleep(0.001)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(server.refusals[-1].reason)
    assert store.add("honest", 1) > 0


def test_a_request_while_another_waits_is_refused(server, store):
    stranger, writer = shake_hands(server)
    with stranger:
        stranger.sendall(writer.write({"do": "get", "keys": ["never"], "timeout_s": 100.0}))
        stranger.sendall(writer.write({"do": "count"}))
        assert was_ended(stranger)
    assert not server._key_values._waiting, "whoever is gone waits no longer"


def test_a_recorded_session_is_of_no_use(server, store):
    recorded = []
    proxy = Proxy(server.access, lambda data, to_server: recorded.append(data) or [data] if to_server else [data])
    with proxy:
        spied = ControlStore(proxy.access)
        assert spied.add("spied", 5) == 5
        spied.close()
    with connect(server) as replay:
        replay.sendall(b"".join(recorded))
        assert was_ended(replay)
    assert store.add("spied", 0) == 5


def test_a_server_that_does_not_know_the_token_is_refused(server):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend():
            with listener.accept()[0] as victim:
                victim.recv(1000)
                victim.sendall(FrameWriter(b"x" * 32).write({"paceline_control": 1, "nonce": "00" * 32}))
                victim.recv(1000)

        thread = threading.Thread(target=pretend)
        thread.start()
        access = ControlAccess("127.0.0.1", listener.getsockname()[1], server.access.token)
        with pytest.raises(ControlError, match="must be sealed with the key of its connection"):
            ControlConnection(access, timeout_s=10)
        thread.join()


def test_1000_connections_without_a_handshake_change_nothing(server, store):
    store.add("honest", 1)
    tracemalloc.start()
    try:
        grown = []
        for _ in range(2):
            _flood(server, store, 500)
            while len(server._sessions) > 2:
                time.sleep(0.01)
            gc.collect()
            grown.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert grown[1] - grown[0] < 50_000, f"bytes after 500 and 1,000 connections: {grown}"


def _flood(server, store, num_connections):
    with contextlib.ExitStack() as stack:
        for _ in range(num_connections):
            stack.enter_context(connect(server))
        assert len(server._strangers) <= 33  # it ends the oldest when one more comes
        newcomer = ControlStore(server.access)  # has to make a connection of its own among them
        assert newcomer.add("honest", 1) > store.add("honest", 0) - 1
        newcomer.close()


class Proxy:
    """Hands on what goes between clients and a server, changed by a function of (bytes, to_server): a list of bytes."""

    def __init__(self, access, change):
        self._target = access.host, access.port
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.access = ControlAccess("127.0.0.1", self._listener.getsockname()[1], access.token)
        self._stop = threading.Event()
        self._thread = start_thread(self._run, name="proxy", stop=self._stop.set)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _run(self):
        with selectors.DefaultSelector() as selector, contextlib.closing(self._listener):
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stop.is_set():
                for key, _ in selector.select(0.01):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fileobj.fileno() >= 0:  # the other end may just have ended it
                        self._pass_on(selector, key.fileobj, *key.data)
            for key in [key for key in selector.get_map().values() if key.data]:
                key.fileobj.close()

    def _accept(self, selector):
        client = self._listener.accept()[0]
        upstream = socket.create_connection(self._target)
        selector.register(client, selectors.EVENT_READ, (upstream, True))
        selector.register(upstream, selectors.EVENT_READ, (client, False))

    def _pass_on(self, selector, source, sink, to_server):
        try:
            data = source.recv(65536)
            parts = self._change(data, to_server) if data else None
            for part in parts or []:
                sink.sendall(part)
        except OSError:
            parts = None
        if parts is None:
            for end in (source, sink):
                selector.unregister(end)
                end.close()


def break_one_in(rate, seed):
    """Return a change that now and then loses, doubles, moves or flips bytes, or cuts the connection."""
    chance = random.Random(seed)

    def change(data, to_server):
        if chance.random() >= rate:
            return [data]
        middle = chance.randrange(len(data))
        flipped = data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]
        return chance.choice(
            [[data[:middle]], [data, data], [data[middle:], data[:middle]], [flipped], None, [data, b"x"]]
        )

    return change


def test_every_update_counts_once_on_a_broken_network(server, monkeypatch):
    monkeypatch.setattr(connection, "_REPLY_S", 0.2)  # after which a reply counts as lost
    monkeypatch.setattr(connection, "_WAIT_S", 0.2)
    with Proxy(server.access, break_one_in(0.05, seed=17)) as proxy:
        stores = [ControlStore(proxy.access) for _ in range(8)]
        num_refused = server.num_refused

        def work(store):
            for number in range(25):
                store.add("broken/sum", 1)
                store.append("broken/text", "x")
                store.set(f"broken/{number}", f"{number}")
                assert store.get(f"broken/{number}") == f"{number}".encode()

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, stores))
        assert stores[0].add("broken/sum", 0) == 8 * 25
        assert stores[0].get("broken/text") == b"x" * 8 * 25
        assert server.num_refused > num_refused, "something was broken"
        for store in stores:
            store.close()


def test_what_was_done_before_the_reply_was_lost_is_done_once(server):
    cuts = iter([False, False, True])  # the answer to the handshake, to the first request, and to the second

    def change(data, to_server):
        return None if not to_server and next(cuts, False) else [data]

    with Proxy(server.access, change) as proxy:
        store = ControlStore(proxy.access)
        assert [store.add("once", 1) for _ in range(3)] == [1, 2, 3]
        assert next(cuts, None) is None
        store.close()
