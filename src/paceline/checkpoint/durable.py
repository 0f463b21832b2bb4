"""Files and directories that survive a power cut, and the lock against a second writer."""

import errno
import fcntl
import os
import re
import socket
import stat
import warnings
import weakref
from io import FileIO
from pathlib import Path

from paceline.errors import CheckpointError, storing

MARKER_NAME = "COMMITTED"
_OWN_FILE = re.compile(
    r"COMMITTED(\.part)?|manifest\.json|state\.json|tensors-\d+-\d+\.safetensors|shared-(probe|\d+\.safetensors)"
)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable, as fsync does for the content of a file."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def identify(directory: Path) -> list[int]:
    """Return what tells a directory from a copy of it, and from one in a snapshot of its volume, while both are there.

    Moved on its volume it stays the same; JSON can hold it.
    """
    status = directory.stat()
    return [status.st_dev, status.st_ino]


def open_regular(path: Path) -> FileIO:
    """Open a file to read; a pipe in its place, which would be waited for, is an error at once.

    Raises:
        OSError: The file is no regular one, or cannot be opened.
    """

    def open_now(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no regular file", name)
        return descriptor

    return FileIO(path, opener=open_now)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file durably; it must not exist yet."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_marker(directory: Path, content: bytes) -> None:
    """Write the commit marker of `directory` atomically."""
    sync_directory(directory)
    sync_directory(directory.parent)
    part = directory / f"{MARKER_NAME}.part"
    write_file(part, content)
    os.rename(part, directory / MARKER_NAME)
    sync_directory(directory)


def remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint, its marker first, so that a half-removed one never looks complete.

    Files that do not belong to a checkpoint stay, and so does their directory.
    """
    (directory / MARKER_NAME).unlink(missing_ok=True)
    sync_directory(directory)
    for file in sorted(directory.iterdir()):
        if _OWN_FILE.fullmatch(file.name):
            file.unlink()
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


class WriterLock:
    """The right to write below a directory; one process at a time holds it, until it ends or releases it.

    It is an flock on the file ``.lock``. The kernel frees it when the holder dies, however it dies, so there
    is nothing to clean up after a crash. If the file system has no locks, a warning says so, and nothing is
    locked.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / ".lock"
        self._close: weakref.finalize[[int], WriterLock] | None = None
        _LOCKS.add(self)

    def acquire(self) -> None:
        """Take the lock, unless it is held already.

        Raises:
            CheckpointError: Another process, or another object of this one, holds it.
            StorageError: The disk is full or read-only, or the directory does not exist.
        """
        if self._close is not None:
            return
        with storing(self._path):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._lock(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        self._close = weakref.finalize(self, os.close, descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise CheckpointError(
                f"checkpoints in {self._path.parent} must have one writer, but {holder} is writing there; "
                "stop it, or choose another directory"
            ) from None
        except OSError as error:
            warnings.warn(
                f"{self._path.parent} cannot be locked ({error.strerror}), so a second run that writes "
                "there would not be noticed; silence this with a filter for UserWarning",
                stacklevel=4,
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._close is not None:
            self._close()
            self._close = None


_LOCKS: "weakref.WeakSet[WriterLock]" = weakref.WeakSet()


def _release_in_child() -> None:
    # A forked loader process would otherwise hold the lock for as long as it outlives a killed trainer.
    # Closing a copy of the descriptor releases this process's share only.
    for lock in list(_LOCKS):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
