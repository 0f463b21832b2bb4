"""Threads that a construction starts or gives work to, which must leave its tensors and its random numbers alone."""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.parallel.deferred.python_access import replaced
from paceline.parallel.deferred.recording import Recording
from paceline.parallel.deferred.refusal import UndeferrableError


@contextmanager
def watching_threads(recording: Recording) -> Iterator[None]:
    """While active, refuse what other threads do with tensors without memory, since only one thread is recorded.

    Raises:
        UndeferrableError: Such a thread still runs in the end.
    """
    builders, running = {threading.get_ident()}, set[object]()

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        mark = object()
        running.add(mark)

        @functools.wraps(run)
        def work(*args: Any, **kwargs: Any) -> Any:
            builders.add(threading.get_ident())
            try:
                with _Bystander(recording):
                    return run(*args, **kwargs)
            finally:
                builders.discard(threading.get_ident())
                running.discard(mark)

        return work

    def start(thread: threading.Thread) -> None:
        if threading.get_ident() in builders and not _is_of_pool(thread):
            thread.run = watched(thread.run)  # type: ignore[method-assign]
        started(thread)

    def submit(pool: ThreadPoolExecutor, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        is_builder = threading.get_ident() in builders
        return submitted(pool, watched(run) if is_builder else run, *args, **kwargs)

    started, submitted = threading.Thread.start, ThreadPoolExecutor.submit
    with ExitStack() as changed:
        changed.enter_context(replaced(threading.Thread, "start", start))
        changed.enter_context(replaced(ThreadPoolExecutor, "submit", submit))
        try:
            yield
        finally:
            recording.is_over = True
    if running:
        with recording.watch("thread"):
            raise UndeferrableError("a thread that it has given work to still runs")


class _Bystander(TorchDispatchMode):
    """Context of another thread."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on other tensors; on any once the construction is over."""
        if self._recording.is_over:
            return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        with self._recording.watch(func):
            if any(isinstance(leaf, Tensor) and self._recording.knows(leaf) for leaf in leaves):
                raise UndeferrableError("another thread works on its tensors")
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise UndeferrableError("another thread draws random numbers")
        return func(*args, **(kwargs or {}))


def _is_of_pool(thread: threading.Thread) -> bool:
    """Whether a thread only waits for what is submitted to a pool."""
    target = getattr(thread, "_target", None)
    return getattr(target, "__module__", "") == "concurrent.futures.thread"
