"""Frames and handshakes of control connections: what is not the next authentic message is refused."""

import hmac
import json
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.control.errors import ControlError
from paceline.comm.control.frames import MAX_DEPTH, MAX_MESSAGE_BYTES, FrameReader, FrameWriter
from paceline.comm.control.handshake import MAX_HELLO_BYTES, ClientHandshake, greet, welcome
from paceline.errors import SettingsError

KEY = b"k" * 32
TOKEN = b"t" * 32
values = st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=5)
messages = st.dictionaries(st.text(max_size=5), values, max_size=3)


def read_all(reader):
    return list(iter(reader.read, None))


def read_until_refused(reader, received):
    """Append the messages that come to a list, and return why the next is refused; empty if it is waited for."""
    try:
        received += read_all(reader)
    except ControlError as error:
        return str(error)
    return ""


def frame_of(payload, key=KEY, number=0):
    """Return a frame with a right seal, whatever it holds."""
    frame = struct.pack("!IQ", len(payload), number) + payload
    return frame + hmac.digest(key, frame, "sha256")


@given(st.lists(messages, max_size=4), st.lists(st.integers(1, 50), min_size=1))
def test_messages_arrive_however_their_bytes_are_divided(sent, sizes):
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    data = b"".join(map(writer.write, sent))
    received = []
    for size in sizes * (len(data) // sum(sizes) + 1):
        reader.feed(data[:size])
        data = data[size:]
        received += read_all(reader)
    assert received == sent
    assert not reader.is_inside


@given(st.lists(messages, min_size=1, max_size=3), st.data())
def test_a_changed_bit_is_never_read_over(sent, data):
    stream = bytearray(b"".join(map(FrameWriter(KEY).write, sent)))
    place = data.draw(st.integers(0, 8 * len(stream) - 1))
    stream[place // 8] ^= 1 << place % 8
    reader, received = FrameReader(KEY), []
    reader.feed(bytes(stream))
    refusal = read_until_refused(reader, received)
    assert received == sent[: len(received)]
    assert len(received) < len(sent)
    assert refusal or reader.is_inside, "what is refused, or waited for since its length grew, is not read"


@pytest.mark.parametrize(
    ("order", "num_read"),
    [((0, 2), 1), ((0, 0, 1), 1), ((1, 0), 0), ((0, 1, 0), 2)],
    ids=["lost", "doubled", "reordered", "replayed"],
)
def test_messages_come_in_order_and_once(order, num_read):
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    frames = [writer.write({"number": number}) for number in range(3)]
    for index in order:
        reader.feed(frames[index])
    assert [reader.read() for _ in range(num_read)] == [{"number": number} for number in range(num_read)]
    with pytest.raises(ControlError, match=f"message {num_read} must come next, but message {order[num_read]} came"):
        reader.read()


@given(st.binary(max_size=200))
def test_bytes_of_strangers_are_refused_or_waited_for(data):
    reader, received = FrameReader(KEY), []
    reader.feed(data)
    refusal = read_until_refused(reader, received)
    assert not received
    assert re.search("bytes|sealed", refusal) or reader.is_inside or not data


def test_a_large_message_is_refused_before_it_comes():
    reader = FrameReader(KEY)
    reader.feed(struct.pack("!IQ", MAX_MESSAGE_BYTES + 1, 0))
    with pytest.raises(ControlError, match=f"at most {MAX_MESSAGE_BYTES} bytes"):
        reader.read()
    with pytest.raises(SettingsError, match=r"at most \d+ bytes, but got \d+; send data of this size by a group"):
        FrameWriter(KEY).write({"value": "x" * MAX_MESSAGE_BYTES})


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested at most"),
        (b"[" * 1_000_000, "nested at most"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", "must be JSON"),
        (b"\xff\xfe", "must be JSON"),
        (b"[1]", "must be a JSON object, but got list"),
        (b"\x80\x04N.", "must be JSON"),
    ],
    ids=["deep objects", "deep lists", "NaN", "number", "bytes", "list", "pickle"],
)
def test_an_authentic_message_is_still_checked(payload, words):
    reader = FrameReader(KEY)
    reader.feed(frame_of(payload))
    with pytest.raises(ControlError, match=words):
        reader.read()


def test_brackets_in_strings_are_not_nesting():
    message = {"keys": ["[{" * 50, '\\"[[[[[[[[[[']}
    reader = FrameReader(KEY)
    reader.feed(frame_of(json.dumps(message).encode()))
    assert reader.read() == message
    nested = json.loads("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1))
    reader.feed(frame_of(json.dumps({"a": nested}).encode(), number=1))
    assert reader.read() == {"a": nested}


def shake_hands(client_token=TOKEN, server_token=TOKEN):
    """Return the client's and the server's (reader, writer), and the bytes that went each way."""
    client, greeter = ClientHandshake(client_token), greet(server_token)
    hello = client.begin()
    greeter.feed(hello)
    answer, *server = welcome(server_token, greeter.read())
    client.reader.feed(answer)
    return client.finish(client.reader.read()), server, hello, answer


def test_each_end_reads_what_the_other_writes_and_nothing_else():
    (client_reader, client_writer), (server_reader, server_writer), *_ = shake_hands()
    request, reply = client_writer.write({"a": 1}), server_writer.write({"b": 2})
    server_reader.feed(request)
    client_reader.feed(reply)
    assert (server_reader.read(), client_reader.read()) == ({"a": 1}, {"b": 2})
    (client_reader, client_writer), _, *_ = shake_hands()
    client_reader.feed(client_writer.write({"a": 1}))
    with pytest.raises(ControlError, match="sealed"):
        client_reader.read()


def test_what_was_recorded_on_another_connection_is_refused():
    (_, client_writer), _, hello, answer = shake_hands()
    request = client_writer.write({"a": 1})
    greeter = greet(TOKEN)
    greeter.feed(hello)
    _, reader, _ = welcome(TOKEN, greeter.read())  # a hello alone can be replayed, to no use:
    reader.feed(request)
    with pytest.raises(ControlError, match="sealed"):
        reader.read()
    client = ClientHandshake(TOKEN)
    client.begin()
    client.reader.feed(answer)
    with pytest.raises(ControlError, match="sealed"):
        client.reader.read()


@pytest.mark.parametrize("side", ["client_token", "server_token"])
def test_another_token_is_refused(side):
    with pytest.raises(ControlError, match="sealed"):
        shake_hands(**{side: b"x" * 32})


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"paceline_control": 2, "nonce": "00" * 32}, "must speak version 1, but the other speaks 2"),
        ({"paceline_control": 1}, "must hold a nonce"),
        ({"paceline_control": 1, "nonce": 5}, "must hold a nonce"),
        ({"paceline_control": 1, "nonce": "00"}, "must have 32 bytes, but got 1"),
    ],
)
def test_a_hello_has_a_version_and_a_nonce(message, words):
    with pytest.raises(ControlError, match=words):
        welcome(TOKEN, message)


def test_a_hello_is_small():
    greeter = greet(TOKEN)
    greeter.feed(struct.pack("!IQ", MAX_HELLO_BYTES + 1, 0))
    with pytest.raises(ControlError, match=f"at most {MAX_HELLO_BYTES} bytes"):
        greeter.read()
