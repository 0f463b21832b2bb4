"""The sample dispatcher of workers that go at their own pace: it runs in the process of the first worker."""

import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum

from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.progress import PROGRESS
from paceline.comm.rpc import NOTHING, RpcEndpoint, RpcHeader, RpcReply, RpcService
from paceline.errors import CommunicationError
from paceline.sync.farewells import Farewells, read_lost
from paceline.sync.synchroniser import HandedOver, SampleDispatcher

SampleRange = tuple[int, int]
"""Start and stop of positions in the global order of samples."""
_POLL_S = 0.002
_LONGEST_POLL_S = 0.05


class ClaimAnswer(IntEnum):
    """Answer to a claim."""

    TAKE = 0
    """An interval of samples."""
    WAIT = 1
    """Nothing now: all samples are handed out, and some are not used yet."""
    DONE = 2
    """Nothing more before the boundary."""


class SampleAssignments:
    """Samples of each worker, without threads or time. Samples of a lost worker are handed out again."""

    def __init__(self) -> None:
        self.claim_next: Callable[[int], SampleRange] | None = None
        """Function that returns the next positions, at most the given number."""
        self.mark_used: Callable[[int, int], None] | None = None
        """Function that is called with positions that were used."""
        self.boundary = 0
        self.is_stopping = False
        self._is_exhausted = True
        self._assigned: dict[int, list[SampleRange]] = {}
        self._returned: list[SampleRange] = []

    def set_boundary(self, position: int) -> None:
        """Hand out positions before `position`, from now on."""
        self.boundary = position
        self._is_exhausted = False
        self._returned.clear()

    def claim(self, worker: int, num_samples: int, boundary: int) -> tuple[ClaimAnswer, SampleRange]:
        """Answer a worker that knows that boundary, which may be newer than the dispatcher's."""
        if boundary != self.boundary or self.claim_next is None:
            return ClaimAnswer.WAIT, (0, 0)
        found = self._next(self.claim_next, num_samples)
        if found is not None:
            self._assigned.setdefault(worker, []).append(found)
            return ClaimAnswer.TAKE, found
        return (ClaimAnswer.WAIT if any(self._assigned.values()) else ClaimAnswer.DONE), (0, 0)

    def ack(self, worker: int, interval: SampleRange, *, is_used: bool) -> None:
        """Record that a worker has used its claim, or that it could not."""
        assert self.mark_used is not None
        self._assigned[worker].remove(interval)
        if is_used:
            self.mark_used(*interval)
        else:
            self._returned.append(interval)

    def release(self, worker: int) -> None:
        """Take back the samples of a worker that is gone."""
        self._returned += self._assigned.pop(worker, [])

    def _next(self, claim_next: Callable[[int], SampleRange], num_samples: int) -> SampleRange | None:
        if self._returned:
            start, stop = self._returned.pop(0)
            if stop - start > num_samples:
                self._returned.insert(0, (start + num_samples, stop))
            return start, min(stop, start + num_samples)
        if self._is_exhausted or self.is_stopping:
            return None
        start, stop = claim_next(num_samples)
        self._is_exhausted = stop >= self.boundary
        return (start, min(stop, self.boundary)) if start < self.boundary else None


class DispatcherClient(SampleDispatcher):
    """One worker's client of the sample dispatcher, which runs in rank 0's process. Every worker opens it.

    Args:
        group: Group of all workers.
        when_idle: Function called before this worker waits without samples while others still have some: no worker may
            wait for its next step. May be called from another thread, while no step is under way here.
        was_used: Function that returns whether the last step counted; if not, its samples are handed out again.
    """

    def __init__(
        self, group: Group, when_idle: Callable[[], None] = lambda: None, was_used: Callable[[], bool] = lambda: True
    ) -> None:
        self._service = _DispatcherService(group.size) if group.rank == 0 else None
        self._when_idle, self._was_used = when_idle, was_used
        self._endpoint = RpcEndpoint(group, [(rank, 0) for rank in range(group.size)], self._service, "dispatcher")
        self._client = self._endpoint.clients[0]
        self._boundary = 0
        self._unused: deque[SampleRange] = deque()
        """Claims that are not acknowledged, in order; one thread adds, and one removes."""
        self._is_stopping = False
        self._has_asked = False
        self._names = group.names
        self._told_lost = 0.0
        """Word of `Farewells.tell` that came first."""

    @property
    def is_stopping(self) -> bool:
        """Whether `claim` returned None because a stop was requested."""
        return self._is_stopping

    @property
    def lost(self) -> CommunicationError | None:
        """Error of a worker that is lost, once this one has heard of it by a claim or an `ack`; else None."""
        return read_lost(self._told_lost, self._names)  # a new one: raised, it holds all frames that it went through

    @property
    def present(self) -> SampleRange:
        """Positions of the present step; an empty range if it has none."""
        return self._unused[0] if self._unused else (0, 0)

    def set_source(self, claim_next: Callable[[int], SampleRange], mark_used: Callable[[int, int], None]) -> None:
        """Set the source of samples, on rank 0."""
        if self._service is not None:
            self._service.set_source(claim_next, mark_used)

    def set_boundary(self, position: int) -> None:
        """Hand out no position from `position` on."""
        self._boundary = position
        if self._service is not None:
            self._service.set_boundary(position)

    def claim(self, num_samples: int) -> SampleRange | None:
        """Return positions that no other worker has, once there are some; None where all workers come together."""
        poll_s = _POLL_S
        try:
            while True:
                header = self._call(RpcHeader(_Kind.CLAIM, start=num_samples, stop=self._boundary))
                if header.clock == ClaimAnswer.TAKE:
                    self._unused.append((header.start, header.stop))
                    return header.start, header.stop
                if header.clock == ClaimAnswer.DONE:
                    self._is_stopping = header.version > 0
                    return None
                if not self._unused:
                    self._when_idle()
                    PROGRESS.idle_since_s = PROGRESS.idle_since_s or time.monotonic()
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        finally:
            PROGRESS.idle_since_s = None

    def ack(self, interval: SampleRange) -> bool:
        """Record that claimed positions were used; False if the step did not count."""
        is_used = self._was_used()
        self._call(RpcHeader(_Kind.ACK, start=interval[0], stop=interval[1], weight=float(is_used)))
        self._unused.popleft()
        return is_used

    def ask_to_stop(self) -> None:
        """Stop handing out samples, to all workers."""
        if not self._has_asked:
            self._has_asked = True
            self._client.call(RpcHeader(_Kind.STOP))

    def hand_over(self) -> HandedOver | None:
        """Leave, since a worker is lost; on rank 0, wait until all others have left. See `Synchroniser.hand_over`."""
        if self._service is not None:
            return HandedOver(self._service.farewells.wait())
        self._client.call(RpcHeader(_Kind.LEAVE))
        return None

    def _call(self, request: RpcHeader) -> RpcHeader:
        """Send a claim or an acknowledgement, and take note of a lost worker in the reply."""
        reply, _ = self._client.call(request)
        self._told_lost = self._told_lost or reply.value
        return reply

    def close(self) -> None:
        """Leave; the dispatcher runs until all have left."""
        self._endpoint.close()


class _Kind(IntEnum):
    CLAIM = 0
    """`start`: largest number of samples; `stop`: the boundary that the worker knows."""
    ACK = 1
    """`weight` 0: they were not used."""
    STOP = 2
    LEAVE = 3
    """The worker has stopped, since another is lost."""


class _DispatcherService(RpcService):
    """Service of the dispatcher on rank 0."""

    def __init__(self, num_workers: int) -> None:
        self._assignments = SampleAssignments()
        self._lock = threading.Lock()
        self.farewells = Farewells(num_workers)

    def set_source(self, claim_next: Callable[[int], SampleRange], mark_used: Callable[[int, int], None]) -> None:
        with self._lock:
            self._assignments.claim_next, self._assignments.mark_used = claim_next, mark_used

    def set_boundary(self, position: int) -> None:
        with self._lock:
            self._assignments.set_boundary(position)

    def handle(self, caller: int, header: RpcHeader, body: Tensor) -> Callable[[], RpcReply]:
        with self._lock:
            reply = self._answer(caller, header)
        return lambda: (reply, NOTHING)

    def drop_caller(self, caller: int, error: BaseException | None) -> None:
        with self._lock:
            self._assignments.release(caller)
            if error is not None:
                self.farewells.lose(caller, error)

    def _answer(self, caller: int, header: RpcHeader) -> RpcHeader:
        assignments = self._assignments
        answer, interval = ClaimAnswer.DONE, (0, 0)
        if header.kind == _Kind.CLAIM and self.farewells.is_complete:
            answer, interval = assignments.claim(caller, header.start, header.stop)
        elif header.kind == _Kind.ACK:
            assignments.ack(caller, (header.start, header.stop), is_used=header.weight > 0)
        elif header.kind == _Kind.LEAVE:
            self.farewells.leave(caller)
        elif header.kind == _Kind.STOP:
            assignments.is_stopping = True
        return RpcHeader(header.kind, answer, assignments.is_stopping, *interval, value=self.farewells.tell())
