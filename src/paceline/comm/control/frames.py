"""Frames: one direction of a control connection as bytes, each message sealed and numbered. No I/O.

A frame is the length of its message and its number in this direction (12 bytes), the message as JSON, and their
HMAC-SHA256 (32 bytes) under a key that only this direction of this connection has. So a frame that was changed, cut,
lost, doubled, moved, sent back, or recorded on another connection is refused, before anything in it is parsed.
"""

import hmac
import json
import re
import struct
from typing import Any

from paceline.comm.control.errors import ControlError
from paceline.errors import SettingsError

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 4 * 2**20
MAX_DEPTH = 8
"""Deepest nesting of lists and objects in a message; ours have 2 levels."""

_HEADER = struct.Struct("!IQ")
_SEAL_BYTES = 32
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


class FrameWriter:
    """Makes the frames of one direction.

    Args:
        key: Key of this direction of this connection.
    """

    def __init__(self, key: bytes) -> None:
        self._seal = hmac.new(key, digestmod="sha256")
        self._number = 0

    def write(self, message: Message) -> bytes:
        """Return the frame of the next message.

        Raises:
            SettingsError: The message is too large.
        """
        payload = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
        if len(payload) > MAX_MESSAGE_BYTES:
            raise SettingsError(
                f"a control message must have at most {MAX_MESSAGE_BYTES} bytes, but got {len(payload)}; send data of "
                "this size by a group"
            )
        frame = _HEADER.pack(len(payload), self._number) + payload
        self._number += 1
        return frame + _sign(self._seal, frame)


class FrameReader:
    """Takes the bytes of one direction, and gives messages.

    Args:
        key: Key of this direction of this connection.
        max_bytes: Size of the largest message.
    """

    def __init__(self, key: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._seal = hmac.new(key, digestmod="sha256")
        self._number = 0
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def is_inside(self) -> bool:
        """Whether bytes have come that no message has used: the beginning of a frame, or a whole one."""
        return bool(self._buffer)

    @property
    def missing(self) -> int:
        """Number of bytes that surely belong to the next message and have not come yet."""
        if len(self._buffer) < _HEADER.size:
            return _HEADER.size - len(self._buffer)
        length: int = _HEADER.unpack_from(self._buffer)[0]
        return max(1, _HEADER.size + min(length, self._max_bytes) + _SEAL_BYTES - len(self._buffer))

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._buffer += data

    def read(self) -> Message | None:
        """Return the next message; None if it is not complete.

        Raises:
            ControlError: The frame is not the next one that the other end sent; nothing after it can be read.
        """
        if len(self._buffer) < _HEADER.size:
            return None
        length, number = _HEADER.unpack_from(self._buffer)
        if length > self._max_bytes:
            raise ControlError(
                f"a control message must have at most {self._max_bytes} bytes, but {length} are announced"
            )
        end = _HEADER.size + length
        if len(self._buffer) < end + _SEAL_BYTES:
            return None
        frame, seal = bytes(self._buffer[:end]), bytes(self._buffer[end : end + _SEAL_BYTES])
        del self._buffer[: end + _SEAL_BYTES]
        if not hmac.compare_digest(seal, _sign(self._seal, frame)):
            raise ControlError("a control message must be sealed with the key of its connection, but is not")
        if number != self._number:
            raise ControlError(f"control message {self._number} must come next, but message {number} came")
        self._number += 1
        return _parse(frame[_HEADER.size :])


def _sign(seal: hmac.HMAC, frame: bytes) -> bytes:
    signed = seal.copy()
    signed.update(frame)
    return signed.digest()


def _parse(payload: bytes) -> Message:
    _check_depth(payload)
    try:
        message = json.loads(payload, parse_constant=_refuse)
    except ValueError as error:
        raise ControlError(f"a control message must be JSON, but is not: {error}") from error
    if not isinstance(message, dict):
        raise ControlError(f"a control message must be a JSON object, but got {type(message).__name__}")
    return message


def _check_depth(payload: bytes) -> None:
    if payload.count(b"[") + payload.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for bracket in re.findall(rb"[][{}]", _STRING.sub(b"", payload)):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ControlError(f"a control message must be nested at most {MAX_DEPTH} deep, but is deeper")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
