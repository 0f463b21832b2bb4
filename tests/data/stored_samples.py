"""Samples in files of a storage that counts what is read, and what the best and a usual cache would have read."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from paceline.data import Source
from paceline.data.storage import FileInfo, Storage
from paceline.errors import DataError


class CountingStorage(Storage):
    """Files in memory, of which each read is counted."""

    def __init__(self, files, gate=None, version="first"):
        self.files, self.gate, self.version = dict(files), gate, version
        self.reads: list[tuple[str, int, int]] = []
        self._turn = threading.Lock()

    @property
    def url(self) -> str:
        return "counted://files"

    def list_files(self, prefix=""):
        return [self.find(path) for path in sorted(self.files) if path.startswith(prefix)]

    def find(self, path):
        return FileInfo(path, len(self.files[path]), self.version) if path in self.files else None

    def read(self, path, start=0, num_bytes=None, *, version=""):
        if self.gate is not None:
            self.gate()
        with self._turn:
            self.reads.append((path, start, num_bytes))
        if path not in self.files:
            raise DataError(f"{path} is gone")
        return self.files[path][start:][:num_bytes]

    def write(self, path, content):
        self.files[path] = content

    def remove(self, paths):
        for path in paths:
            self.files.pop(path, None)


def make_files(num_files: int, num_bytes: int) -> dict[str, bytes]:
    """Return files of random bytes."""
    return {f"{number:04d}.bin": np.random.default_rng(number).bytes(num_bytes) for number in range(num_files)}


class StoredSamples(Source):
    """Samples of equal size in files of equal size."""

    def __init__(self, storage: Storage, num_files: int, file_bytes: int, sample_bytes: int) -> None:
        self.storage, self.num_files = storage, num_files
        self.sample_bytes, self.per_file = sample_bytes, file_bytes // sample_bytes

    def __len__(self) -> int:
        return self.num_files * self.per_file

    def locate(self, indices) -> list[tuple[str, int, int]]:
        return [
            (f"{index // self.per_file:04d}.bin", index % self.per_file * self.sample_bytes, self.sample_bytes)
            for index in np.asarray(indices).tolist()
        ]

    def expect(self, upcoming) -> None:
        self.storage.expect(upcoming, self.locate)

    def read(self, indices):
        parts = [bytearray(self.storage.read(*extent)) for extent in self.locate(indices)]
        return torch.stack([torch.frombuffer(part, dtype=torch.uint8) for part in parts])


def count_best_hits(uses: Sequence[object], capacity: int) -> int:
    """Return the hits of the best cache there can be (Belady)."""
    following: dict[object, int] = {}
    next_use = [0] * len(uses)
    for place in reversed(range(len(uses))):
        next_use[place] = following.get(uses[place], len(uses))
        following[uses[place]] = place
    held: dict[object, int] = {}
    num_hits = 0
    for place, block in enumerate(uses):
        num_hits += block in held
        held[block] = next_use[place]
        if len(held) > capacity:
            del held[max(held, key=held.__getitem__)]
    return num_hits


def count_lru_hits(uses: Sequence[object], capacity: int) -> int:
    """Return the hits of a cache that drops what was used longest ago."""
    held: OrderedDict[object, None] = OrderedDict()
    num_hits = 0
    for block in uses:
        num_hits += block in held
        held[block] = None
        held.move_to_end(block)
        if len(held) > capacity:
            held.popitem(last=False)
    return num_hits
