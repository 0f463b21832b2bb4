"""N workers as threads of one process: for tests, and (with N = 1) for training alone."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.comm.group import DoneWork, Group, Work
from paceline.comm.streams import record, wait_in_queue
from paceline.errors import CommunicationError, MismatchError, PeerTimeoutError, SettingsError

T = TypeVar("T")


@dataclass
class _PendingOperation:
    name: str
    posted: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    finished: bool = False
    ready: dict[int, Any] = field(default_factory=dict)
    """Events of the ranks' streams, on a GPU."""
    ended: Any = None


@dataclass
class _Message:
    """One end of a message; `missing` is the rank of the other end until that has begun."""

    name: str
    tensor: Tensor
    missing: int
    finished: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when the message has ended or failed."""


class _Room:
    """State that the threads of one group share; its condition guards it."""

    def __init__(self, size: int, timeout_s: float, failure: str | None = None) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.operations: dict[int, _PendingOperation] = {}
        self.positions = ["has begun no operation"] * size
        self.failure = failure
        self.messages: dict[tuple[int, int, int, bool], deque[_Message]] = {}
        """Ends without their other end, by source, destination, tag and whether it is the sender's."""
        self.duplicates: dict[tuple[int, str], _Room] = {}
        self.subgroups: dict[tuple[tuple[int, ...], str], _Room] = {}
        """Subgroups by their ranks here and their names."""
        self.failed: set[int] = set()
        """Ranks that left with an error."""


class LocalGroup(Group):
    """One of N ranks that are threads of this process.

    Sums run in rank order, so that they are equal in every run. The failure of one thread ends all. Threads
    share torch's global random generator: workers that use it do not draw independently.
    """

    def __init__(
        self,
        rank: int = 0,
        room: _Room | None = None,
        device: torch.device | None = None,
        epoch: int = 0,
        names: Sequence[int] | None = None,
    ) -> None:
        self._room = room or _Room(1, timeout_s=60.0)
        self._sequence = 0
        self._num_duplicates = 0
        super().__init__(rank, self._room.size, device or torch.device("cpu"), epoch, names)

    @classmethod
    def create(cls, size: int, *, timeout_s: float = 60.0, epoch: int = 0) -> list["LocalGroup"]:
        """Return the `size` members of a new group, by rank."""
        room = _Room(size, timeout_s)
        return [cls(rank, room, epoch=epoch) for rank in range(size)]

    @classmethod
    def run(cls, size: int, worker: Callable[["LocalGroup"], T], *, timeout_s: float = 60.0) -> list[T]:
        """Run ``worker(group)`` in `size` threads and return what each returned, by rank.

        Raises:
            BaseException: The error of the first worker that failed.
        """
        groups = cls.create(size, timeout_s=timeout_s)
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def run_one(group: LocalGroup) -> None:
            try:
                results[group.rank] = worker(group)
            except BaseException as error:  # raised in the caller below
                errors.append(error)
                group.close(error)

        threads = [threading.Thread(target=run_one, args=(group,), daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(size)]

    def all_reduce(self, tensor: Tensor, *, name: str) -> Work:
        """Sum in rank order."""
        return self._post(name, (tensor,), _sum)

    def broadcast(self, tensor: Tensor, *, source: int = 0, name: str) -> Work:
        """Copy from `source`."""

        def copy(posted: Sequence[tuple[Tensor, ...]]) -> None:
            for rank, (target,) in enumerate(posted):
                if rank != source:
                    target.copy_(posted[source][0])

        return self._post(name, (tensor,), copy)

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """Copy every rank's tensor to all ranks."""
        if self.size == 1:
            output[0].copy_(tensor)
            return DoneWork()
        return self._post(name, (output, tensor), _gather)

    def all_to_all(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """Copy every rank's rows to their destinations."""
        if self.size == 1:
            output[0].copy_(tensor[0])
            return DoneWork()
        return self._post(name, (output, tensor), _swap_rows)

    def send(self, tensor: Tensor, destination: int, *, tag: int, name: str) -> Work:
        """Wait for the receiver, and copy to it."""
        return self._post_message(tensor, destination, tag, name, is_send=True)

    def receive(self, tensor: Tensor, source: int, *, tag: int, name: str) -> Work:
        """Wait for the sender, and copy from it."""
        return self._post_message(tensor, source, tag, name, is_send=False)

    def duplicate(self, name: str) -> "LocalGroup":
        """Return this rank's member of a new group, which fails when this one does."""
        self._num_duplicates += 1
        with self._room.changed:
            room = self._room.duplicates.setdefault(
                (self._num_duplicates, name), _Room(self.size, self._room.timeout_s, self._room.failure)
            )
        return LocalGroup(self.rank, room, self.device, self.epoch, self.names)

    def subgroup(self, ranks: Sequence[int], name: str) -> "LocalGroup":
        """Return this rank's member of a subgroup, which fails when one of its own ranks does."""
        place = self.place_in(ranks)
        with self._room.changed:
            failure = self._room.failure if self._room.failed & set(ranks) else None
            room = self._room.subgroups.setdefault(
                (tuple(ranks), self._name_subgroup(ranks, name)), _Room(len(ranks), self._room.timeout_s, failure)
            )
        return LocalGroup(place, room, self.device, self.epoch, self.names_of(ranks))

    def begin(self, name: str) -> None:
        """Record it."""
        self._room.positions[self.rank] = f"has begun {name!r}"

    def close(self, error: BaseException | None = None) -> None:
        """Leave; with an `error`, every operation of the other ranks fails."""
        with self._room.changed:
            if error is not None:
                self._room.failed.add(self.rank)
            if error is not None and self._room.failure is None:
                self._room.failure = f"rank {self.names[self.rank]} stopped: {type(error).__name__}: {error}"
            self._room.positions[self.rank] = "has left"
            self._room.changed.notify_all()
            if self._room.failure is not None:
                for waiting in self._room.messages.values():
                    for message in waiting:
                        message.ended.set()
            rooms: list[tuple[Sequence[int], _Room]] = [
                (range(self.size), room) for room in self._room.duplicates.values()
            ]
            rooms += [(ranks, room) for (ranks, _), room in self._room.subgroups.items() if self.rank in ranks]
        for ranks, room in rooms:
            LocalGroup(ranks.index(self.rank), room, self.device, self.epoch, self.names_of(ranks)).close(error)

    def _post_message(self, tensor: Tensor, peer: int, tag: int, name: str, *, is_send: bool) -> Work:
        self.check_message(peer, tag)
        source, destination = (self.rank, peer) if is_send else (peer, self.rank)
        room = self._room
        mine = _Message(name, tensor, missing=peer)
        with room.changed:
            others = room.messages.get((source, destination, tag, not is_send))
            if room.failure is not None:
                mine.ended.set()
                return _MessageWork(self, mine)
            if not others:
                room.messages.setdefault((source, destination, tag, is_send), deque()).append(mine)
                return _MessageWork(self, mine)
            other = others.popleft()
            if not others:
                del room.messages[source, destination, tag, not is_send]
            sent, received = (tensor, other.tensor) if is_send else (other.tensor, tensor)
            if (sent.dtype, sent.numel()) != (received.dtype, received.numel()):
                raise SettingsError(
                    f"message {name!r} from rank {self.names[source]} to rank {self.names[destination]} "
                    f"must be the same at both ends, but {sent.numel()} {sent.dtype} were sent for "
                    f"{received.numel()} {received.dtype}; make them agree"
                )
            received.view(-1).copy_(sent.view(-1))
            other.finished = True
            other.ended.set()
        return DoneWork()

    def _wait_for_message(self, message: _Message) -> None:
        room = self._room
        if not message.ended.wait(room.timeout_s):
            missing = self.names[message.missing]
            raise PeerTimeoutError(
                f"message {message.name!r} on rank {self.names[self.rank]} must arrive within {room.timeout_s:g} s, "
                f"but rank {missing} did not begin it: rank {missing} {room.positions[message.missing]}"
            )
        if not message.finished:
            raise CommunicationError(f"message {message.name!r} ended: {room.failure}")

    def _post(
        self,
        name: str,
        tensors: tuple[Tensor, ...],
        finish: Callable[[Sequence[tuple[Tensor, ...]]], None],
    ) -> Work:
        self._sequence += 1
        if self.size == 1:
            return DoneWork()
        room = self._room
        with room.changed:
            operation = room.operations.setdefault(self._sequence, _PendingOperation(name))
            if operation.name != name:
                raise MismatchError(
                    f"operation {self._sequence} must be the same on every rank, but rank {self.names[self.rank]} runs "
                    f"{name!r} and another {operation.name!r}; every rank must run the same operations in order"
                )
            operation.posted[self.rank] = tensors
            operation.ready[self.rank] = record(tensors[0].device)
            room.positions[self.rank] = f"has begun operation {self._sequence} {name!r}"
            if len(operation.posted) == room.size:
                for posted, ready in zip(operation.posted.values(), operation.ready.values(), strict=True):
                    wait_in_queue(posted[0].device, ready)
                finish([operation.posted[rank] for rank in range(room.size)])
                operation.ended = record(tensors[0].device)
                operation.finished = True
                del room.operations[self._sequence]
                room.changed.notify_all()
        return _LocalWork(self, operation, self._sequence)

    def _wait(self, operation: _PendingOperation, sequence: int) -> None:
        room = self._room
        deadline = time.monotonic() + room.timeout_s
        with room.changed:
            while not operation.finished:
                if room.failure is not None:
                    raise CommunicationError(f"operation {sequence} {operation.name!r} ended: {room.failure}")
                if not room.changed.wait(max(0.0, deadline - time.monotonic())):
                    raise PeerTimeoutError(self._describe_timeout(operation, sequence))
        wait_in_queue(operation.posted[self.rank][0].device, operation.ended)

    def _describe_timeout(self, operation: _PendingOperation, sequence: int) -> str:
        missing = [rank for rank in range(self.size) if rank not in operation.posted]
        places = "; ".join(f"rank {self.names[rank]} {self._room.positions[rank]}" for rank in missing)
        late = ", ".join(map(str, self.names_of(missing)))
        return (
            f"operation {sequence} {operation.name!r} must finish within {self._room.timeout_s:g} s, "
            f"but rank {late} did not begin it: {places}"
        )


class _LocalWork(Work):
    def __init__(self, group: LocalGroup, operation: _PendingOperation, sequence: int) -> None:
        self._group = group
        self._operation = operation
        self._sequence = sequence

    def wait(self) -> None:
        self._group._wait(self._operation, self._sequence)


class _MessageWork(Work):
    def __init__(self, group: LocalGroup, message: _Message) -> None:
        self._group = group
        self._message = message

    def wait(self) -> None:
        self._group._wait_for_message(self._message)


def _sum(posted: Sequence[tuple[Tensor, ...]]) -> None:
    total = posted[0][0].clone()
    for (tensor,) in posted[1:]:
        total += tensor
    for (tensor,) in posted:
        tensor.copy_(total)


def _gather(posted: Sequence[tuple[Tensor, ...]]) -> None:
    for output, _ in posted:
        for rank, (_, tensor) in enumerate(posted):
            output[rank].copy_(tensor)


def _swap_rows(posted: Sequence[tuple[Tensor, ...]]) -> None:
    for rank, (output, _) in enumerate(posted):
        for source, (_, tensor) in enumerate(posted):
            output[source].copy_(tensor[rank])
