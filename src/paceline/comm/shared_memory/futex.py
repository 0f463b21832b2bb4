"""Linux futexes: a thread sleeps in the kernel until another process changes a word of shared memory and wakes it.

A word has one writer. A waiter reads it, and sleeps only if it still holds the value that was read: the kernel checks
that under its own lock, so no wake-up is lost. No thread spins, and one call wakes all waiters.
"""

import ctypes
import errno
import os
import platform
import sys
import threading

SLICE_S = 0.1
"""Longest sleep in one call: after it a waiter checks whether the ranks it waits for still live."""

_SYSTEM_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
_NUMBER = ctypes.c_long(_SYSTEM_CALLS.get(platform.machine(), -1) if sys.platform == "linux" else -1)
_WAIT, _WAKE = ctypes.c_int(0), ctypes.c_int(1)
_EVERYBODY = ctypes.c_int(2**31 - 1)
_RETURNS = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)
"""Error numbers that are not errors here: the word has changed, a signal came, the time is over."""
_SLICE = (ctypes.c_long * 2)(int(SLICE_S), int(SLICE_S % 1 * 1e9))

_library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def is_supported() -> bool:
    """Return whether this system has futexes with a known system call."""
    return _library is not None and _NUMBER.value >= 0


def wait(address: int, seen: int) -> None:
    """Sleep while the word at `address` is `seen`, until another thread calls `wake`, or `SLICE_S` is over."""
    assert _library is not None
    result = _library.syscall(
        _NUMBER, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(seen), _SLICE, None, ctypes.c_int(0)
    )
    if result != 0 and ctypes.get_errno() not in _RETURNS:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def wake(address: int) -> None:
    """Wake all threads, in any process, that sleep on the word at `address`."""
    assert _library is not None
    _library.syscall(_NUMBER, ctypes.c_void_p(address), _WAKE, _EVERYBODY, None, None, ctypes.c_int(0))


def give_way() -> None:
    """Let any other thread run that wants this core or Python's lock (which `os.sched_yield` does not release)."""
    assert _library is not None
    _library.sched_yield()


_lock = threading.Lock()


def fence() -> None:
    """Full memory fence: keep this thread's reads and writes before the call apart from those after it.

    Between processes, data must be visible before the word that announces them, and be read after it. x86 keeps that
    order by itself: neither stores nor loads overtake their like. ARM does not; there, to unlock is a release and
    to lock is an acquire, and as an acquire never overtakes a release before it, the pair is a full fence.
    """
    with _lock:
        pass
    with _lock:
        pass
