"""Blocks on this machine's disk, in a folder that all runs share.

    lock                      held (flock) while the journal is read and written
    journal                   its own name, and a line for each block that came or went: ``+KEY BYTES`` and ``-KEY``
    blocks/ab/ab12...         a block, and after it the BLAKE3 digest of its bytes
    parts/KEY.ID              a block that is being written; its writer holds a lock on it
    users/TAG.ID              a process that reads the data TAG, which holds a lock on it

A block appears under its name when it is complete. Nothing is synchronised with the disk: what a power cut tore has
another digest, and is fetched again. The journal names a block before its file is there and until after it is gone, so
a process that is killed between any two calls leaves it too long, never too short: the limit holds. The next process
that opens the cache writes the journal anew, from what is there.
"""

import contextlib
import fcntl
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from blake3 import blake3

_DIGEST_BYTES = 32
_TAG_CHARACTERS = 8
_HEAD_BYTES = len("journal 0123456789abcdef\n")
_JOURNAL_BYTES = 500
"""Size of the journal for each block from which on it is written anew."""
_LOOK_S = 10.0
"""Time for which it is taken as known who uses the cache."""


class CacheWarning(UserWarning):
    """The cache on disk cannot be used, and data is fetched again instead."""


Choose = Callable[[Mapping[str, int]], str | None]
"""Function that returns the key to remove among those of its own data (key: bytes); None to keep them all."""


class DiskCache:
    """A cache of blocks of bytes with a limit, safe between threads, processes and runs.

    Args:
        folder: Folder of the cache.
        limit_bytes: Largest sum of the blocks' sizes.
        tag: Mark of the data that this process reads, 8 characters: the beginning of its keys.
    """

    def __init__(self, folder: Path, limit_bytes: int, tag: str) -> None:
        assert len(tag) == _TAG_CHARACTERS
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.own: dict[str, int] = {}
        """Bytes of each block of this process's data, the oldest first."""
        self.problem = ""
        """Reason for which nothing is written any more; empty while all is well."""
        self._others: dict[str, int] = {}
        self._used_bytes = 0
        self._tag = tag
        self._turn = threading.Lock()
        self._journal_id, self._journal_end = b"", 0
        self._busy_tags: set[str] = set()
        self._looked_s = -_LOOK_S
        self._descriptors: list[int] = []
        with self._careful():
            for name in ("blocks", "parts", "users"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            self._lock_file = self._open(folder / "lock")
            with self._locked(is_opening=True):
                user = self._open(folder / "users" / f"{tag}.{secrets.token_hex(8)}")
                fcntl.flock(user, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._recount()

    @property
    def used_bytes(self) -> int:
        """Size of all blocks, by the journal as read last."""
        return self._used_bytes

    def has(self, key: str) -> bool:
        """Return whether a block is there, whoever has put it there."""
        return self._path(key).exists()

    def get(self, key: str) -> bytes | None:
        """Return a block; None if it is not there, or not as it was written."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        block, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if blake3(block).digest() == digest:
            return block
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def put(self, key: str, block: bytes, choose: Choose) -> bool:
        """Keep a block, in place of others if there is no room, and return whether it is kept.

        Args:
            key: Key of the block.
            block: Content.
            choose: Function that chooses among the blocks of this process's data where they have to make room.
        """
        if self.problem:
            return False
        size = len(block) + _DIGEST_BYTES
        with self._careful():
            with self._locked():
                if (key in self.own or key in self._others) and self._path(key).exists():
                    return True
                part = self._reserve(key, size, choose)
            if part is None:
                return False
            try:
                self._write(part, block)
                self._path(key).parent.mkdir(exist_ok=True)
                os.rename(part[1], self._path(key))
            finally:
                os.close(part[0])  # not earlier: a part that nobody holds is removed
            return True
        return False

    def close(self) -> None:
        """Let go of the files; the cache stays."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        self.problem = self.problem or "it was closed"

    def _write(self, part: tuple[int, Path], block: bytes) -> None:
        try:
            for content in (block, blake3(block).digest()):
                view = memoryview(content)
                while view:
                    view = view[os.write(part[0], view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(part[1])
            raise

    def _reserve(self, key: str, size: int, choose: Choose) -> tuple[int, Path] | None:
        """Make room, note the block in the journal, and return a file to write it to; None if it has to stay out."""
        if self._journal_end > _JOURNAL_BYTES * (1000 + len(self.own) + len(self._others)):
            self._recount()
        known = self.own.get(key, self._others.get(key, 0))
        while self._used_bytes - known + size > self.limit_bytes:
            victim = self._choose(choose)
            if victim is None:
                return None
            self._path(victim).unlink(missing_ok=True)
            self._note(f"-{victim}\n")
        path = self.folder / "parts" / f"{key}.{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not known:
                self._note(f"+{key} {size}\n")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, path

    def _choose(self, choose: Choose) -> str | None:
        """Return the key of a block to remove: of data that nobody reads, of who has more than us, or of our own."""
        now_s = time.monotonic()
        if self._others and now_s - self._looked_s >= _LOOK_S:
            self._busy_tags, self._looked_s = self._find_busy(), now_s
        for key in self._others:
            if key[:_TAG_CHARACTERS] not in self._busy_tags:
                return key
        if self._others and sum(self._others.values()) > sum(self.own.values()):
            return next(iter(self._others))
        return choose(self.own)

    def _find_busy(self) -> set[str]:
        """Return the tags of data that a living process reads; files of dead ones are removed."""
        busy = set()
        for path in (self.folder / "users").iterdir():
            if _is_held(path):
                busy.add(path.name[:_TAG_CHARACTERS])
        return busy

    def _recount(self) -> None:
        """Write the journal anew, from the files; what dead writers have left is removed."""
        for part in (self.folder / "parts").iterdir():
            _is_held(part)
        sizes = {
            entry.name: entry.stat().st_size
            for path in (self.folder / "blocks").iterdir()
            for entry in os.scandir(path)
        }
        for part in (self.folder / "parts").iterdir():  # those of the living, who have noted them
            name = part.name.split(".")[0]
            sizes[name] = max(self.own.get(name, 0), self._others.get(name, 0), sizes.get(name, 0))
        new = self.folder / f"journal.{secrets.token_hex(8)}"
        lines = [f"journal {secrets.token_hex(8)}\n", *(f"+{key} {size}\n" for key, size in sizes.items())]
        new.write_text("".join(lines))
        os.rename(new, self.folder / "journal")
        for left in self.folder.glob("journal.*"):
            left.unlink(missing_ok=True)
        self._read_journal()

    @contextlib.contextmanager
    def _locked(self, *, is_opening: bool = False) -> Iterator[None]:
        """Hold the lock, with the journal read."""
        with self._turn:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX)
            try:
                if not is_opening or (self.folder / "journal").exists():
                    self._read_journal()
                yield
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _read_journal(self) -> None:
        """Follow what this and other processes have written since; a line without its end was never written."""
        descriptor = os.open(self.folder / "journal", os.O_RDWR)
        try:
            head = os.pread(descriptor, _HEAD_BYTES, 0)
            if head != self._journal_id:
                self.own.clear()
                self._others.clear()
                self._journal_id, self._journal_end, self._used_bytes = head, len(head), 0
            text = os.pread(descriptor, os.fstat(descriptor).st_size - self._journal_end, self._journal_end)
            whole = text[: text.rfind(b"\n") + 1]
            for line in whole.decode().splitlines():
                self._apply(line)
            self._journal_end += len(whole)
            if len(whole) < len(text):
                os.ftruncate(descriptor, self._journal_end)
        finally:
            os.close(descriptor)

    def _apply(self, line: str) -> None:
        key, _, size = line[1:].partition(" ")
        blocks = self.own if key.startswith(self._tag) else self._others
        self._used_bytes -= blocks.pop(key, 0)
        if line[0] == "+":
            blocks[key] = int(size)
            self._used_bytes += int(size)

    def _note(self, line: str) -> None:
        descriptor = os.open(self.folder / "journal", os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
        self._read_journal()

    @contextlib.contextmanager
    def _careful(self) -> Iterator[None]:
        """Give the cache up where the disk fails, with one warning."""
        try:
            yield
        except OSError as error:
            self.problem = self.problem or error.strerror or str(error)
            warnings.warn(
                f"the cache in {self.folder} takes no more blocks: {self.problem}; what it lacks is fetched each time. "
                "Free space there, choose another store.disk_folder, or give store.disk_bytes 0 to silence this",
                CacheWarning,
                stacklevel=3,
            )

    def _path(self, key: str) -> Path:
        return self.folder / "blocks" / key[-2:] / key

    def _open(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._descriptors.append(descriptor)
        return descriptor


def _is_held(path: Path) -> bool:
    """Return whether a living process holds the lock of a file; if not, remove it."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        path.unlink(missing_ok=True)
        return False
    finally:
        os.close(descriptor)
