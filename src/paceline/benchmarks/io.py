"""`bench io`: reads, writes and look-ups of a disk, of memory and of a store."""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import numpy as np
from pydantic import Field

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.data.storage import LocalStorage, Storage, open_store
from paceline.registry import register
from paceline.testing.object_server import ObjectServer

_LUSTRE = {"read": 1200.0, "write": 800.0, "look-ups": 200_000.0}
"""GB/s and operations/s of a Lustre file system of a large machine, over thousands of disks and all its clients."""


@register("io")
class InputOutputBenchmark(Benchmark):
    """Bytes read and written, and files looked up, by one process with one thread, beside a large machine's Lustre.

    The reference serves thousands of clients at once: a ratio says how many processes like this one it would feed, not
    that either is better. Reads are warm: the system's cache has the files.
    """

    folder: str | None = None
    """Folder on the disk to measure; the system's own for temporary files by default."""
    url: str | None = None
    """URL of a folder of a store to measure; by default one in memory here, over S3."""
    file_bytes: int = Field(8 * 2**20, ge=1)
    """Size of a file."""
    num_files: int = Field(16, ge=1)
    """Number of files."""
    num_lookups: int = Field(1000, ge=1)
    """Number of files that are looked up."""
    num_rounds: int = Field(3, ge=1)
    """Rounds, over all places in turn; the median counts."""

    def measure(self) -> list[BenchmarkRow]:
        """Return the rows."""
        with ExitStack() as stack:
            places = self._open(stack)
            rates: dict[tuple[str, str], list[float]] = {}
            for _ in range(self.num_rounds):
                for place, storage in places.items():
                    for what, rate in self._measure_once(storage).items():
                        rates.setdefault((place, what), []).append(rate)
            for storage in places.values():
                storage.remove([f"bench-io-{number}" for number in range(self.num_files)])
        rows = []
        for (place, what), found in rates.items():
            ours, unit = statistics.median(found), "1/s" if what == "look-ups" else "GB/s"
            reference = _LUSTRE[what]
            rows.append(
                BenchmarkRow(self.name, place, what, unit, ours, reference, "Lustre, all clients", ours / reference)
            )
        return rows

    def _open(self, stack: ExitStack) -> dict[str, Storage]:
        disk = Path(tempfile.mkdtemp(dir=self.folder))
        stack.callback(shutil.rmtree, disk)
        places: dict[str, Storage] = {"disk": LocalStorage(disk)}
        if Path("/dev/shm").is_dir():
            memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
            stack.callback(shutil.rmtree, memory)
            places["tmpfs"] = LocalStorage(memory)
        if self.url is not None:
            places[self.url] = open_store(self.url)
        else:
            server = stack.enter_context(ObjectServer().running())
            account = {"AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
            stack.enter_context(patch.dict(os.environ, account))
            places["store in memory, over S3 here"] = open_store("s3://bucket/bench")
        return places

    def _measure_once(self, storage: Storage) -> dict[str, float]:
        content = np.random.default_rng(0).bytes(self.file_bytes)
        names = [f"bench-io-{number}" for number in range(self.num_files)]
        gigabytes = self.file_bytes * self.num_files / 1e9

        def look_up() -> None:
            for number in range(self.num_lookups):
                storage.find(names[number % len(names)])

        return {
            "write": gigabytes / _time(lambda: [storage.write(name, content) for name in names]),
            "read": gigabytes / _time(lambda: [storage.read(name) for name in names]),
            "look-ups": self.num_lookups / _time(look_up),
        }


def _time(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s
