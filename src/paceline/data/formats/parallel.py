"""Work on many files in forked processes, in order."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_work: Callable[[Any], Any] | None = None


def map_in_processes(work: Callable[[Any], T], tasks: Sequence[Any], num_processes: int) -> Iterator[T]:
    """Yield the results of `work` in the order of the tasks.

    Processes are forked, so that `work` need not be picklable; they end with this one, even if it is killed. Where
    other threads run, the work is done here: what they hold at the fork would stay locked in the new process.

    Args:
        work: Function of one task.
        tasks: Tasks, which are pickled, as results are.
        num_processes: Number of processes; 1 for none but this one.
    """
    global _work
    if num_processes <= 1 or len(tasks) < 2 or threading.active_count() > 1:
        yield from map(work, tasks)
        return
    _work = work
    try:
        with multiprocessing.get_context("fork").Pool(min(num_processes, len(tasks)), _live_with_parent) as pool:
            yield from pool.imap(_call, tasks)
    finally:
        _work = None


def _call(task: Any) -> Any:
    assert _work is not None
    return _work(task)


def _live_with_parent() -> None:
    """End when the parent ends, for any reason; leave signals of the terminal to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
