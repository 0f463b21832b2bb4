"""Keys and values outlive their server: another one goes on from the log of requests."""

import base64
import os
import stat
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.control import ControlServer, ControlStore, KeyValues, RequestLog, read_requests

keys = st.sampled_from(["a", "b", "paceline/epoch0/x", "paceline/epoch1/x", "paceline/epoch2/y"])
values = st.integers(0, 20).map(lambda number: base64.b64encode(str(number).encode()).decode())
requests = st.one_of(
    st.builds(lambda k, v: {"do": "set", "keys": [k], "values": [v]}, keys, values),
    st.builds(lambda k, n: {"do": "add", "keys": [k], "number": n}, keys, st.integers(0, 3)),
    st.builds(lambda k, v: {"do": "append", "keys": [k], "values": [v]}, keys, values),
    st.builds(lambda k, v, w: {"do": "compare_set", "keys": [k], "values": [v, w]}, keys, values, values),
    st.builds(lambda k: {"do": "delete", "keys": [k]}, keys),
    st.builds(lambda n: {"do": "announce", "number": n}, st.integers(0, 3)),
    st.builds(lambda k: {"do": "check", "keys": [k]}, keys),
)
named = st.builds(
    lambda message, name: message | ({"id": name} if name else {}), requests, st.sampled_from("ABC") | st.just("")
)


def show(key_values):
    return key_values.epoch, key_values._shared, key_values._by_epoch, dict(key_values._replies)


def without_empty(shown):
    epoch, shared, by_epoch, replies = shown
    return epoch, shared, {number: space for number, space in by_epoch.items() if space}, replies


@settings(deadline=None)  # a file of each example
@given(messages=st.lists(named, max_size=40), max_bytes=st.sampled_from([1, 400, 10**6]))
def test_what_is_read_is_what_was_there_also_where_the_file_was_begun_anew(tmp_path_factory, messages, max_bytes):
    path = tmp_path_factory.mktemp("log") / "requests.log"
    key_values = KeyValues()
    log = RequestLog(path, key_values, max_bytes=max_bytes)
    for message in messages:
        key_values.handle(message)
    assert without_empty(show(read_requests(path))) == without_empty(show(key_values))
    log.close()
    assert not path.exists()


def test_a_request_that_was_cut_off_is_left_out_and_a_damaged_line_is_no_log(tmp_path):
    path = tmp_path / "requests.log"
    assert read_requests(path) is None
    key_values = KeyValues()
    RequestLog(path, key_values)
    for number in (1, 2):
        key_values.handle({"do": "add", "keys": ["a"], "number": number})
    whole = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(whole[:-4])
    assert read_requests(path)._shared == {"a": b"1"}
    for damaged in (b"[1]\n", b"not json\n", b'{"do": "pickle"}\n', b'{"replies": 3}\n'):
        path.write_bytes(damaged + whole)
        assert read_requests(path) is None


def test_the_file_does_not_grow_with_the_number_of_requests(tmp_path):
    path = tmp_path / "requests.log"
    key_values = KeyValues()
    RequestLog(path, key_values, max_bytes=10_000)
    for number in range(1000):
        key_values.handle({"do": "set", "keys": ["a"], "values": [base64.b64encode(b"%d" % number).decode()]})
        assert path.stat().st_size < 11_000
    assert read_requests(path)._shared == {"a": b"999"}


def test_a_server_whose_log_cannot_be_written_serves_on_without_one(tmp_path, monkeypatch):
    path, told = tmp_path / "requests.log", []
    key_values = KeyValues()
    RequestLog(path, key_values, tell_lost=told.append)

    def fail(descriptor, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        assert key_values.handle({"do": "add", "keys": ["a"], "number": 1}) == {"number": 1}
    assert key_values.handle({"do": "add", "keys": ["a"], "number": 1}) == {"number": 2}
    assert not path.exists(), "a log with a gap would lead elsewhere"
    assert [words.partition(" could not")[0] for words in told] == [str(path)]


@pytest.mark.parametrize("is_same_port", [True, False])
def test_who_waits_for_a_key_gets_it_from_the_next_server(tmp_path, is_same_port):
    path, access_file = tmp_path / "requests.log", tmp_path / "control.json"
    key_values, found = KeyValues(), []
    RequestLog(path, key_values)
    with ControlServer(key_values=key_values) as first:
        store = ControlStore(first.access, patience_s=20, access_file=access_file)
        waiting = ControlStore(first.access, patience_s=20, access_file=access_file)
        store.set("a", b"1")
        assert store.add("number", 2) == 2
        thread = threading.Thread(target=lambda: found.append(waiting.get("late")))
        thread.start()
    again = read_requests(path)
    RequestLog(path, again)
    port = first.access.port if is_same_port else 0
    with ControlServer(port=port, token=first.access.token, key_values=again) as second:
        second.access.save(access_file)
        assert store.get("a") == b"1"
        assert store.add("number", 1) == 3
        store.set("late", b"at last")
        thread.join(20)
        assert found == [b"at last"]
        store.close()
        waiting.close()
