"""Threads that work in the background, and end before the interpreter does.

A thread that is inside a library when the interpreter ends is torn down in the middle of it, at its next return to
Python, which can end the process by a signal. So each is asked to end, and waited for, while Python still runs.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
EXIT_TIMEOUT_S = 5.0
"""Longest time that the end of the process waits for threads, such as one that waits for a peer that is gone."""

_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


def start_thread(
    run: Callable[..., object], *arguments: Any, name: str, stop: Callable[[], object] = lambda: None
) -> threading.Thread:
    """Start a daemon thread that is stopped and awaited at the end of the process, if nobody has done so before.

    Args:
        run: Function of the thread.
        arguments: Arguments of that function.
        name: Name of the thread.
        stop: Function that makes it end soon, called in another thread. It must refer to nothing whose end should end
            the thread.
    """
    thread = threading.Thread(target=_run, args=(run, *arguments), name=name, daemon=True)
    _stops[thread] = stop
    thread.start()
    return thread


def _run(run: Callable[..., object], *arguments: Any) -> None:
    try:
        run(*arguments)
    finally:
        _stops.pop(threading.current_thread(), None)  # whose owner often holds the thread: neither would be freed


@atexit.register
def end_threads() -> None:
    """Stop all threads and wait for them, for `EXIT_TIMEOUT_S` at most."""
    running = [(thread, stop) for thread, stop in list(_stops.items()) if thread.is_alive()]
    for _, stop in running:
        stop()
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    for thread, _ in running:
        thread.join(max(0.0, deadline_s - time.monotonic()))


def call_weakly(method: Callable[[T], None]) -> Callable[[T], None]:
    """Return a function that calls a bound method while its object lives, without keeping that alive."""
    reference = weakref.WeakMethod(method)

    def call(argument: T) -> None:
        if (alive := reference()) is not None:
            alive(argument)

    return call
