"""A control connection, at the client's end."""

import contextlib
import itertools
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.comm.control.access import ControlAccess
from paceline.comm.control.errors import ControlError
from paceline.comm.control.frames import FrameReader, Message
from paceline.comm.control.handshake import ClientHandshake
from paceline.errors import SettingsError

_REPLY_S = 2.0
"""Time of a reply, beyond that for which the server was asked to wait, after which it counts as lost."""
_WAIT_S = 5.0
"""Longest time for which the server is asked to wait at once: the answer after it shows that it lives."""
_FIRST_PAUSE_S = 0.02
_LAST_PAUSE_S = 0.5
_CHUNK_BYTES = 65536


DEFAULT_PATIENCE_S = 6.0


class ControlConnection:
    """One authenticated connection to a control server: requests and their replies, in turns, from one thread.

    Args:
        access: Address and token of the server.
        timeout_s: Longest time until it is open.
        ssl_context: TLS of the client's side, if the server has it.

    Raises:
        ControlError: The server cannot be reached, or one of the two does not know the token.
    """

    def __init__(self, access: ControlAccess, *, timeout_s: float, ssl_context: ssl.SSLContext | None = None) -> None:
        self._address = access.address
        deadline_s = time.monotonic() + timeout_s
        with self._explained("could not be reached"):
            self._socket = socket.create_connection((access.host, access.port), timeout_s)
        try:
            with self._explained("closed a connection in its handshake, as it does where the token is another run's"):
                keep_alive(self._socket)
                if ssl_context is not None:
                    self._socket = ssl_context.wrap_socket(self._socket, server_hostname=access.host)
                handshake = ClientHandshake(access.token)
                self._socket.sendall(handshake.begin())
                self._reader, self._writer = handshake.finish(self._receive(handshake.reader, deadline_s))
        except BaseException:
            self.close()
            raise

    def request(self, message: Message, timeout_s: float) -> Message:
        """Send a request and return its reply; after an error the connection must be closed.

        Raises:
            ControlError: The connection is lost, or the reply did not come in time.
        """
        frame = self._writer.write(message)
        with self._explained("was lost"):
            deadline_s = time.monotonic() + timeout_s
            self._socket.settimeout(timeout_s)
            self._socket.sendall(frame)
            return self._receive(self._reader, deadline_s)

    def close(self) -> None:
        """Close it; it may be called again."""
        self._socket.close()

    def _receive(self, reader: FrameReader, deadline_s: float) -> Message:
        while (message := reader.read()) is None:
            self._socket.settimeout(max(1e-3, deadline_s - time.monotonic()))
            data = self._socket.recv(_CHUNK_BYTES)
            if not data:
                raise OSError("the other end closed the connection")
            reader.feed(data)
        return message

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ControlError) as error:
            raise ControlError(f"the control server at {self._address} {what}: {error}") from error


class ControlClient:
    """Requests to a control server from any thread: each goes over a connection that no other thread uses then.

    A request whose connection breaks is sent again over a new one.

    Args:
        access: Address and token of the server.
        patience_s: Longest time to try to reach the server again before a request fails.
        access_file: File in which the access of a server lies that took the place of the first one, if one did.
        ssl_context: TLS of the client's side, if the server has it.
    """

    def __init__(
        self,
        access: ControlAccess,
        *,
        patience_s: float = DEFAULT_PATIENCE_S,
        access_file: Path | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.access = access
        self._patience_s, self._access_file = patience_s, access_file
        self._ssl_context = ssl_context
        self._is_closed = False
        self._idle: list[ControlConnection] = []
        self._start()

    def request(self, message: Message, timeout_s: float = 0.0, *, is_once: bool = False) -> Message:
        """Send a request and return its reply.

        Args:
            message: The request.
            timeout_s: Longest time that the server may wait before it replies.
            is_once: Whether to do it a second time would do something else, so that the server must not.

        Raises:
            ControlError: The server cannot be reached, or is frozen.
        """
        if self._pid != os.getpid():  # the connections are the parent's, and some thread of it may hold the lock
            for connection in self._idle:
                connection.close()
            self._start()
        if is_once:
            message = {**message, "id": f"{self._name}:{next(self._numbers)}"}
        deadline_s = time.monotonic() + timeout_s
        trouble_s: float | None = None
        """Time of the first error since the last reply."""
        pause_s = _FIRST_PAUSE_S
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            asked_s = min(left_s, _WAIT_S)
            try:
                reply = self._try({**message, "timeout_s": asked_s} if timeout_s else message, asked_s + _REPLY_S)
            except ControlError:
                now_s = time.monotonic()
                trouble_s = trouble_s or now_s
                if self._is_closed or now_s >= min(deadline_s, trouble_s) + self._patience_s:
                    raise
                time.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            else:
                if asked_s >= left_s or "missing" not in reply:
                    return reply
                trouble_s, pause_s = None, _FIRST_PAUSE_S

    def close(self) -> None:
        """Close all connections; further requests fail."""
        self._is_closed = True
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _start(self) -> None:
        """Begin without connections, as what no other process is."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle = []
        self._name = os.urandom(8).hex()
        self._numbers = itertools.count()

    def _try(self, message: Message, timeout_s: float) -> Message:
        connection = self._take()
        try:
            reply = connection.request(message, timeout_s)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        if self._is_closed:
            self.close()
        return reply

    def _take(self) -> ControlConnection:
        """Return a connection that no other thread uses."""
        if self._is_closed:
            raise ControlError(f"the connection to the control server at {self.access.address} was closed here")
        with self._lock:
            if self._idle:
                return self._idle.pop()
        if self._access_file is not None:
            with contextlib.suppress(SettingsError):  # nobody has taken its place
                self.access = ControlAccess.load(self._access_file)
        return ControlConnection(self.access, timeout_s=_REPLY_S, ssl_context=self._ssl_context)


def keep_alive(connection: socket.socket) -> None:
    """Send what is written at once, and notice within half a minute that the machine at the other end is dead."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # macOS names the first of them otherwise
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
