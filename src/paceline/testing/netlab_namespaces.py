"""Network namespaces without names, each kept only by an open file of this process.

Nothing needs cleaning up: when the file is closed, which the kernel does also after SIGKILL, and no process
is inside any longer, the namespace and every interface in it are gone.
"""

import ctypes
import functools
import os
import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_OWN_NAMESPACE = "/proc/thread-self/ns/net"


class Namespace:
    """A separate network: interfaces, addresses, routes and ports, none at first. Needs CAP_SYS_ADMIN.

    Raises:
        OSError: The kernel does not allow it.
    """

    def __init__(self) -> None:
        def create() -> int:
            _check(_libc().unshare(_CLONE_NEWNET))
            return os.open(_OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)

        self._file = _in_thread(create)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        """Path at which other processes find the namespace while it is open."""

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of `function`, run inside in a separate thread: the caller stays outside.

        Sockets that the function opens and processes that it starts stay inside.
        """

        def inside() -> T:
            enter_namespace(self.path)
            return function()

        return _in_thread(inside)

    def batch(self, tool: str, *commands: str) -> None:
        """Run commands of `tool` (``ip``, ``tc``) inside.

        Raises:
            OSError: A command failed; the later ones were not run.
        """
        done = self.call(
            lambda: subprocess.run([tool, "-batch", "-"], input="\n".join(commands), capture_output=True, text=True)
        )
        if done.returncode != 0:
            raise OSError(f"{tool} could not do what was asked in a network namespace: {done.stderr.strip()}")

    def close(self) -> None:
        """Close the namespace's file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def enter_namespace(path: str) -> None:
    """Move the calling thread (in a process of one thread: the process) into the network namespace at `path`."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc().setns(file, _CLONE_NEWNET))
    finally:
        os.close(file)


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return the C library: Python has no os.setns and os.unshare before 3.12."""
    return ctypes.CDLL(None, use_errno=True)


def _check(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _in_thread(function: Callable[[], T]) -> T:
    """Return the result of `function`, run in a separate thread, whose end undoes changes to that thread."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again by the caller below
            errors.append(error)

    thread = threading.Thread(target=run, name="paceline-namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
