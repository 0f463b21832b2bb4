"""Signals that ask a launcher to stop."""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from paceline.launch.exit_codes import leave

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PATIENCE_S = 2.0


class StopRequest:
    """Notes, inside a `with`, that a signal asked to stop, and hands it on instead of ending this process.

    SIGHUP stays ignored where it was, as under `nohup`. Who presses Ctrl-C again later, while workers still save, wants
    to end them at once.
    """

    number: int = 0
    """The signal that came first; 0 while there was none."""

    def __init__(self) -> None:
        self.hand_on: Callable[[int], None] = lambda _: None
        """Function called with each received signal; with SIGKILL for a later Ctrl-C."""
        self._came_s = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, lambda number, _: self.note(number))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def note(self, number: int) -> None:
        """Note a signal to this process, or one to a worker that is to stop all, and hand it on."""
        drop_lost_output()
        if not self.number:
            self.number, self._came_s = number, time.monotonic()
        is_impatient = number == signal.SIGINT and time.monotonic() - self._came_s > _PATIENCE_S
        self.hand_on(signal.SIGKILL if is_impatient else number)


@dataclass
class Leaving:
    """What is done where a signal asks to stop while no worker runs; it may be changed once workers have ended."""

    code: int
    """Exit code."""
    words: str = "while no worker ran"
    """Words on what was going on then."""


@contextlib.contextmanager
def leaving_when_asked(code: int) -> Iterator[Leaving]:
    """Inside, leave with an exit code when asked to stop; Ctrl-C stays Python's. For what comes outside of workers."""
    leaving = Leaving(code)

    def stop(number: int, _: FrameType | None) -> None:
        drop_lost_output()
        print(f"stopped by {signal.Signals(number).name} {leaving.words}", file=sys.stderr)
        leave(leaving.code)  # an exception in the middle of an import may be swallowed

    with _handling(stop):
        yield leaving


@contextlib.contextmanager
def cleaning_up_when_asked() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise `SystemExit`, so that whoever started processes ends them."""

    def stop(number: int, _: FrameType | None) -> None:
        drop_lost_output()
        raise SystemExit(128 + number)

    with _handling(stop):
        yield


@contextlib.contextmanager
def _handling(stop: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def drop_lost_output() -> None:
    """Let what is printed from now on vanish where nobody can read it: a closed terminal, a pipe without a reader."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    for descriptor, _ in poll.poll(0):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
