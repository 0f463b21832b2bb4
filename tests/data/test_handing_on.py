"""Workers that hand blocks to each other, also when one is away or a stranger comes."""

import contextlib
import socket
import threading

import numpy as np
import pytest
import torch
from stored_samples import CountingStorage, StoredSamples, make_files
from torch.distributed import HashStore

from paceline.comm.control.errors import ControlError
from paceline.data import Interval, Loader
from paceline.data.storage import CachedStorage, DiskCache
from paceline.data.storage.blocks import find_tag
from paceline.data.storage.handing_on import HandingOn, _Connection
from paceline.data.upcoming import UpcomingSamples
from paceline.testing.processes import run_processes

BLOCK = 1024
NUM_FILES, FILE_BYTES, SAMPLE_BYTES = 12, 8 * BLOCK, 256
NUM_BLOCKS = NUM_FILES * FILE_BYTES // BLOCK


@pytest.fixture
def workers(tmp_path):
    """Three workers, each with its own cache and a store that counts its reads."""
    files, meeting = make_files(NUM_FILES, FILE_BYTES), HashStore()
    caches = []
    for rank in range(3):
        store = CountingStorage(files)
        disk = DiskCache(tmp_path / str(rank), NUM_BLOCKS * (BLOCK + 32), find_tag(store.url))
        cached = CachedStorage(store, memory_bytes=8 * BLOCK, disk=disk, block_bytes=BLOCK, num_parallel=2)
        cached.peers = HandingOn(rank, 3, meeting, cached.give, "127.0.0.1")
        caches.append(cached)
    yield caches
    for cached in caches:
        cached.close()


def read_share(cached, rank, num_epochs, found):
    source = StoredSamples(cached, NUM_FILES, FILE_BYTES, SAMPLE_BYTES)
    loader = Loader(source, 12, num_epochs=num_epochs, seed=5)
    order = loader.order
    parts = [Interval(start + 4 * rank, start + 4 * rank + 4) for start in range(0, num_epochs * len(source), 12)]
    upcoming = UpcomingSamples(
        order,
        0,
        loader._ending,
        lambda start: (Interval(start, start + 12), [Interval(start + 4 * rank, start + 4 * rank + 4)]),
    )
    source.expect(upcoming)
    for part in parts:
        upcoming.position = part.start - 4 * rank
        found[rank].append((part, source.read(order.samples_at(part))))


def read_all(caches, num_epochs):
    found = [[] for _ in caches]
    threads = [
        threading.Thread(target=read_share, args=(cached, rank, num_epochs, found))
        for rank, cached in enumerate(caches)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_block_leaves_the_store_once_for_all_workers(workers):
    found = read_all(workers, num_epochs=2)
    reads = [read for cached in workers for read in cached.storage.reads]
    assert len(reads) == NUM_BLOCKS
    assert len(set(reads)) == NUM_BLOCKS
    assert sum(cached.counters.peer_bytes for cached in workers) > 0
    assert sum(cached.counters.handed_bytes for cached in workers) == sum(c.counters.peer_bytes for c in workers)
    plain = StoredSamples(CountingStorage(make_files(NUM_FILES, FILE_BYTES)), NUM_FILES, FILE_BYTES, SAMPLE_BYTES)
    order = Loader(plain, 12, num_epochs=2, seed=5).order
    for share in found:
        assert len(share) == 2 * len(plain) // 12
        for part, samples in share:
            assert torch.equal(samples, plain.read(order.samples_at(part)))


def test_a_worker_that_is_away_is_done_without(workers):
    workers[2].peers.close()
    workers[2].peers._listener.close()
    found = read_all(workers[:2], num_epochs=1)
    assert [len(share) for share in found] == [NUM_FILES * FILE_BYTES // SAMPLE_BYTES // 12] * 2


def test_a_worker_that_is_away_is_not_asked_for_each_block(workers, monkeypatch):
    first = workers[0]
    first._register("0000.bin")
    blocks = [block for block in first._blocks if not first.peers.is_home(block.key)]
    asked = []

    def refuse(home, block):
        asked.append(home)
        raise OSError("away")

    monkeypatch.setattr(first.peers, "_ask", refuse)
    assert [first.peers.fetch(block) for block in 2 * blocks] == [None] * 2 * len(blocks)
    assert sorted(asked) == sorted({first.peers._home_of(block.key) for block in blocks})


def test_a_damaged_block_is_not_taken_from_a_peer(workers, monkeypatch):
    first, second = workers[:2]
    first._register("0000.bin")
    number = next(n for n, block in enumerate(first._blocks) if second.peers.is_home(block.key))
    block = first._blocks[number]
    honest = _Connection.receive_body

    def flip(self, num_bytes):
        body = bytearray(honest(self, num_bytes))
        body[3] ^= 1
        return bytes(body)

    monkeypatch.setattr(_Connection, "receive_body", flip)
    assert first.peers.fetch(block) is None
    monkeypatch.undo()
    assert first.peers.fetch(block) == first.storage.files["0000.bin"][block.start : block.start + BLOCK]


def test_a_stranger_gets_nothing(workers):
    host, port = workers[0].peers._address
    with pytest.raises((OSError, ControlError)):
        _Connection.connect(host, port, bytes(32))
    with socket.create_connection((host, port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(2000))
        stranger.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""


def test_a_file_that_is_another_one_there_is_not_taken(workers):
    first = workers[0]
    first._register("0000.bin")
    for block in first._blocks:
        if not first.peers.is_home(block.key):
            assert first.peers.fetch(block._replace(version="older")) is None
            break
    assert np.all([first.give(block.path, "older", block.start) is None for block in first._blocks])


def train_together(folder: str) -> dict[str, int]:
    """A worker of a real group, which finds the others by itself."""
    import paceline

    with paceline.join() as group:
        store = CountingStorage(make_files(NUM_FILES, FILE_BYTES))
        disk = DiskCache(__import__("pathlib").Path(folder) / str(group.rank), 10**7, find_tag(store.url))
        cached = CachedStorage(
            store, memory_bytes=8 * BLOCK, disk=disk, block_bytes=BLOCK, num_parallel=2, hands_on=True
        )
        source = StoredSamples(cached, NUM_FILES, FILE_BYTES, SAMPLE_BYTES)
        num_samples = sum(batch.num_samples for batch in paceline.Loader(source, 12, num_epochs=2))
        group.gather_documents(0, name="end")  # a home stays until nobody asks any more
        cached.close()
        return {"num_samples": num_samples, "num_fetched": cached.counters.num_fetched}


def test_workers_of_a_group_find_each_other(tmp_path):
    results = [result.value for result in run_processes(2, train_together, {"folder": str(tmp_path)})]
    assert sum(result["num_samples"] for result in results) == 2 * NUM_FILES * FILE_BYTES // SAMPLE_BYTES
    assert sum(result["num_fetched"] for result in results) == NUM_BLOCKS
