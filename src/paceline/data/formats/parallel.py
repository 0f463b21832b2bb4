"""Work on many files in forked processes, in order."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from paceline.errors import DataError

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

    Raises:
        DataError: A process was killed.
    """
    global _work
    if num_processes <= 1 or len(tasks) < 2 or threading.active_count() > 1:
        yield from map(work, tasks)
        return
    _work = work
    context = multiprocessing.get_context("fork")
    try:
        # Unlike a Pool, it ends its processes without signals, which their handlers might ignore.
        with ProcessPoolExecutor(min(num_processes, len(tasks)), context, _live_with_parent) as pool:
            yield from pool.map(_call, tasks)
    except BrokenProcessPool as error:
        raise DataError(
            f"the {num_processes} processes that work on the data must live, but one was killed, perhaps for want of "
            "memory; use fewer"
        ) from error
    finally:
        _work = None


def _call(task: Any) -> Any:
    assert _work is not None
    return _work(task)


def _live_with_parent() -> None:
    """End when the parent ends, for any reason; leave signals of the terminal to it, and drop its handlers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
