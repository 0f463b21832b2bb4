"""The part of training that lasts from joining to leaving: requests to stop, and objects to close."""

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from paceline.errors import PacelineError, SettingsError

PREEMPTED = os.EX_TEMPFAIL
"""Exit code (75) of a worker that a signal stopped: a new start resumes from the checkpoint."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CHANGE = "workers join or leave"
"""Reason of a stop after which training goes on at once, among other workers."""
_PATIENCE_S = 2.0
"""Time after a SIGINT in which another one is the same request: a terminal and a launcher may both send it."""


_on_sigterm: list[Callable[[], None]] = []


def leave_on_sigterm(leave: Callable[[], None]) -> None:
    """From now on SIGTERM to this process is a request that it leaves alone, made by calling `leave`."""
    _on_sigterm[:] = [leave]


class Membership:
    """This worker's membership in a group that trains together.

    A group is immutable: when workers die or join there is a new group, with a new membership. Objects made for a group
    (replicas, loaders, savers) are closed with its membership; objects that outlive it (model, optimizer, log,
    checkpoint store) do not belong to it.
    """

    def __init__(self) -> None:
        self.stop_requested_by = ""
        """Reason why this worker was asked to stop, such as SIGTERM; other workers may not know it yet."""
        self.is_stopping = False
        """Whether all workers have agreed to stop after the step that has just ended."""
        self.is_saved = False
        """Whether a checkpoint was saved after that step, in a loop of the user's."""
        self.has_equal_models = False
        """Whether workers that go on from memory have found that they hold the same model, so that none copies it."""
        self.shards: list[Any] = []
        """Model shards that `paceline.parallelize` has made."""
        self.reading: tuple[Any, Any] | None = None
        """In a layout: the data-parallel group, and the function that splits this rank's part out of a batch."""
        self.loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        """Loaders that were made without a layout."""
        self.dispatcher: Any = None
        """Sample dispatcher, if workers go at their own pace."""
        self.save_every: int | None = None
        """Steps between checkpoints of such workers, once the loop has given it."""
        self.boundary_step: int | None = None
        """Number of steps done while such workers wait together for a checkpoint; otherwise None."""
        self.savers: dict[Any, Any] = {}
        """Checkpoint savers, by folder."""
        self._replicas: list[weakref.ref[Any]] = []
        """Open replicas, the oldest first; those that nobody refers to any more have let go of all by themselves."""
        self._num_listening = 0
        self._closers: list[Callable[[], None]] = []

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop after a step that they agree on."""
        if self.stop_requested_by in ("", CHANGE):
            self.stop_requested_by = reason

    def take_request(self, other: "Membership") -> None:
        """Ask all workers to stop if `other` was asked to, but for a change of workers."""
        if other.stop_requested_by not in ("", CHANGE):
            self.request_stop(other.stop_requested_by)

    @contextmanager
    def stopping_on_signals(self, *, may_interrupt: bool = True) -> Iterator[None]:
        """While active, SIGTERM, SIGINT and SIGHUP are requests to stop.

        A signal that was ignored stays ignored, as SIGHUP is under `nohup`. Python handles signals in its main thread
        only: in other threads nothing changes.

        Args:
            may_interrupt: Whether a second SIGINT, seconds after the first, raises KeyboardInterrupt as usual.
        """
        interrupted_s: list[float] = []

        def handle(number: int, _: FrameType | None) -> None:
            if number == signal.SIGTERM and _on_sigterm:
                _on_sigterm[0]()
                return
            if number == signal.SIGINT:
                interrupted_s.append(time.monotonic())
                if may_interrupt and interrupted_s[-1] - interrupted_s[0] > _PATIENCE_S:
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
        """Return whether to save now: each `every` steps, and once all workers stop.

        Args:
            every: Number of steps from one save to the next.
            step: Number of steps done; None if workers go at their own pace, and synchronise only at a boundary.

        Raises:
            SettingsError: `every` is not at least 1.
        """
        if not isinstance(every, int) or every < 1:
            raise SettingsError(f"every must be a whole number of at least 1 update, but got {every!r}")
        if step is None:
            self.save_every = every
            step = self.boundary_step
        return step is not None and (step % every == 0 or self.is_stopping)

    def add_replica(self, replica: Any) -> None:
        """Close `replica` when the worker leaves without an error, unless it has been closed before."""
        self._replicas.append(weakref.ref(replica, self._replicas.remove))

    def remove_replica(self, replica: Any) -> bool:
        """Forget a replica that is being closed, and return whether it was open."""
        found = [reference for reference in self._replicas if reference() is replica]
        for reference in found:
            self._replicas.remove(reference)
        return bool(found)

    def close_with(self, close: Callable[[], None]) -> None:
        """Call `close` when the worker leaves without an error; the last one registered runs first."""
        self._closers.append(close)

    def explain(self, error: BaseException) -> PacelineError | None:
        """Return what an error of torch means in the layout of the workers, or None."""
        return next(filter(None, (shard.explain(error) for shard in self.shards)), None)

    def close_replicas(self) -> None:
        """Close the open replicas, the newest first."""
        for reference in reversed(list(self._replicas)):
            if (replica := reference()) is not None:
                replica.close()

    def leave(self) -> None:
        """Close all other objects of the membership."""
        while self._closers:
            self._closers.pop()()
