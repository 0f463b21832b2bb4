"""The desk where workers that go at their own pace get samples: it stands beside the first of them."""

import threading
import time
from collections.abc import Callable
from enum import IntEnum

from torch import Tensor

from paceline.comm.exchange import NOTHING, Exchange, Header, Reply, Service
from paceline.comm.group import Group
from paceline.sync.synchroniser import Desk

Interval = tuple[int, int]
"""Start and stop of positions in the global order of samples."""
_POLL_S = 0.002
_LONGEST_POLL_S = 0.05


class Answer(IntEnum):
    """What a claim gets."""

    TAKE = 0
    """An interval."""
    WAIT = 1
    """Nothing now: all is handed out, and not yet used."""
    DONE = 2
    """Nothing more before the boundary."""


class Handout:
    """Who has which samples, without threads or time. What a worker had that is gone is handed out again."""

    def __init__(self) -> None:
        self.take: Callable[[int], Interval] | None = None
        """Returns the next positions, at most so many."""
        self.note: Callable[[int, int], None] | None = None
        """Learns which positions were used."""
        self.boundary = 0
        self.is_stopping = False
        self._is_exhausted = True
        self._out: dict[int, list[Interval]] = {}
        self._returned: list[Interval] = []

    def set_boundary(self, position: int) -> None:
        """Hand out what is before `position`, from now on."""
        self.boundary = position
        self._is_exhausted = False
        self._returned.clear()

    def claim(self, worker: int, num_samples: int, boundary: int) -> tuple[Answer, Interval]:
        """Answer a worker that knows of that boundary: it may have heard of it before this desk has."""
        if boundary != self.boundary or self.take is None:
            return Answer.WAIT, (0, 0)
        found = self._next(self.take, num_samples)
        if found is not None:
            self._out.setdefault(worker, []).append(found)
            return Answer.TAKE, found
        return (Answer.WAIT if any(self._out.values()) else Answer.DONE), (0, 0)

    def ack(self, worker: int, interval: Interval, *, is_used: bool) -> None:
        """Note that a worker has used what it claimed, or that it could not."""
        assert self.note is not None
        self._out[worker].remove(interval)
        if is_used:
            self.note(*interval)
        else:
            self._returned.append(interval)

    def lose(self, worker: int) -> None:
        """Take back what a worker had."""
        self._returned += self._out.pop(worker, [])

    def _next(self, take: Callable[[int], Interval], num_samples: int) -> Interval | None:
        if self._returned:
            start, stop = self._returned.pop(0)
            if stop - start > num_samples:
                self._returned.insert(0, (start + num_samples, stop))
            return start, min(stop, start + num_samples)
        if self._is_exhausted or self.is_stopping:
            return None
        start, stop = take(num_samples)
        self._is_exhausted = stop >= self.boundary
        return (start, min(stop, self.boundary)) if start < self.boundary else None


class SampleDesk(Desk):
    """One worker's way to the desk; that of rank 0 stands in its process. Every worker opens it.

    Args:
        group: All workers.
        when_idle: Called when this worker has nothing to do while others still have, before it waits: nobody may
            wait for its next step. May be called from another thread, while no step is under way here.
        was_used: Returns whether the last step has counted; if not, its samples are handed out again.
    """

    def __init__(
        self, group: Group, when_idle: Callable[[], None] = lambda: None, was_used: Callable[[], bool] = lambda: True
    ) -> None:
        self._service = _DeskService() if group.rank == 0 else None
        self._when_idle, self._was_used = when_idle, was_used
        self._exchange = Exchange(group, [(rank, 0) for rank in range(group.size)], self._service, "desk")
        self._port = self._exchange.ports[0]
        self._boundary = 0
        # Each is counted by one thread only.
        self._num_claimed = self._num_acknowledged = 0
        self._is_stopping = False
        self._has_asked = False

    @property
    def is_stopping(self) -> bool:
        """Whether, after `claim` has returned None, it is because somebody was asked to stop."""
        return self._is_stopping

    def hand_out(self, take: Callable[[int], Interval], note: Callable[[int, int], None]) -> None:
        """Say on rank 0 where samples come from."""
        if self._service is not None:
            self._service.hand_out(take, note)

    def set_boundary(self, position: int) -> None:
        """Hand out nothing at or after `position`."""
        self._boundary = position
        if self._service is not None:
            self._service.set_boundary(position)

    def claim(self, num_samples: int) -> Interval | None:
        """Return positions that nobody else has, once there are some; None where all come together."""
        poll_s = _POLL_S
        while True:
            header, _ = self._port.call(Header(_Kind.CLAIM, start=num_samples, stop=self._boundary))
            if header.clock == Answer.TAKE:
                self._num_claimed += 1
                return header.start, header.stop
            if header.clock == Answer.DONE:
                self._is_stopping = header.version > 0
                return None
            if self._num_claimed == self._num_acknowledged:
                self._when_idle()
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    def ack(self, interval: Interval) -> bool:
        """Note that claimed positions were used; False if the step did not count."""
        is_used = self._was_used()
        self._port.call(Header(_Kind.ACK, start=interval[0], stop=interval[1], mass=float(is_used)))
        self._num_acknowledged += 1
        return is_used

    def ask_to_stop(self) -> None:
        """Let nothing new be handed out to anybody."""
        if not self._has_asked:
            self._has_asked = True
            self._port.call(Header(_Kind.STOP))

    def close(self) -> None:
        """Leave; the desk itself stays until all have left."""
        self._exchange.close()


class _Kind(IntEnum):
    CLAIM = 0
    """`start`: at most so many; `stop`: the boundary that the worker knows of."""
    ACK = 1
    """`mass` 0: they were not used."""
    STOP = 2


class _DeskService(Service):
    """The desk itself."""

    def __init__(self) -> None:
        self._handout = Handout()
        self._lock = threading.Lock()

    def hand_out(self, take: Callable[[int], Interval], note: Callable[[int, int], None]) -> None:
        with self._lock:
            self._handout.take, self._handout.note = take, note

    def set_boundary(self, position: int) -> None:
        with self._lock:
            self._handout.set_boundary(position)

    def take(self, caller: int, header: Header, body: Tensor) -> Callable[[], Reply]:
        with self._lock:
            reply = self._answer(caller, header)
        return lambda: (reply, NOTHING)

    def lose(self, caller: int, error: BaseException | None) -> None:
        with self._lock:
            self._handout.lose(caller)

    def _answer(self, caller: int, header: Header) -> Header:
        handout = self._handout
        answer, interval = Answer.DONE, (0, 0)
        if header.kind == _Kind.CLAIM:
            answer, interval = handout.claim(caller, header.start, header.stop)
        elif header.kind == _Kind.ACK:
            handout.ack(caller, (header.start, header.stop), is_used=header.mass > 0)
        else:
            handout.is_stopping = True
        return Header(header.kind, answer, handout.is_stopping, *interval)
