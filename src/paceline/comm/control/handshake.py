"""Handshake of a control connection: both ends prove that they know the token, and agree on keys for this connection.

The client sends a nonce, sealed with the token; the server answers with its own, sealed with the token and the
client's nonce. The keys of both directions follow from the token and both nonces. So the server's answer is proof that
it knows the token, the client's first request is proof that it does, and nothing recorded earlier fits: one of the
nonces is new. The token itself is never sent.
"""

import hmac
import os

from paceline.comm.control.errors import ControlError
from paceline.comm.control.frames import FrameReader, FrameWriter, Message

MAX_HELLO_BYTES = 256
_NONCE_BYTES = 32
_VERSION = 1


class ClientHandshake:
    """The client's side.

    Args:
        token: Token of the run.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._nonce = os.urandom(_NONCE_BYTES)
        self.reader = FrameReader(_derive(token, "welcome", self._nonce), MAX_HELLO_BYTES)
        """Reader of the server's answer."""

    def begin(self) -> bytes:
        """Return the first frame."""
        return FrameWriter(_derive(self._token, "hello")).write(_introduce(self._nonce))

    def finish(self, welcome: Message) -> tuple[FrameReader, FrameWriter]:
        """Return the session's reader and writer, given the server's answer."""
        to_server, to_client = _session_keys(self._token, self._nonce, _nonce_of(welcome))
        return FrameReader(to_client), FrameWriter(to_server)


def greet(token: bytes) -> FrameReader:
    """Return the server's reader of a client's first frame."""
    return FrameReader(_derive(token, "hello"), MAX_HELLO_BYTES)


def welcome(token: bytes, hello: Message) -> tuple[bytes, FrameReader, FrameWriter]:
    """Return the server's answer to a client's first message, and the session's reader and writer.

    Raises:
        ControlError: The message is not one of a handshake.
    """
    theirs, mine = _nonce_of(hello), os.urandom(_NONCE_BYTES)
    answer = FrameWriter(_derive(token, "welcome", theirs)).write(_introduce(mine))
    to_server, to_client = _session_keys(token, theirs, mine)
    return answer, FrameReader(to_server), FrameWriter(to_client)


def _introduce(nonce: bytes) -> Message:
    return {"paceline_control": _VERSION, "nonce": nonce.hex()}


def _nonce_of(message: Message) -> bytes:
    if message.get("paceline_control") != _VERSION:
        raise ControlError(
            f"both ends of a control connection must speak version {_VERSION}, but the other speaks "
            f"{message.get('paceline_control')!r}; run the same Paceline on all machines"
        )
    try:
        nonce = bytes.fromhex(message["nonce"])
    except (KeyError, TypeError, ValueError) as error:
        raise ControlError(f"a handshake must hold a nonce, but got {message}") from error
    if len(nonce) != _NONCE_BYTES:
        raise ControlError(f"a nonce must have {_NONCE_BYTES} bytes, but got {len(nonce)}")
    return nonce


def _session_keys(token: bytes, client_nonce: bytes, server_nonce: bytes) -> tuple[bytes, bytes]:
    """Return the keys of what the client sends and of what the server sends."""
    both = client_nonce + server_nonce
    return _derive(token, "to server", both), _derive(token, "to client", both)


def _derive(token: bytes, purpose: str, nonces: bytes = b"") -> bytes:
    return hmac.digest(token, f"paceline control {_VERSION}: {purpose}\0".encode() + nonces, "sha256")
