"""How ranks of one host find each other, and pass anonymous memory from one to the others.

They find each other over a store, and rank 0 passes descriptors over sockets. The sockets have abstract names, which
belong to the network namespace and vanish with the process. A rank that connects must know a token from the store.
"""

import contextlib
import hmac
import json
import os
import platform
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from paceline.comm.control.errors import EpochBrokenError, EpochOverError
from paceline.comm.progress import PROGRESS
from paceline.comm.shared_memory import futex, segment
from paceline.errors import CommunicationError, SettingsError

_HELLO = struct.Struct("<32sI")
_HANDSHAKE_S = 10.0
_POLL_S = 0.1


class SharedMemoryError(SettingsError):
    """The ranks of a host cannot share memory; the message says which of them, and why."""


def host_key() -> str:
    """Return a key that is equal for all processes that can share memory: same boot, same network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        network = os.stat("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()
    return f"{boot} {network.st_dev}:{network.st_ino}"


def find_obstacle() -> str | None:
    """Return why this process cannot share memory, or None if it can."""
    if not futex.is_supported():
        return f"{platform.system()} on {platform.machine()} has no futexes that Paceline knows"
    try:
        descriptor = segment.create(segment.PAGE_BYTES)
        try:
            segment.reserve(descriptor, 0, segment.PAGE_BYTES)
            memory = segment.Segment(descriptor, segment.PAGE_BYTES)
        finally:
            os.close(descriptor)
        futex.wait(memory.address, 1)  # the word is 0, so it returns at once
    except OSError as error:
        return str(error)
    return None


def exchange_documents(
    store: Store, rank: int, size: int, document: Any, timeout_s: float, names: Sequence[int] | None = None
) -> list[Any]:
    """Return the JSON documents of all ranks, by rank; each store is used once.

    Args:
        store: Store for the documents.
        rank: Rank of this process.
        size: Number of ranks.
        document: Document of this rank.
        timeout_s: Longest time to wait for the others.
        names: Number of each rank in errors.

    Raises:
        CommunicationError: Some rank did not post its own in time, or is known to be lost.
    """
    names = names or range(size)
    store.set(str(rank), json.dumps(document))
    keys = [str(other) for other in range(size)]
    try:
        with PROGRESS.connecting([name for name in names if name != names[rank]]):
            store.wait(keys, timedelta(seconds=timeout_s))
    except (EpochBrokenError, EpochOverError):
        raise
    except RuntimeError as error:
        missing = [names[other] for other in range(size) if not store.check([str(other)])]
        raise CommunicationError(
            f"all {size} ranks must connect within {timeout_s:g} s, but {', '.join(map(str, missing))} did not; "
            "check that they were started and still run"
        ) from error
    return [json.loads(text) for text in store.multi_get(keys)]


def raise_together(reasons: Sequence[str | None]) -> None:
    """Raise `SharedMemoryError` on every rank if some rank has a reason."""
    failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if failed:
        raise SharedMemoryError(
            f"ranks of one host must be able to share memory, but some cannot ({'; '.join(failed)}); "
            "free the memory that is short, or use join(transport='network')"
        )


class Hub:
    """Sockets between rank 0 and every other rank, for passing descriptors.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._sockets: dict[int, socket.socket] = {}
        self._token = os.urandom(16).hex()
        self._listener: socket.socket | None = None

    def open(self) -> dict[str, str]:
        """Listen, on rank 0, and return the address for `connect`."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"paceline-{os.urandom(16).hex()}"
        self._listener.bind(f"\0{name}")
        self._listener.listen(self._size)
        return {"name": name, "token": self._token}

    def connect(self, address: dict[str, str], check: Callable[[], None] = lambda: None) -> None:
        """Connect to rank 0; on rank 0 itself, wait for all others.

        Args:
            address: Address of rank 0.
            check: Function called now and then while waiting; raises an error if one of them can no longer come.

        Raises:
            OSError: Some rank could not be reached.
        """
        if self._rank != 0:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._sockets[0] = connection
            connection.connect(f"\0{address['name']}")
            connection.send(_HELLO.pack(address["token"].encode(), self._rank))
            return
        assert self._listener is not None
        deadline_s = time.monotonic() + _HANDSHAKE_S
        while len(self._sockets) < self._size - 1:
            self._listener.settimeout(_POLL_S)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                check()
                if time.monotonic() > deadline_s:
                    raise
                continue
            connection.settimeout(max(0.01, deadline_s - time.monotonic()))
            token, rank = _HELLO.unpack(connection.recv(_HELLO.size).ljust(_HELLO.size, b"\0"))
            if hmac.compare_digest(token, self._token.encode()):
                connection.settimeout(None)
                self._sockets[rank] = connection
            else:
                connection.close()  # a stranger
        self._listener.close()

    def share(self, descriptor: int | None, timeout_s: float, check: Callable[[], None] = lambda: None) -> int:
        """Return rank 0's `descriptor` on every rank. The others pass None and own the one that they get.

        Args:
            descriptor: Descriptor to share, on rank 0.
            timeout_s: Longest time to wait for rank 0.
            check: Function called now and then while waiting; raises an error if rank 0 can no longer come.

        Raises:
            OSError: The descriptor could not be passed.
        """
        if descriptor is not None:
            for connection in self._sockets.values():
                socket.send_fds(connection, [b"\0"], [descriptor])
            return descriptor
        deadline_s = time.monotonic() + timeout_s
        self._sockets[0].settimeout(_POLL_S)
        while True:
            try:
                _, received, _, _ = socket.recv_fds(self._sockets[0], 1, 1)
            except TimeoutError:
                check()
                if time.monotonic() > deadline_s:
                    raise
                continue
            if not received:
                raise ConnectionResetError("rank 0 is gone, or this process has no file descriptor free")
            os.set_inheritable(received[0], False)
            return received[0]

    def close(self) -> None:
        """Close all sockets."""
        for connection in (self._listener, *self._sockets.values()):
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.close()
