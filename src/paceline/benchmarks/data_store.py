"""`bench data_store`: reading samples from an object store over a slow link, with caches."""

import contextlib
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.comm.join import join
from paceline.data import Interval, Loader, Source
from paceline.data.orders import Indices
from paceline.data.storage import Storage, StoreSettings, open_storage, read_counters
from paceline.data.storage.base import Upcoming
from paceline.errors import PacelineError
from paceline.registry import register
from paceline.testing.netlab import Netlab, address
from paceline.testing.netlab import read_counters as read_link
from paceline.testing.object_server import FaultProxy, ObjectServer

_BLOCK_BYTES = 2**20
_LITTLE_MEMORY_BYTES = 16 * _BLOCK_BYTES
"""Memory of the host whose disk holds half of the data: for blocks fetched ahead, and copies of those on disk."""
_FRAME_SHARE = 1514 / 1448
"""Bytes over the link for each byte of a full TCP segment; the link's counters have one header for each bundle."""
_URL = "s3://bucket/samples"


@register("data_store")
class DataStoreBenchmark(Benchmark):
    """Samples from an object store behind a link of limited bandwidth and a proxy that delays each answer; needs root.

    One host reads all twice with an empty cache that holds everything; then with a disk for half, samples of 1 MiB
    (small ones in a shuffled order would need nearly all blocks in each step); then several hosts share the link of the
    store, and hand blocks to each other. Nothing is computed with the samples.
    """

    megabytes: int = Field(96, ge=64)
    """Size of the data, in MiB."""
    sample_bytes: int = Field(24576, ge=1024)
    """Size of a sample."""
    global_batch: int = Field(64, ge=1)
    """Samples of a step, over all hosts."""
    bandwidth_bits_per_s: float = Field(100e6, gt=0)
    """Bandwidth of the link of each host, the store's among them."""
    delay_s: float = Field(0.02, ge=0)
    """Time by which each answer of the store is delayed."""
    num_hosts: int = Field(4, ge=2)
    """Number of hosts that share the store's link."""

    def measure(self) -> list[BenchmarkRow]:
        """Return the rows."""
        files = {
            f"bucket/samples/{number:05d}.bin": np.random.default_rng(number).bytes(4 * _BLOCK_BYTES)
            for number in range(self.megabytes // 4)
        }
        data_bytes = sum(map(len, files.values()))
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            (one,) = self._run(files, 1, 2, 2 * data_bytes, Path(folder) / "whole", self.sample_bytes)
            rows += self._compare_epochs(one)
            (half,) = self._run(files, 1, 3, data_bytes // 2, Path(folder) / "half", _BLOCK_BYTES)
            rows += self._compare_hits(half)
            many = self._run(files, self.num_hosts, 1, 2 * data_bytes, Path(folder) / "many", self.sample_bytes)
        fetched = sum(each["counters"]["store_bytes"] for each in many) / 1e6
        case = f"{self.num_hosts} hosts, empty caches, blocks handed on"
        rows.append(self._row(case, "from the store", "MB", fetched, data_bytes / 1e6, "the data once"))
        return rows

    def _run(
        self, files: dict[str, bytes], num_hosts: int, num_epochs: int, disk_bytes: int, folder: Path, sample_bytes: int
    ) -> list[dict[str, Any]]:
        """Return what each host has measured, with the store on a host of its own."""
        with contextlib.ExitStack() as stack:
            lab = stack.enter_context(Netlab(num_hosts + 1, self.bandwidth_bits_per_s))
            server = lab.call(0, lambda: stack.enter_context(ObjectServer(files).running()))
            proxy = FaultProxy(server.endpoint, delay_s=self.delay_s, host=address(0))
            lab.call(0, lambda: stack.enter_context(proxy.running()))
            results = lab.run(
                read_epochs,
                {
                    "num_files": len(files),
                    "sample_bytes": sample_bytes,
                    "global_batch": max(num_hosts, self.global_batch * self.sample_bytes // sample_bytes),
                    "num_epochs": num_epochs,
                    "disk_bytes": disk_bytes,
                    "folder": str(folder),
                },
                first_host=1,
                timeout_s=300,
                environment={
                    "AWS_ENDPOINT_URL": proxy.url,
                    "AWS_ACCESS_KEY_ID": "bench",
                    "AWS_SECRET_ACCESS_KEY": "bench",
                    "AWS_REGION": "us-east-1",
                },
            )
        for result in results:
            if result.exit_code != 0:
                raise PacelineError(f"host {result.rank} must read all samples, but failed:\n{result.output}")
        return [result.value for result in results]

    def _compare_epochs(self, one: dict[str, Any]) -> list[BenchmarkRow]:
        first, second = one["epochs"]
        sent = self.bandwidth_bits_per_s * first["duration_s"] / 8e6
        case = f"1 host, {self.bandwidth_bits_per_s / 1e6:g} Mbit/s and {self.delay_s * 1e3:g} ms, cold"
        over_link = first["link_bytes"] * _FRAME_SHARE / 1e6
        busy = self._row(case, "over the link in epoch 1, headers included", "MB", over_link, sent, "a busy link")
        again, at_first = second["store_bytes"] / 1e6, first["store_bytes"] / 1e6
        return [busy, self._row("the same, warm", "from the store in epoch 2", "MB", again, at_first, "epoch 1")]

    def _compare_hits(self, half: dict[str, Any]) -> list[BenchmarkRow]:
        uses = [tuple(use) for use in half["uses"]]
        room = self.megabytes // 2
        hits = len(uses) - half["counters"]["num_fetched"]
        case = "1 host, a disk for half the data, 3 epochs, samples of 1 MiB"
        return [
            self._row(case, "hits", "", hits, _count_best_hits(uses, room), "the best there is (Belady)"),
            self._row(case, "hits", "", hits, _count_lru_hits(uses, room), "least recently used"),
        ]

    def _row(self, case: str, metric: str, unit: str, ours: float, reference: float, name: str) -> BenchmarkRow:
        return BenchmarkRow(self.name, case, metric, unit, ours, reference, name, ours / reference)


class _StoredSamples(Source):
    """Samples of equal size in files of 4 MiB; what a file has left over is not used."""

    def __init__(self, storage: Storage, num_files: int, sample_bytes: int) -> None:
        self._storage, self._sample_bytes = storage, sample_bytes
        self._per_file = 4 * _BLOCK_BYTES // sample_bytes
        self._num_files = num_files

    def __len__(self) -> int:
        return self._num_files * self._per_file

    def locate(self, indices: Indices) -> list[tuple[str, int, int]]:
        """Return where samples lie."""
        size = self._sample_bytes
        return [
            (f"{index // self._per_file:05d}.bin", index % self._per_file * size, size) for index in indices.tolist()
        ]

    def expect(self, upcoming: Upcoming) -> None:
        """Tell the storage what comes next."""
        self._storage.expect(upcoming, self.locate)

    def read(self, indices: Indices) -> torch.Tensor:
        """Return the bytes of samples."""
        contents = [self._storage.read(*extent) for extent in self.locate(indices)]
        return torch.from_numpy(np.frombuffer(b"".join(contents), np.uint8).reshape(len(contents), -1).copy())


def read_epochs(
    num_files: int, sample_bytes: int, global_batch: int, num_epochs: int, disk_bytes: int, folder: str
) -> dict[str, Any]:
    """Read all samples, as one of the hosts, and return times and bytes of each epoch."""
    with join() as group:
        block_overhead = disk_bytes // _BLOCK_BYTES * 32
        settings = StoreSettings(
            disk_folder=Path(folder) / str(group.rank),
            disk_bytes=disk_bytes + block_overhead,
            memory_bytes=_LITTLE_MEMORY_BYTES if sample_bytes == _BLOCK_BYTES else 64 * _BLOCK_BYTES,
        )
        storage = open_storage(_URL, settings)
        source = _StoredSamples(storage, num_files, sample_bytes)
        loader = Loader(source, global_batch, num_epochs=num_epochs)
        epochs = list(_time_epochs(loader, len(source)))
        group.gather_documents(0, name="end")  # whoever has blocks stays until all have read
        counters = read_counters()[0].__dict__
        storage.close()
    uses: list[tuple[str, int]] = []
    if os.environ["WORLD_SIZE"] == "1":
        for start in range(0, num_epochs * len(source), global_batch):
            for path, begin, size in source.locate(loader.order.samples_at(Interval(start, start + global_batch))):
                uses += [
                    (path, block) for block in range(begin // _BLOCK_BYTES, (begin + size - 1) // _BLOCK_BYTES + 1)
                ]
    return {"epochs": epochs, "counters": dict(counters), "uses": uses}


def _time_epochs(loader: Loader, num_samples: int) -> Iterator[dict[str, float]]:
    began_s, link, stored, epoch = time.perf_counter(), read_link().received_bytes, 0, 1
    for batch in loader:
        if batch.interval.stop >= epoch * num_samples:
            now_s, received, counters = time.perf_counter(), read_link().received_bytes, read_counters()[0]
            yield {
                "duration_s": now_s - began_s,
                "link_bytes": received - link,
                "store_bytes": counters.store_bytes - stored,
            }
            began_s, link, stored, epoch = now_s, received, counters.store_bytes, epoch + 1


def _count_best_hits(uses: Sequence[Hashable], room: int) -> int:
    """Return the hits of a cache that drops, or does not take, what is used farthest in the future."""
    following: dict[Hashable, int] = {}
    next_use = [0] * len(uses)
    for place in reversed(range(len(uses))):
        next_use[place] = following.get(uses[place], len(uses))
        following[uses[place]] = place
    held: dict[Hashable, int] = {}
    num_hits = 0
    for place, block in enumerate(uses):
        num_hits += block in held
        held[block] = next_use[place]
        if len(held) > room:
            del held[max(held, key=held.__getitem__)]
    return num_hits


def _count_lru_hits(uses: Sequence[Hashable], room: int) -> int:
    """Return the hits of a cache that drops what was used longest ago."""
    held: OrderedDict[Hashable, None] = OrderedDict()
    num_hits = 0
    for block in uses:
        num_hits += block in held
        held[block] = None
        held.move_to_end(block)
        if len(held) > room:
            held.popitem(last=False)
    return num_hits
