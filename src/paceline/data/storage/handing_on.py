"""Blocks that the workers of a run hand to each other, so that each leaves the store once.

Each block has a home, one of the workers by the block's key. The home fetches it from the store; the others ask it,
over connections with the handshake of control connections: both ends prove that they know a secret of the run, and the
digest of a block comes in a sealed message. Where a home cannot be reached, a worker fetches from the store itself.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from blake3 import blake3
from torch.distributed import PrefixStore, Store

from paceline.comm.control.connection import keep_alive
from paceline.comm.control.errors import ControlError
from paceline.comm.control.frames import FrameReader, FrameWriter, Message
from paceline.comm.control.handshake import ClientHandshake, greet, welcome
from paceline.comm.group import Group
from paceline.comm.threads import start_thread
from paceline.data.storage.blocks import FileBlock
from paceline.errors import PacelineError

Give = Callable[[str, str, int], bytes | None]
"""Function (path, version, start) that returns a block of which this worker is the home; None if it is not."""

_HANDSHAKE_S = 10.0
_ANSWER_S = 60.0
_AWAY_S = 10.0
"""Time for which a worker that could not be reached is not asked again."""
_FIND_S = 30.0
"""Longest time to wait for the address of a worker, which may begin later."""
_CHUNK_BYTES = 2**18


class _Connection:
    """One end of an authenticated connection, after its handshake; one thread uses it at a time."""

    def __init__(self, connection: socket.socket, reader: FrameReader, writer: FrameWriter) -> None:
        self._socket, self._reader, self._writer = connection, reader, writer

    @classmethod
    def connect(cls, host: str, port: int, secret: bytes) -> "_Connection":
        connection = socket.create_connection((host, port), _HANDSHAKE_S)
        try:
            keep_alive(connection)
            handshake = ClientHandshake(secret)
            connection.sendall(handshake.begin())
            reader, writer = handshake.finish(_receive(connection, handshake.reader))
        except BaseException:
            connection.close()
            raise
        connection.settimeout(_ANSWER_S)
        return cls(connection, reader, writer)

    @classmethod
    def accept(cls, connection: socket.socket, secret: bytes) -> "_Connection":
        connection.settimeout(_HANDSHAKE_S)
        keep_alive(connection)
        answer, reader, writer = welcome(secret, _receive(connection, greet(secret)))
        connection.sendall(answer)
        connection.settimeout(None)
        return cls(connection, reader, writer)

    def send(self, message: Message, body: bytes = b"") -> None:
        self._socket.sendall(self._writer.write(message))
        self._socket.sendall(body)

    def receive(self) -> Message:
        return _receive(self._socket, self._reader)

    def receive_body(self, num_bytes: int) -> bytes:
        body = bytearray(num_bytes)
        view = memoryview(body)
        while view:
            num_read = self._socket.recv_into(view)
            if not num_read:
                raise OSError("the other end closed the connection")
            view = view[num_read:]
        return bytes(body)

    def close(self) -> None:
        self._socket.close()


def _receive(connection: socket.socket, reader: FrameReader) -> Message:
    """Return the next message. What follows it on the wire is left there: bodies come after messages."""
    while (message := reader.read()) is None:
        data = connection.recv(reader.missing)
        if not data:
            raise OSError("the other end closed the connection")
        reader.feed(data)
    return message


class HandingOn:
    """This worker among those that hand blocks to each other.

    Args:
        rank: Number of this worker.
        size: Number of workers.
        store: Store by which the workers find each other; who can write there can take part.
        give: Function that returns a block of which this worker is the home.
        host: Address by which the others reach this machine.
    """

    def __init__(self, rank: int, size: int, store: Store, give: Give, host: str) -> None:
        self.rank, self.size = rank, size
        self._store, self._give = store, give
        self._secret = bytes.fromhex(store.compare_set("secret", "", os.urandom(32).hex()).decode())
        self._idle: dict[int, list[_Connection]] = {}
        self._away_until_s: dict[int, float] = {}
        self._turn = threading.Lock()
        self._is_closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._address = self._listener.getsockname()[:2]
        store.set(f"address/{rank}", f"{self._address[0]} {self._address[1]}")
        start_thread(self._serve, name="paceline-handing-on", stop=self.close)

    def is_home(self, key: str) -> bool:
        """Return whether this worker fetches a block for all."""
        return self._home_of(key) == self.rank

    def fetch(self, block: FileBlock) -> bytes | None:
        """Return a block from its home; None if that cannot be reached, or has another file."""
        home = self._home_of(block.key)
        if time.monotonic() < self._away_until_s.get(home, 0.0):
            return None
        try:
            return self._ask(home, block)
        except (OSError, ControlError, RuntimeError):  # torch's stores raise the last
            self._away_until_s[home] = time.monotonic() + _AWAY_S
            return None

    def close(self) -> None:
        """End all connections."""
        self._is_closed = True
        with contextlib.suppress(OSError), socket.create_connection(self._address, 1.0):
            pass  # which ends the wait for the next connection
        with self._turn:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _home_of(self, key: str) -> int:
        return int(key[-16:], 16) % self.size

    def _ask(self, home: int, block: FileBlock) -> bytes | None:
        with self._turn:
            waiting = self._idle.setdefault(home, [])
            connection = waiting.pop() if waiting else None
        if connection is None:
            key = f"address/{home}"
            self._store.wait([key], timedelta(seconds=_FIND_S))
            host, port = self._store.get(key).decode().split()
            connection = _Connection.connect(host, int(port), self._secret)
        try:
            connection.send({"path": block.path, "version": block.version, "start": block.start})
            answer = connection.receive()
            content = connection.receive_body(answer["num_bytes"])
        except BaseException:
            connection.close()
            raise
        with self._turn:
            self._idle.setdefault(home, []).append(connection)
        is_right = len(content) == block.num_bytes and blake3(content).hexdigest() == answer["digest"]
        return content if is_right else None

    def _serve(self) -> None:
        with self._listener:
            while not self._is_closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    return
                start_thread(self._answer, connection, name="paceline-hand", stop=lambda: None)

    def _answer(self, accepted: socket.socket) -> None:
        with accepted, contextlib.suppress(OSError, ControlError):
            connection = _Connection.accept(accepted, self._secret)
            while not self._is_closed:
                asked = connection.receive()
                try:
                    content = self._give(str(asked["path"]), str(asked["version"]), int(asked["start"]))
                except PacelineError:  # whoever asks meets the same error at the store
                    content = None
                content = content or b""
                connection.send({"num_bytes": len(content), "digest": blake3(content).hexdigest()}, content)


def join_peers(group: Group | None, url_tag: str, give: Give) -> HandingOn | None:
    """Return this worker among those of a group; None if it is alone, or they are threads of one process.

    Args:
        group: Workers of the run.
        url_tag: Mark of the data.
        give: Function that returns a block of which this worker is the home.
    """
    if group is None or group.size == 1 or group.store is None:
        return None
    host = _find_own_address(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    return HandingOn(group.rank, group.size, PrefixStore(f"blocks/{url_tag}", group.store), give, host)


def _find_own_address(peer: str) -> str:
    """Return the address of this machine's interface towards a peer; nothing is sent."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
