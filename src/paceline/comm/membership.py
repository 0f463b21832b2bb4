"""What belongs to workers that train together, from joining to leaving: requests to stop, and what must be closed."""

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from paceline.errors import SettingsError

PREEMPTED = os.EX_TEMPFAIL
"""Exit code (75) of a worker that a signal stopped: a new start goes on from the checkpoint."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Membership:
    """This worker's part in a group that trains together.

    A group is immutable; when workers die or join there is a new one, and with it a new membership. What is made for a
    group (replicas, loaders, savers) is closed with its membership; what outlives it (model, optimizer, log, store of
    checkpoints) is not in it.
    """

    def __init__(self) -> None:
        self.stop_requested_by = ""
        """What asked this worker to stop, such as SIGTERM; the other workers may not know yet."""
        self.is_stopping = False
        """Whether all workers have agreed to stop after the step that has just ended."""
        self.shards: list[Any] = []
        """What `paceline.parallelize` has made of models."""
        self.reading: tuple[Any, Any] | None = None
        """In a layout, the ranks that read different samples, and what cuts this rank's part out of a batch."""
        self.loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that read what a rank reads where there is no layout."""
        self.dispatcher: Any = None
        """What hands out samples, where workers go at their own pace."""
        self.save_every: int | None = None
        """Steps after which those workers come together for a checkpoint, once a loop has said it."""
        self.boundary_step: int | None = None
        """While they are together, the number of steps done."""
        self.savers: dict[Any, Any] = {}
        """What writes checkpoints, by folder."""
        self._num_listening = 0
        self._closers: list[Callable[[], None]] = []

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop after a step; they agree on which."""
        self.stop_requested_by = self.stop_requested_by or reason

    @contextmanager
    def stopping_on_signals(self, *, may_interrupt: bool = True) -> Iterator[None]:
        """Inside, SIGTERM, SIGINT and SIGHUP are requests to stop.

        A signal that was ignored stays so, as SIGHUP is under `nohup`. Python handles signals in its main thread only:
        elsewhere nothing changes.

        Args:
            may_interrupt: Whether a second SIGINT interrupts as ever.
        """

        def handle(number: int, _: FrameType | None) -> None:
            if may_interrupt and number == signal.SIGINT and self.stop_requested_by:
                raise KeyboardInterrupt
            self.request_stop(signal.Signals(number).name)

        is_first = self._num_listening == 0 and threading.current_thread() is threading.main_thread()
        heard = [number for number in SIGNALS if is_first and signal.getsignal(number) is not signal.SIG_IGN]
        self._num_listening += 1
        previous = {number: signal.signal(number, handle) for number in heard}
        try:
            yield
        finally:
            self._num_listening -= 1
            if threading.current_thread() is threading.main_thread():  # an iterator may be let go of in any thread
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def should_save(self, every: int, step: int | None) -> bool:
        """Return whether it is time to save: each `every` steps, and once all workers stop.

        Args:
            every: Steps from one save to the next.
            step: Steps that are done; None where workers at their own pace come together only at a boundary.

        Raises:
            SettingsError: `every` is not at least 1.
        """
        if every < 1:
            raise SettingsError(f"every must be at least 1 update, but got {every}")
        if step is None:
            self.save_every = every
            step = self.boundary_step
        return step is not None and (step % every == 0 or self.is_stopping)

    def close_with(self, close: Callable[[], None]) -> None:
        """Call `close` when the worker leaves without an error, the last that was given first."""
        self._closers.append(close)

    def leave(self) -> None:
        """Close what belongs to the membership."""
        while self._closers:
            self._closers.pop()()
