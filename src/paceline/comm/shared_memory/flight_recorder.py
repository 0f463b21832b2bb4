"""Flight recorder in shared memory: the operations that each rank has begun, where it waits, and whether it lives.

A rank lives as long as it holds a lock on its byte of the segment's file. The kernel releases the lock when the
process ends, however it ends. (A socket would not do: it stays open in the children that a data loader has forked.)
"""

import fcntl
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from paceline.comm.heartbeat import HeartbeatBoard, describe_ranks
from paceline.comm.heartbeat_record import FINISHED, Heartbeat
from paceline.comm.progress import PROGRESS
from paceline.comm.shared_memory.futex import fence
from paceline.errors import CommunicationError, MismatchError, PacelineError, PeerTimeoutError

NUM_ENTRIES = 512
"""Number of operations whose entries are kept."""
MAX_AHEAD = NUM_ENTRIES // 2
"""An operation may begin when the one this many before it is finished; entries live until all ranks have read them.

Beginning operation s + NUM_ENTRIES overwrites the entry of s. That requires that s + MAX_AHEAD is finished here, so
that all ranks have begun it, and so have finished s, and read the entries of s.
"""
_ENTRY_BYTES = 192
_NAME_BYTES = 96
_HEADER_BYTES = 1024
BLOCK_BYTES = _HEADER_BYTES + NUM_ENTRIES * _ENTRY_BYTES
"""Bytes of shared memory per rank."""

# Offsets in the header: words of 4 bytes (those that other ranks wait on have their own cache line), then text.
_RING, _RING_STRIDE = 0, 16
_BEGUN, _WAITING, _LEFT, _PID = 32, 33, 34, 35
_WAITING_SINCE = 18  # in words of 8 bytes
_HOST, _HOST_BYTES = 256, 128
_LAST_WORDS, _LAST_WORDS_BYTES = 384, 640

_ENTRY = struct.Struct("<IHH")
_LOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_WORD = 2**32


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that a rank has begun; `entry` is its record, which must be the same on every rank."""

    sequence: int
    name: str
    entry: bytes


class FlightRecorder:
    """Blocks of all ranks at the beginning of a shared segment.

    Args:
        memory: The segment.
        address: Address of the segment's first byte.
        descriptor: File descriptor of the segment, for the locks; the caller owns it until `own_descriptor`.
        rank: Rank of this process.
        names: Number of each rank in errors.
        timeout_s: Longest time to wait for other ranks.
    """

    def __init__(
        self, memory: memoryview, address: int, descriptor: int, rank: int, names: Sequence[int], timeout_s: float
    ) -> None:
        self.rank = rank
        self.names = names
        self.size = len(names)
        self.others = [other for other in range(self.size) if other != rank]
        self.timeout_s = timeout_s
        self.failure: PacelineError | None = None
        self.board: HeartbeatBoard | None = None
        """Heartbeats of the same ranks, which watch them while this one waits."""
        self._memory = memory
        self.address = address
        self._descriptor = descriptor
        self.words = memory.cast("I")
        self._doubles = memory.cast("d")
        self._block = rank * BLOCK_BYTES
        self._sequence = 0
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self.words[self._block // 4 + _PID] = os.getpid()
        self._write_text(_HOST, _HOST_BYTES, socket.gethostname())

    def own_descriptor(self) -> None:
        """Close the descriptor with this recorder, nowhere else: closing any descriptor of a file drops its locks."""
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    def ring_word(self, rank: int, ring: int) -> int:
        """Return the index of the 4-byte word in which `rank` counts its steps in a ring."""
        return rank * BLOCK_BYTES // 4 + _RING + ring * _RING_STRIDE

    def begin(self, name: str, details: str) -> Operation:
        """Record that this rank begins its next operation."""
        if self.failure is not None:
            raise self.failure
        self._sequence = sequence = (self._sequence + 1) % _WORD
        called, what = name.encode()[:_NAME_BYTES], details.encode()[: _ENTRY_BYTES - _NAME_BYTES - _ENTRY.size]
        entry = _ENTRY.pack(sequence, len(called), len(what)) + called + what
        place = self._entry_place(self.rank, sequence)
        self._memory[place : place + len(entry)] = entry
        fence()
        self.words[self._block // 4 + _BEGUN] = sequence
        return Operation(sequence, name, entry)

    def wait_in(self, sequence: int) -> None:
        """Record the operation that this rank waits in; 0 when it no longer waits."""
        self._doubles[self._block // 8 + _WAITING_SINCE] = time.monotonic()
        self.words[self._block // 4 + _WAITING] = sequence
        if sequence:
            PROGRESS.waits[id(self)] = sequence
        else:
            PROGRESS.waits.pop(id(self), None)
        if self.board is not None:
            self.board.waiting_outside = sequence

    def describe_last(self) -> str:
        """Return the words in errors for the operation that this rank has begun last."""
        name, _ = self._read_entry(self.rank, self._sequence)
        return f"operation {self._sequence} {name!r} on rank {self.names[self.rank]}"

    def leave(self, last_words: str = "") -> None:
        """Record that this rank does nothing any more; the `last_words` of the first call count."""
        if not self.words[self._block // 4 + _LEFT]:
            self._write_text(_LAST_WORDS, _LAST_WORDS_BYTES, last_words or FINISHED)
            fence()
            self.words[self._block // 4 + _LEFT] = 1
        PROGRESS.waits.pop(id(self), None)

    def check_same(self, operation: Operation) -> None:
        """Compare the operation of all ranks, once all have begun it.

        Raises:
            MismatchError: Ranks run different operations; the message names them.
        """
        for other in self.others:
            place = self._entry_place(other, operation.sequence)
            if bytes(self._memory[place : place + len(operation.entry)]) != operation.entry:
                self._raise_mismatch(operation)

    def check_peers(self, operation: Operation, began_s: float, find_late: Callable[[], list[int]]) -> None:
        """Check that the ranks that `operation` waits for can still come; called now and then while waiting.

        Raises:
            PeerTimeoutError: The others did not come in time.
            CommunicationError: One of them is dead or has left.
            MismatchError: One of them runs another operation.
        """
        if self.failure is not None:
            raise self.failure
        if any(self._runs_another(other, operation) for other in self.others):
            self._raise_mismatch(operation)
        gone = {other for other in self.others if self._has_left(other) or self.find_process(other) is None}
        fence()  # a rank that left may have done its part just before
        late = find_late()
        where = f"operation {operation.sequence} {operation.name!r} on rank {self.names[self.rank]}"
        if gone.intersection(late):
            self._fail(CommunicationError(f"{where} lost its peers: {self.describe_others(operation.sequence)}"))
        if late and time.monotonic() - began_s >= self.timeout_s:
            others = self.describe_others(operation.sequence)
            self._fail(PeerTimeoutError(f"{where} must finish within {self.timeout_s:g} s, but did not: {others}"))

    def describe_others(self, sequence: int) -> str:
        """Return a description of where each other rank is, those that hold up operation `sequence` first."""
        return describe_ranks({self.names[other]: self._read_heartbeat(other) for other in self.others}, sequence)

    def find_process(self, rank: int) -> int | None:
        """Return the process id of `rank`, 0 if it is invisible from here, or None if the process is gone."""
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind, _, _, _, pid = _LOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else max(pid, 0)

    def _fail(self, error: PacelineError) -> NoReturn:
        self.failure = error
        raise error

    def _raise_mismatch(self, operation: Operation) -> NoReturn:
        runs = []
        for rank, called in enumerate(self.names):
            name, what = self._read_entry(rank, operation.sequence)
            runs.append(f"rank {called} runs {name!r} ({what})" if what else f"rank {called} has not begun it")
        self._fail(
            MismatchError(
                f"operation {operation.sequence} must be the same on every rank, but {', '.join(runs)}; "
                "every rank must run the same operations in the same order"
            )
        )

    def _runs_another(self, rank: int, operation: Operation) -> bool:
        place = self._entry_place(rank, operation.sequence)
        begun = self.words[rank * BLOCK_BYTES // 4 + _BEGUN]
        fence()
        entry = bytes(self._memory[place : place + len(operation.entry)])
        has_begun = (begun - operation.sequence) % _WORD < NUM_ENTRIES
        return has_begun and entry[:4] == operation.entry[:4] and entry != operation.entry

    def _has_left(self, rank: int) -> bool:
        return bool(self.words[rank * BLOCK_BYTES // 4 + _LEFT])

    def _entry_place(self, rank: int, sequence: int) -> int:
        return rank * BLOCK_BYTES + _HEADER_BYTES + sequence % NUM_ENTRIES * _ENTRY_BYTES

    def _read_entry(self, rank: int, sequence: int) -> tuple[str, str]:
        """Return name and details of a rank's operation; empty if the rank has not begun it, or long ago."""
        place = self._entry_place(rank, sequence)
        found, name_length, what_length = _ENTRY.unpack(self._memory[place : place + _ENTRY.size])
        if found != sequence:
            return "", ""
        place += _ENTRY.size
        text = bytes(self._memory[place : place + name_length + what_length])
        return text[:name_length].decode(errors="replace"), text[name_length:].decode(errors="replace")

    def _read_heartbeat(self, rank: int) -> tuple[Heartbeat | None, Heartbeat | None]:
        """Return a rank's heartbeat twice, the second time with a later beat if the rank lives."""
        block = rank * BLOCK_BYTES // 4
        begun, waiting = self.words[block + _BEGUN], self.words[block + _WAITING]
        waited_s = time.monotonic() - self._doubles[block // 2 + _WAITING_SINCE] if waiting else 0.0
        here = Heartbeat(
            host=self._read_text(rank, _HOST),
            pid=self.words[block + _PID],
            begun=begun,
            begun_name=self._read_entry(rank, begun)[0],
            waiting=waiting,
            waiting_since_s=round(waited_s, 1),
            last_words=self._read_text(rank, _LAST_WORDS) if self._has_left(rank) else "",
        )
        pid = self.find_process(rank)
        lives = pid is not None and not _is_frozen(pid)
        return here, replace(here, beat=here.beat + int(lives))

    def _write_text(self, offset: int, num_bytes: int, text: str) -> None:
        encoded = text.encode()[: num_bytes - 2]
        place = self._block + offset
        self._memory[place : place + 2 + len(encoded)] = struct.pack("<H", len(encoded)) + encoded

    def _read_text(self, rank: int, offset: int) -> str:
        place = rank * BLOCK_BYTES + offset
        (length,) = struct.unpack("<H", self._memory[place : place + 2])
        return bytes(self._memory[place + 2 : place + 2 + length]).decode(errors="replace")


def _is_frozen(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP; False if its state is invisible."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state in (b"T", b"t")
