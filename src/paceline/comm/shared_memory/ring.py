"""A ring of slots through which ranks exchange data, step by step: each posts, and reads when all have posted.

One thread uses a ring, in the same order on every rank. To post is to fill one's own slot of the step and to
increment one's own word; that needs no waiting, and it is all that the others need. A step is finished when all ranks
have posted it and this rank has read it. Before a rank posts a step it finishes the one half a ring before. So no count
of readers is needed: a rank that posts step s + ring, into the slot of s, has seen all ranks post s + ring/2; and
before they did they had finished s. They may even have read s later than that, to fill their slots up to s + ring/2.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.comm.group import Work
from paceline.comm.shared_memory import futex
from paceline.comm.shared_memory.flight_recorder import FlightRecorder, Operation
from paceline.errors import CommunicationError

_WORD = 2**32
_SIGN = 2**31
# The others are often only some microseconds late, and to sleep and be woken takes fifty. So first let other threads
# have the core a few times, about 10 us. Small sums of two ranks take a third of the time then.
_NUM_YIELDS = 20

Fill = Callable[[int], None]
"""Function that writes this rank's data into its part of a slot."""
Read = Callable[[int], None]
"""Function that reads all ranks' data of a slot."""


class SharedRing:
    """This rank's end of a ring.

    Args:
        number: Number of the ring in the recorder.
        recorder: Flight recorder: holds the words that count steps, and knows which ranks live.
        memory: The whole segment, uint8.
        first: Offset of the slots in the segment.
        num_slots: Steps of the ring.
        slot_bytes: Bytes of one rank in one step.
        is_callers_thread: Whether the thread of the group's user waits in the ring.
    """

    def __init__(
        self,
        number: int,
        recorder: FlightRecorder,
        memory: Tensor,
        *,
        first: int,
        num_slots: int,
        slot_bytes: int,
        is_callers_thread: bool,
    ) -> None:
        self.slot_bytes = slot_bytes
        self._recorder = recorder
        self._is_callers = is_callers_thread
        shape = num_slots, recorder.size, slot_bytes
        self._slots = memory[first : first + num_slots * recorder.size * slot_bytes].view(shape)
        self._rows: dict[torch.dtype, list[tuple[Tensor, ...]]] = {}
        self._first_address = self._slots.data_ptr()
        self._words = recorder.words
        self._mine = recorder.ring_word(recorder.rank, number)
        self._others = [(rank, recorder.ring_word(rank, number)) for rank in recorder.others]
        self._num_slots = num_slots
        self._posted = 0
        self._pending: deque[RingStep] = deque()

    def post(self, operation: Operation, fill: Fill | None, read: Read | None) -> "RingStep":
        """Show the other ranks the data that `fill` writes; `read` will read theirs."""
        while len(self._pending) >= self._num_slots // 2:
            self._finish_oldest()
        slot = self._posted % self._num_slots
        if fill is not None:
            fill(slot)
        self._posted += 1
        futex.fence()
        self._words[self._mine] = self._posted % _WORD
        futex.wake(self._recorder.address + 4 * self._mine)
        step = RingStep(self, self._posted, operation, slot, read)
        self._pending.append(step)
        return step

    def finish(self, step: "RingStep") -> None:
        """Finish all steps up to this one."""
        while not step.is_done:
            self._finish_oldest()

    def abandon(self) -> None:
        """Forget steps that will never end: they and the ring hold each other. Who waits for one gets the failure."""
        self._pending.clear()

    def wake_others(self) -> None:
        """Wake the ranks that wait for this one, so that they check its state."""
        futex.wake(self._recorder.address + 4 * self._mine)

    def address(self, slot: int, rank: int | None = None) -> int:
        """Return the address of a rank's part of a slot, by default this rank's."""
        rank = self._recorder.rank if rank is None else rank
        return self._first_address + (slot * self._recorder.size + rank) * self.slot_bytes

    def rows(self, slot: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the slots of all ranks as tensors of `dtype`, by rank."""
        if dtype not in self._rows:
            typed = self._slots.view(dtype)
            self._rows[dtype] = [typed[number].unbind(0) for number in range(self._num_slots)]
        return self._rows[dtype][slot]

    def _finish_oldest(self) -> None:
        try:
            step = self._pending[0]
        except IndexError:  # abandoned
            raise self._recorder.failure or CommunicationError("the group must be open, but it is closed") from None
        for _, word in self._others:
            if (self._words[word] - step.number) & _SIGN:
                self._wait_for(word, step)
        futex.fence()
        self._recorder.check_same(step.operation)
        if step.read is not None:
            step.read(step.slot)
        with contextlib.suppress(IndexError):  # abandoned just now
            self._pending.popleft()
        step.is_done = True
        step.read = None  # frees what the closure holds

    def _wait_for(self, word: int, step: "RingStep") -> None:
        """Sleep until the rank with this word has posted the step."""
        for _ in range(_NUM_YIELDS):
            futex.give_way()
            if not (self._words[word] - step.number) & _SIGN:
                return
        began_s = time.monotonic()
        address = self._recorder.address + 4 * word
        if self._is_callers:
            self._recorder.wait_in(step.operation.sequence)
        while ((seen := self._words[word]) - step.number) & _SIGN:
            futex.wait(address, seen)
            if self._words[word] == seen:
                self._recorder.check_peers(step.operation, began_s, lambda: self._find_late(step))
        if self._is_callers:
            self._recorder.wait_in(0)

    def _find_late(self, step: "RingStep") -> list[int]:
        return [rank for rank, word in self._others if (self._words[word] - step.number) & _SIGN]


class RingStep(Work):
    """A step posted to a ring; the thread that waits for it finishes it."""

    def __init__(self, ring: SharedRing, number: int, operation: Operation, slot: int, read: Read | None) -> None:
        self.number = number
        self.operation = operation
        self.slot = slot
        self.read = read
        self.is_done = False
        self._ring = ring

    def wait(self) -> None:
        """Finish this step and those before it."""
        self._ring.finish(self)
