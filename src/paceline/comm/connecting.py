"""Waits of ranks for each other while they open a group; they end once one of its ranks is known to be lost."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed import Store

from paceline.comm.control.store import find_control_store
from paceline.comm.progress import PROGRESS
from paceline.comm.threads import start_thread
from paceline.errors import CommunicationError, PacelineError

T = TypeVar("T")
_CHECK_INTERVAL_S = 0.1


def check_epoch(store: Store | None, epoch: int) -> None:
    """Raise `CommunicationError` if a worker of an epoch is known to be lost: a supervisor says so in its store."""
    if (control := find_control_store(store)) is not None:
        control.check_epoch(epoch)


def connect(run: Callable[[], T], store: Store | None, epoch: int, others: Sequence[int], timeout_s: float) -> T:
    """Return what native code returns that connects this rank with others, and waits for them.

    It cannot be called off, and has times of its own: gloo five times that which it is given, and for a host that does
    not answer that of the kernel, two minutes. So it runs in a thread, which is left to itself once it is in vain.

    Args:
        run: Function that connects the ranks.
        store: Store by which they find each other.
        epoch: Number of their membership.
        others: Numbers of the other ranks in errors.
        timeout_s: Longest time of it.

    Raises:
        CommunicationError: The ranks did not connect in time, or one of them is lost.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run_here() -> None:
        try:
            results.append(run())
        except Exception as error:
            errors.append(error)

    deadline_s = time.monotonic() + timeout_s
    with PROGRESS.connecting(others):
        thread = start_thread(run_here, name="paceline-connect")
        thread.join(_CHECK_INTERVAL_S)
        while thread.is_alive():
            check_epoch(store, epoch)
            if time.monotonic() > deadline_s:
                ranks = ", ".join(map(str, others))
                raise CommunicationError(f"ranks must connect with ranks {ranks} within {timeout_s:g} s, but did not")
            thread.join(_CHECK_INTERVAL_S)
    if not errors:
        return results[0]
    check_epoch(store, epoch)  # then that is why
    if isinstance(errors[0], RuntimeError) and not isinstance(errors[0], PacelineError):
        raise CommunicationError(f"ranks could not connect: {errors[0]}") from errors[0]
    raise errors[0]
