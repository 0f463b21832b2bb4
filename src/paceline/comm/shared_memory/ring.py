"""A ring of slots through which ranks show each other data, step by step: each posts, and reads when all have posted.

A ring is used by one thread, in the same order on every rank. To post is to fill one's own slot of the step and to
count one's word up; nobody has to wait for that, and it is all that the others need. A step is finished when all have
posted it and this rank has read it. Before a rank posts a step it finishes the one half a ring before. So no count of
readers is needed: who posts step s + ring, into the slot of s, has seen everybody post s + ring/2; and before they did
they had finished s. They may even have read s later than that, in filling their slots of the steps up to s + ring/2.
"""

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.comm.group import Work
from paceline.comm.shared_memory import futex
from paceline.comm.shared_memory.flight_recorder import FlightRecorder, Operation

_WORD = 2**32
_SIGN = 2**31
# The others are often some microseconds away, and to sleep and be woken takes fifty. So first give way to whoever
# else wants the core, a few times: about 10 us. Small sums of two ranks take a third of the time then.
_NUM_YIELDS = 20

Fill = Callable[[int], None]
"""Writes this rank's data into its part of the slot given."""
Read = Callable[[int], None]
"""Reads everybody's data of the slot given."""


class SharedRing:
    """This rank's end of a ring.

    Args:
        number: Which of the recorder's rings it is.
        recorder: Holds the words that count steps, and knows who lives.
        memory: The whole segment, uint8.
        first: Where the slots begin in it.
        num_slots: Steps of the ring.
        slot_bytes: Bytes of one rank in one step.
        is_callers_thread: Whether it is the thread of the group's user that waits in it.
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
        """Show the others what `fill` writes; `read` will read what they show."""
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

    def wake_others(self) -> None:
        """Let those who wait for this rank look what has become of it."""
        futex.wake(self._recorder.address + 4 * self._mine)

    def address(self, slot: int, rank: int | None = None) -> int:
        """Return where a rank's part of a slot begins, by default this rank's."""
        rank = self._recorder.rank if rank is None else rank
        return self._first_address + (slot * self._recorder.size + rank) * self.slot_bytes

    def rows(self, slot: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return everybody's slots as tensors of `dtype`, by rank."""
        if dtype not in self._rows:
            typed = self._slots.view(dtype)
            self._rows[dtype] = [typed[number].unbind(0) for number in range(self._num_slots)]
        return self._rows[dtype][slot]

    def _finish_oldest(self) -> None:
        step = self._pending[0]
        for _, word in self._others:
            if (self._words[word] - step.number) & _SIGN:
                self._wait_for(word, step)
        futex.fence()
        self._recorder.check_same(step.operation)
        if step.read is not None:
            step.read(step.slot)
        self._pending.popleft()
        step.is_done = True
        step.read = None  # what it held may go now

    def _wait_for(self, word: int, step: "RingStep") -> None:
        """Sleep until the rank whose word it is has posted the step."""
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
    """What was posted to a ring, and is finished where it is waited for."""

    def __init__(self, ring: SharedRing, number: int, operation: Operation, slot: int, read: Read | None) -> None:
        self.number = number
        self.operation = operation
        self.slot = slot
        self.read = read
        self.is_done = False
        self._ring = ring

    def wait(self) -> None:
        """Finish it and the steps before it."""
        self._ring.finish(self)
