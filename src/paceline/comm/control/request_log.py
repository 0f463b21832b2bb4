"""Log of the requests that changed the keys of a control server, from which another server goes on after its death.

Each request is in the file before its reply is sent. It is not flushed to the disk: what the process wrote outlives the
process, and with the machine die the workers that would need it. Once the file is long, it is begun anew with requests
that lead to the present keys.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.comm.control.errors import ControlError
from paceline.comm.control.frames import Message
from paceline.comm.control.key_values import KeyValues

_MAX_BYTES = 8 * 1024 * 1024


class RequestLog:
    """Open log of a server, whose file only its user can read.

    Where the disk is full the file is removed: the server serves on, and cannot be replaced.

    Args:
        path: File, in place of any that is there.
        key_values: Keys and values at the beginning; their changes are logged from now on.
        max_bytes: Length at which the file is begun anew, unless the present keys are longer.
        tell_lost: Function that is told, in words, if the log could not be written.
    """

    def __init__(
        self,
        path: Path,
        key_values: KeyValues,
        *,
        max_bytes: int = _MAX_BYTES,
        tell_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path, self._key_values, self._max_bytes, self._tell_lost = path, key_values, max_bytes, tell_lost
        self._descriptor = -1
        self._num_bytes = self._limit_bytes = 0
        key_values.note = self._note
        self._guarded(self._begin)

    def close(self) -> None:
        """Remove the file, unless it is another server's: this one has ended, and nobody goes on from there."""
        if self._descriptor >= 0:
            if self._is_own:
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def _is_own(self) -> bool:
        """Whether no other server has put a file in place of this one's."""
        try:
            return self._path.stat().st_ino == os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            return False

    def _note(self, message: Message) -> None:
        if self._descriptor >= 0:
            self._guarded(lambda: self._append(message))

    def _append(self, message: Message) -> None:
        if self._num_bytes >= self._limit_bytes and self._is_own:
            self._begin()  # with what the message has changed
        else:
            self._num_bytes += _write(self._descriptor, [message])

    def _begin(self) -> None:
        """Write a new file, and put it in place of the old one once it is whole."""
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            self._num_bytes = _write(descriptor, self._key_values.list_requests())
            new.replace(self._path)
        except BaseException:
            os.close(descriptor)
            new.unlink(missing_ok=True)
            raise
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._limit_bytes = descriptor, max(self._max_bytes, 2 * self._num_bytes)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            with contextlib.suppress(OSError):
                self.close()
            self._tell_lost(f"{self._path} could not be written, so nobody could go on for the launcher: {error}")


def read_requests(path: Path) -> KeyValues | None:
    """Return the keys and values of the server that wrote a log; None if there is none, or it is damaged.

    A last line that was cut off is left out: no reply to it was sent.
    """
    key_values = KeyValues()
    try:
        for message in _read(path):
            key_values.repeat(message)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, ControlError):
        return None
    return key_values


def _read(path: Path) -> Iterator[Message]:
    *lines, _ = path.read_bytes().split(b"\n")
    for line in lines:
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"a line of {path} must hold a request, but holds {message!r}")
        yield message


def _write(descriptor: int, messages: list[Message]) -> int:
    data = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
    num_bytes = 0
    while num_bytes < len(data):
        num_bytes += os.write(descriptor, data[num_bytes:])
    return num_bytes
