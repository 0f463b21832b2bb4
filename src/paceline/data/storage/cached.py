"""A storage whose blocks are kept in memory and on disk, fetched ahead in the known order, and dropped by next use."""

import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from blake3 import blake3

from paceline.comm.group import Group, joined_group
from paceline.data.storage.base import FileInfo, Locate, Storage, Upcoming
from paceline.data.storage.blocks import BLOCK_BYTES, Digests, FileBlock, StoreCounters, cut, find_tag
from paceline.data.storage.disk_cache import DiskCache
from paceline.data.storage.fetchers import Fetchers
from paceline.data.storage.handing_on import HandingOn, join_peers
from paceline.data.storage.next_use import NextUse, Numbers
from paceline.errors import DataError, PacelineError

_NUM_TRIES = 3
"""Number of times that a block with a wrong digest is fetched before it is an error."""


class CachedStorage(Storage):
    """Another storage through blocks of 1 MiB in memory and on disk.

    Once it is told what comes next (`expect`), blocks are fetched ahead, and the one whose next use is farthest makes
    room, or is not kept at all (Belady 1966; for data loading NoPFS, Dryden 2021). Before, the oldest makes room. Every
    block is fetched once at a time, whoever waits for it.

    Args:
        storage: Storage to read.
        memory_bytes: Size of the blocks in memory.
        disk: Cache on disk; None for none.
        digests: Function that gives digests of blocks, which are checked when these arrive.
        num_parallel: Number of blocks that are fetched at once.
        block_bytes: Size of a block.
        hands_on: Whether the workers of the joined group hand blocks to each other.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        memory_bytes: int,
        disk: DiskCache | None = None,
        digests: Digests | None = None,
        num_parallel: int = 16,
        block_bytes: int = BLOCK_BYTES,
        hands_on: bool = False,
    ) -> None:
        self.storage = storage
        self.counters = StoreCounters(storage.url)
        self.peers: HandingOn | None = None
        """Other workers of the run, if blocks are handed on."""
        self._hands_on = hands_on
        self._group: Group | None = None
        self._lent: set[int] = set()
        """Blocks on disk of which another worker is the home: the first to make room."""
        self._memory_bytes = memory_bytes
        self._disk = disk
        self._digests = digests or (lambda path: None)
        self._block_bytes = block_bytes
        self._max_ahead = max(1, min(4 * num_parallel, memory_bytes // 2 // block_bytes))
        """Number of blocks that are fetched ahead of their use."""
        self._lock = threading.RLock()
        self._files: dict[str, int] = {}
        """Number of each file's first block."""
        self._infos: dict[str, FileInfo] = {}
        self._blocks: list[FileBlock] = []
        self._numbers: dict[str, int] = {}
        """Number of each block, by its key."""
        self._memory: dict[int, bytes] = {}
        self._held_bytes = 0
        self._on_disk = np.zeros(0, dtype=bool)
        self._num_on_disk = 0
        self._under_way: dict[int, Future[bytes]] = {}
        self._ahead: dict[int, int] = {}
        """Blocks that were fetched ahead and not read yet, and the position of the use that they were fetched for."""
        self._cursor = 0
        """Position up to which blocks have been fetched ahead."""
        self._done: set[int] = set()
        """Blocks of that position that have been looked at."""
        self._next_use = NextUse()
        self._upcoming: Upcoming | None = None
        self._locate: Locate = lambda samples: []
        self._own: frozenset[int] = frozenset()
        self._own_end = 0
        """End of the step of which `_own` are the positions that this worker reads."""
        look_ahead = weakref.WeakMethod(self._look_ahead)
        self._fetchers = Fetchers(num_parallel, lambda: (alive := look_ahead()) is not None and alive())
        weakref.finalize(self, self._fetchers.stop)  # who forgets to close a source leaves no threads behind
        _opened.add(self)

    @property
    def url(self) -> str:
        """URL of the storage below."""
        return self.storage.url

    def list_files(self, prefix: str = "") -> list[FileInfo]:
        """Return the files below, which stay as they were listed first."""
        found = self.storage.list_files(prefix)
        with self._lock:
            return [self._infos.setdefault(info.path, info) for info in found]

    def find(self, path: str) -> FileInfo | None:
        """Return a file as it was found first."""
        known = self._infos.get(path)
        if known is None and (info := self.storage.find(path)) is not None:
            with self._lock:
                known = self._infos.setdefault(path, info)
        return known

    def forget(self, prefix: str) -> None:
        """Find files anew, and none of the blocks that were known of them."""
        with self._lock:
            for path in [path for path in self._infos if path.startswith(prefix)]:
                self._infos.pop(path)
                self._files.pop(path, None)

    def write(self, path: str, content: bytes) -> None:
        """Write a file below; blocks of an older one are not used again."""
        self.storage.write(path, content)
        self.forget(path)

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files below."""
        self.storage.remove(paths)

    def read(self, path: str, start: int = 0, num_bytes: int | None = None, *, version: str = "") -> bytes:
        """Return bytes of a file, from its blocks."""
        return self.read_ranges(path, [(start, num_bytes)], version=version)[0]

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int | None]], *, version: str = "") -> list[bytes]:
        """Return several ranges of a file; what is missing is fetched at once."""
        info, first = self._register(path)
        if version not in ("", info.version):
            raise DataError(f"{self.url}/{path} must have version {version}, but has {info.version}; index it again")
        wanted = [(start, info.num_bytes - start if num is None else num) for start, num in ranges]
        for start, num_bytes in wanted:
            if start + num_bytes > info.num_bytes:
                raise DataError(
                    f"{self.url}/{path} must have {start + num_bytes} bytes, but has {info.num_bytes}; it was cut, or "
                    "changed since its index was made"
                )
        size = self._block_bytes
        numbers = [first + n for start, num in wanted if num for n in range(start // size, -(-(start + num) // size))]
        blocks = self._take(list(dict.fromkeys(numbers)))
        self._fetchers.wake()
        with self._lock:
            self.counters.read_bytes += sum(num for _, num in wanted)
        return [cut(blocks, first, start, num_bytes, size) for start, num_bytes in wanted]

    def expect(self, upcoming: Upcoming, locate: Locate) -> None:
        """Fetch ahead and drop by what comes next; workers of the joined group find each other."""
        if self._hands_on and (group := joined_group()) is not self._group:
            if self.peers is not None:
                self.peers.close()
            self._group, self.peers = group, join_peers(group, find_tag(self.url), self.give)
        with self._lock:
            self._upcoming, self._locate = upcoming, locate
            self._cursor = self._own_end = upcoming.position
            self._done, self._own = set(), frozenset()
            self._next_use.follow(upcoming)
        self._fetchers.start()

    def close(self) -> None:
        """End the threads, and let go of the cache on disk."""
        if self.peers is not None:
            self.peers.close()
        self._fetchers.close()
        if self._disk is not None:
            self._disk.close()
        self.storage.close()

    def give(self, path: str, version: str, start: int) -> bytes | None:
        """Return a block that this worker fetches for all; None if it does not, or if the file is another one here."""
        info, first = self._register(path)
        number = first + start // self._block_bytes
        if info.version != version or self.peers is None or not self.peers.is_home(self._blocks[number].key):
            return None
        block = self._take([number], is_for_peer=True)[number]
        with self._lock:
            self.counters.handed_bytes += len(block)
        return block

    def _register(self, path: str) -> tuple[FileInfo, int]:
        """Return a file, and the number of its first block."""
        with self._lock:
            first = self._files.get(path)
            if first is not None:
                return self._infos[path], first
        info = self.find(path)
        if info is None:
            raise DataError(f"{self.url}/{path} must be readable, but there is no such file; check the path")
        digests = self._digests(path)
        with self._lock:
            info = self._infos.setdefault(path, info)  # it may have been forgotten meanwhile
            if path not in self._files:
                self._files[path] = len(self._blocks)
                self._add_blocks(info, digests)
            return info, self._files[path]

    def _add_blocks(self, info: FileInfo, digests: Sequence[str] | None) -> None:
        tag = find_tag(self.url)
        for index, start in enumerate(range(0, info.num_bytes, self._block_bytes)):
            digest = None if digests is None else digests[index]
            mark = info.version or digest or ""
            name = f"{self.url}\0{info.path}\0{mark}\0{info.num_bytes}\0{self._block_bytes}\0{index}"
            key = tag + blake3(name.encode()).hexdigest()[:32]
            num_bytes = min(self._block_bytes, info.num_bytes - start)
            self._numbers[key] = len(self._blocks)
            self._blocks.append(FileBlock(info.path, info.version, start, num_bytes, digest, key))
        self._next_use.grow(len(self._blocks))
        self._num_on_disk = -1

    def _take(self, numbers: Sequence[int], *, is_for_peer: bool = False) -> dict[int, bytes]:
        """Return blocks: those in memory, then those on disk, while the others are fetched."""
        found: dict[int, bytes] = {}
        waiting: dict[int, Future[bytes]] = {}
        with self._lock:
            if self._upcoming is not None:
                self._next_use.move_to(self._upcoming.position)
            if not is_for_peer:
                self.counters.num_blocks += len(numbers)
            for number in numbers:
                self._ahead.pop(number, None)
                block = self._memory.get(number)
                if block is not None:
                    found[number] = block
                    self.counters.memory_bytes += len(block)
        for number in numbers:
            if number not in found:
                block = self._take_from_disk(number)
                if block is not None:
                    found[number] = block
                else:
                    waiting[number] = self._begin(number)
                    if is_for_peer:  # here, since all threads that fetch may wait for peers, which may wait for us
                        self._fetch(number, waiting[number], self._next_use.position)
        began_s = time.monotonic()
        for number, future in waiting.items():
            found[number] = future.result()
        if waiting:
            with self._lock:
                self.counters.wait_s += time.monotonic() - began_s
        return found

    def _take_from_disk(self, number: int) -> bytes | None:
        block = self._blocks[number]
        content = self._disk.get(block.key) if self._disk is not None and block.is_lasting else None
        if content is None or len(content) != block.num_bytes:
            return None
        with self._lock:
            self.counters.disk_bytes += len(content)
            self._keep(number, content, is_on_disk=True)
        return content

    def _begin(self, number: int, *, position: int | None = None) -> Future[bytes]:
        """Return the transfer of a block, begun now unless it is under way.

        Args:
            number: Number of the block.
            position: Position for which it is fetched ahead; None if someone waits for it.
        """
        with self._lock:
            future = self._under_way.get(number)
            if future is None:
                future = self._under_way[number] = Future()
            elif position is not None or future.running() or future.done():
                return future
        is_urgent = position is None  # once more if it was less urgent: who comes second finds it begun
        used_at = self._next_use.position if position is None else position
        self._fetchers.put(lambda: self._fetch(number, future, used_at), is_urgent=is_urgent)
        return future

    def _fetch(self, number: int, future: Future[bytes], used_at: int) -> None:
        with self._lock:
            if future.running() or future.done():
                return
            future.set_running_or_notify_cancel()
        try:
            content = self._memory.get(number) or self._take_from_disk(number)  # it may have come just now
            if content is None:
                content = self._fetch_checked(self._blocks[number])
        except BaseException as error:  # raised again for whoever waits
            with self._lock:
                self._under_way.pop(number, None)
                self._ahead.pop(number, None)
            future.set_exception(error)
            return
        with self._lock:
            self._keep(number, content)
        future.set_result(content)
        self._keep_on_disk(number, content, used_at)
        with self._lock:  # not earlier, or whoever comes in between would fetch it again
            self._under_way.pop(number, None)

    def _fetch_checked(self, block: FileBlock) -> bytes:
        for _ in range(_NUM_TRIES):
            content = self._fetch_once(block)
            if block.digest is None or blake3(content).hexdigest() == block.digest:
                return content
            with self._lock:
                self.counters.num_damaged += 1
        raise DataError(
            f"{self.url}/{block.path} must match its manifest, but its bytes from {block.start} to "
            f"{block.start + block.num_bytes} have another digest {_NUM_TRIES} times; put the old file back, or index "
            "the data again"
        )

    def _fetch_once(self, block: FileBlock) -> bytes:
        if self.peers is not None and not self.peers.is_home(block.key):
            content = self.peers.fetch(block)
            if content is not None:
                with self._lock:
                    self.counters.peer_bytes += len(content)
                return content
        content = self.storage.read(block.path, block.start, block.num_bytes, version=block.version)
        with self._lock:
            self.counters.store_bytes += len(content)
            self.counters.num_fetched += 1
        return content

    def _keep(self, number: int, content: bytes, *, is_on_disk: bool = False) -> None:
        """Keep a block in memory, unless all others are used before it; the lock is held.

        What was fetched ahead stays until it is read, and what is on disk makes nothing go.
        """
        if number in self._memory:
            return
        table = self._next_use.table
        while self._memory and self._held_bytes + len(content) > self._memory_bytes:
            others = [held for held in self._memory if held not in self._ahead]
            if not others or is_on_disk:
                return
            held = np.array(others)
            farthest = int(held[np.argmax(table[held])])
            if self._upcoming is not None and number not in self._ahead and table[farthest] <= table[number]:
                return
            self._held_bytes -= len(self._memory.pop(farthest))
        self._memory[number] = content
        self._held_bytes += len(content)

    def _keep_on_disk(self, number: int, content: bytes, used_at: int) -> None:
        """Keep a block on disk, unless all others there are used before it is used after `used_at`."""
        disk = self._disk
        if disk is None or disk.problem or not self._blocks[number].is_lasting:
            return
        with self._lock:
            is_known = self._upcoming is not None
            next_use = self._next_use.after(number, used_at + 1) if is_known else -1
        key = self._blocks[number].key
        is_lent = self.peers is not None and not self.peers.is_home(key)
        is_kept = disk.put(key, content, lambda own: None if is_lent else self._choose(next_use, own))
        with self._lock:
            if is_kept and is_lent:
                self._lent.add(number)
            if is_kept and len(self._on_disk) > number and not self._on_disk[number]:
                self._on_disk[number] = True
                self._num_on_disk += 1

    def _choose(self, next_use: int, own: Mapping[str, int]) -> str | None:
        """Return the key of the block on disk whose next use is farthest; None if that of the new one is."""
        with self._lock:
            if self._num_on_disk != len(own) or len(self._on_disk) < len(self._blocks):
                self._on_disk = np.zeros(len(self._next_use.table), dtype=bool)
                known = [self._numbers[key] for key in own if key in self._numbers]
                if len(known) < len(own):  # of files that nobody has read yet, or that are no more
                    return next(key for key in own if key not in self._numbers)
                self._on_disk[known] = True
                self._num_on_disk = len(own)
            if not self._num_on_disk:
                return None
            while self._lent:
                if self._on_disk[number := self._lent.pop()]:
                    self._on_disk[number] = False
                    self._num_on_disk -= 1
                    return self._blocks[number].key
            table = self._next_use.table[: len(self._on_disk)]
            farthest = int(np.argmax(np.where(self._on_disk, table, -1)))
            if table[farthest] <= next_use:
                return None
            self._on_disk[farthest] = False
            self._num_on_disk -= 1
            return self._blocks[farthest].key

    def _look_ahead(self) -> bool:
        """Learn of more uses, or begin to fetch what is used next; return whether there may be more to do."""
        upcoming = self._upcoming
        if upcoming is None:
            return False
        with self._lock:
            self._next_use.move_to(upcoming.position)
            self._ahead = {number: at for number, at in self._ahead.items() if at >= upcoming.position}
            chunk = self._next_use.next_chunk()
        num_begun = self._fetch_ahead(upcoming)
        if chunk is None or upcoming is not self._upcoming:
            return num_begun > 0
        try:
            positions, blocks = self._find_uses(*chunk)
        except PacelineError:  # whoever reads it is told
            return False
        with self._lock:
            if upcoming is self._upcoming:
                self._next_use.add(*chunk, positions, blocks)
        return True

    def _find_uses(self, start: int, stop: int) -> tuple[Numbers, Numbers]:
        """Return the uses of blocks at positions; where samples have several extents, to 32 positions."""
        upcoming = self._upcoming
        assert upcoming is not None
        samples = upcoming.samples(start, stop)
        extents = list(self._locate(samples))
        if len(extents) == stop - start:
            at = np.arange(start, stop)
        else:
            parts = [
                (begin, list(self._locate(samples[begin - start : begin - start + 32])))
                for begin in range(start, stop, 32)
            ]
            extents = [extent for _, part in parts for extent in part]
            at = np.repeat([begin for begin, _ in parts], [len(part) for _, part in parts])
        size = self._block_bytes
        paths = {path for path, _, _ in extents}
        for path in [path for path in paths if path not in self._infos][1:]:  # beside the first, which is found below
            self._fetchers.put(partial(self._find_early, path), is_urgent=True)
        firsts = {path: self._register(path)[1] for path in paths}
        first = np.fromiter((firsts[path] + start // size for path, start, _ in extents), np.int64, len(extents))
        ends = ((start + max(1, num) - 1) // size - start // size + 1 for _, start, num in extents)
        counts = np.fromiter(ends, np.int64, len(extents))
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(at, counts), np.repeat(first, counts) + offsets

    def _find_early(self, path: str) -> None:
        with contextlib.suppress(PacelineError):  # whoever reads it is told
            self.find(path)

    def _fetch_ahead(self, upcoming: Upcoming) -> int:
        """Begin to fetch the next blocks that are nowhere here, as far as memory allows; return their number."""
        num_begun = 0
        with self._lock:
            for positions, blocks in self._next_use.uses_from(max(self._cursor, upcoming.position)):
                for position, number in zip(positions.tolist(), blocks.tolist(), strict=True):
                    if position > self._cursor:
                        self._cursor = position
                        self._done.clear()
                    if number in self._done:
                        continue
                    if len(self._ahead) >= self._max_ahead:
                        return num_begun
                    self._done.add(number)
                    if self._is_wanted(position, number, upcoming):
                        self._ahead[number] = position
                        self._begin(number, position=position)
                        num_begun += 1
        return num_begun

    def _is_wanted(self, position: int, number: int, upcoming: Upcoming) -> bool:
        """Return whether to fetch a block for its use at a position."""
        key, is_lasting = self._blocks[number].key, self._blocks[number].is_lasting
        is_on_disk = is_lasting and self._disk is not None and self._disk.has(key)
        if number in self._memory or number in self._under_way or is_on_disk:
            return False
        if self.peers is not None and self.peers.is_home(key):
            return True
        while self._own_end <= position:
            self._own_end, own = upcoming.step_at(self._own_end)
            self._own = frozenset(own.tolist())
        return position in self._own


_opened: weakref.WeakSet[CachedStorage] = weakref.WeakSet()


def read_counters() -> list[StoreCounters]:
    """Return the counts of the cached storages of this process that were read, by their URLs."""
    counters = [storage.counters for storage in list(_opened) if storage.counters.read_bytes]
    return [dataclasses.replace(one) for one in sorted(counters, key=lambda one: one.url)]
