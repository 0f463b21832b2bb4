"""Blocks in memory and on disk: what is fetched, when, and what makes room."""

import gc
import os
import signal
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from blake3 import blake3
from store_fixtures import QUICK, faulty_store
from stored_samples import CountingStorage, StoredSamples, count_best_hits, count_lru_hits, make_files

from paceline.data import Interval, Loader
from paceline.data.storage import CachedStorage, CacheWarning, DiskCache, SharedStorage, StoreSettings, open_storage
from paceline.data.storage.blocks import find_tag
from paceline.errors import DataError, StorageError

BLOCK = 1024
NUM_FILES, FILE_BYTES, SAMPLE_BYTES = 20, 8 * BLOCK, 256
NUM_BLOCKS = NUM_FILES * FILE_BYTES // BLOCK


@pytest.fixture
def store():
    return CountingStorage(make_files(NUM_FILES, FILE_BYTES))


@pytest.fixture
def opened():
    found: list[CachedStorage] = []
    yield found.append
    for storage in found:
        storage.close()


def cache(store, opened, *, memory=4, disk=None, **settings):
    cached = CachedStorage(
        store, memory_bytes=memory * BLOCK, disk=disk, block_bytes=BLOCK, **{"num_parallel": 2, **settings}
    )
    opened(cached)
    return cached


def disk_of(folder, store, num_blocks):
    return DiskCache(folder, num_blocks * (BLOCK + 32), find_tag(store.url))


def train(storage, num_epochs=1, num_files=NUM_FILES, **settings):
    source = StoredSamples(storage, num_files, FILE_BYTES, SAMPLE_BYTES)
    loader = Loader(source, 16, num_epochs=num_epochs, seed=3, prefetch=1, **settings)
    return loader, torch.cat([batch.data for batch in loader])


def uses_of(loader, storage, num_epochs, num_files, batch=16):
    """Return the blocks that each step uses, step after step."""
    source = StoredSamples(storage, num_files, FILE_BYTES, SAMPLE_BYTES)
    uses = []
    for start in range(0, num_epochs * len(source), batch):
        extents = source.locate(loader.order.samples_at(Interval(start, start + batch)))
        uses += [(path, begin // BLOCK) for path, begin, _ in extents]
    return uses


def test_reads_through_the_cache_equal_those_of_the_store(store, opened):
    cached = cache(store, opened)
    content = store.files["0003.bin"]
    assert cached.read("0003.bin") == content
    assert cached.read("0003.bin", 1000, 100) == content[1000:1100]
    assert cached.read("0003.bin", 8000) == content[8000:]
    assert cached.read_ranges("0003.bin", [(5000, 2000), (0, 1), (3, 0)]) == [content[5000:7000], content[:1], b""]
    assert [file.path for file in cached.list_files("000")] == [f"{n:04d}.bin" for n in range(10)]
    with pytest.raises(DataError, match=r"0003\.bin must have 8193 bytes, but has 8192"):
        cached.read("0003.bin", 8190, 3)
    with pytest.raises(DataError, match=r"none must be readable, but there is no such file"):
        cached.read("none")
    store.files["odd.bin"] = b"x" * 1500
    assert cached.read("odd.bin") == b"x" * 1500


def test_a_block_is_fetched_once_however_many_ask(store, opened):
    arrived, gate = threading.Event(), threading.Event()

    def wait():
        arrived.set()
        assert gate.wait(30)

    store.gate = wait
    cached = cache(store, opened)
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(cached.read("0000.bin", 10, 5))) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert arrived.wait(30)
    gate.set()
    for thread in threads:
        thread.join()
    assert found == [store.files["0000.bin"][10:15]] * 6
    assert store.reads == [("0000.bin", 0, BLOCK)]


def test_all_samples_arrive_in_order_and_each_block_is_fetched_once_where_there_is_room(store, opened, tmp_path):
    expected = train(store)[1]
    cached = cache(store, opened, disk=disk_of(tmp_path, store, NUM_BLOCKS))
    store.reads.clear()
    assert torch.equal(train(cached, num_epochs=2)[1][: len(expected)], expected)
    assert sorted(store.reads) == sorted(set(store.reads))
    assert len(store.reads) == NUM_BLOCKS
    assert cached.counters.num_fetched == NUM_BLOCKS
    assert cached.counters.store_bytes == NUM_FILES * FILE_BYTES
    store.reads.clear()
    again = cache(store, opened, disk=disk_of(tmp_path, store, NUM_BLOCKS))  # the next run
    assert torch.equal(train(again)[1], expected)
    assert store.reads == []


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_half_the_room_has_nearly_the_hits_of_the_best_cache_there_is(opened, tmp_path, where):
    num_files = 80
    store = CountingStorage(make_files(num_files, FILE_BYTES))
    room = num_files * FILE_BYTES // BLOCK // 2
    disk = disk_of(tmp_path, store, room) if where == "disk" else None
    cached = cache(store, opened, memory=16 if disk else room, disk=disk)
    loader, _ = train(cached, num_epochs=3, num_files=num_files)
    uses = uses_of(loader, cached, 3, num_files)
    hits = len(uses) - len(store.reads)
    assert hits >= 0.95 * count_best_hits(uses, room)
    assert hits > 1.5 * count_lru_hits(uses, room)


def test_blocks_are_fetched_before_anyone_asks(store, opened):
    asked = threading.Event()
    held = threading.Semaphore(0)

    def wait():
        asked.set()
        assert held.acquire(timeout=30)

    store.gate = wait
    cached = cache(store, opened, memory=8)
    source = StoredSamples(cached, NUM_FILES, FILE_BYTES, SAMPLE_BYTES)
    loader = Loader(source, 16, num_epochs=1, shuffle=False)
    batches = iter(loader)
    for _ in range(1 + 4 + 16):
        held.release()
    first = next(batches)
    assert asked.is_set()
    deadline = threading.Event()
    for _ in range(3000):
        if len(store.reads) >= 8:
            break
        deadline.wait(0.01)
    assert len(store.reads) >= 8  # more than the batches that were read, which need 4 each
    assert first.data.shape == (16, SAMPLE_BYTES)
    for _ in range(1000):
        held.release()
    batches.close()


def test_small_data_is_looked_up_a_few_epochs_ahead_and_no_further(store, opened):
    """However long the training: 2**20 positions of 80 samples would be a core's work for a minute."""
    cached = cache(store, opened, memory=8)
    source = StoredSamples(cached, 1, 8 * BLOCK, SAMPLE_BYTES)
    farthest = []
    locate = source.locate
    source.locate = lambda samples: farthest.append(len(samples)) or locate(samples)
    batches = iter(Loader(source, 16, num_steps=100_000, seed=3))
    next(batches)
    deadline_s = time.monotonic() + 30
    while sum(farthest) < 2 * 8192 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    time.sleep(0.5)
    batches.close()
    assert 2 * 8192 <= sum(farthest) < 4 * 8192


def test_files_are_looked_up_beside_each_other(store, opened):
    asked, together, find = set(), threading.Event(), store.find

    def wait(path):
        asked.add(path)
        if len(asked) == 3:
            together.set()
        assert together.wait(timeout=30)
        return find(path)

    store.find = wait
    source = StoredSamples(cache(store, opened), 3, FILE_BYTES, SAMPLE_BYTES)
    assert len(list(Loader(source, 32, num_epochs=1, prefetch=1, shuffle=False))) == 3


def test_a_storage_that_nobody_closed_leaves_no_threads(store):
    before = set(threading.enumerate())
    shared = SharedStorage(CachedStorage(store, memory_bytes=8 * BLOCK, block_bytes=BLOCK))
    train(shared)
    begun = set(threading.enumerate()) - before
    assert {thread.name.rsplit("-", 1)[0] for thread in begun} >= {"paceline-fetch", "paceline-shared"}
    del shared
    deadline_s = time.monotonic() + 30
    while any(thread.is_alive() for thread in begun) and time.monotonic() < deadline_s:
        gc.collect()  # again and again: a thread that is at work holds the storage until it is done
        time.sleep(0.05)
    assert [thread.name for thread in begun if thread.is_alive()] == []


def test_loader_processes_share_the_cache_of_the_worker(store, opened, tmp_path):
    expected = train(store)[1]
    cached = cache(store, opened, memory=32, disk=disk_of(tmp_path, store, NUM_BLOCKS))
    shared = SharedStorage(cached)
    store.reads.clear()
    assert torch.equal(train(shared, num_processes=2)[1], expected)
    assert len(store.reads) == NUM_BLOCKS
    shared.close()


def test_errors_of_a_loader_process_are_those_of_the_store(store, opened):
    cached = cache(store, opened)
    shared = SharedStorage(cached)
    del store.files["0007.bin"]
    with pytest.raises(DataError, match=r"0007\.bin must be readable, but there is no such file"):
        train(shared, num_processes=1)
    with pytest.raises(DataError, match=r"0007\.bin must be readable, but there is no such file"):
        train(cached)
    shared.close()


def test_a_forked_process_without_its_parent_says_so(store, opened):
    shared = SharedStorage(cache(store, opened))
    shared.close()
    shared._server.thread.join()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            shared.find("0000.bin")
        except StorageError as error:
            os._exit(7 if "must be read through the process that opened it" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_flipped_bits_on_the_way_are_fetched_again_and_those_of_the_file_are_an_error(opened, monkeypatch):
    content = np.random.default_rng(0).bytes(3 * 2**20 + 5)
    digests = [blake3(content[start : start + 2**20]).hexdigest() for start in range(0, len(content), 2**20)]
    with faulty_store(monkeypatch, {"bucket/a.bin": content}) as (server, proxy):
        flips = iter(["flip", "", "flip", "flip", ""])
        proxy.fault = lambda method, path: next(flips, "") if method == "GET" else ""
        storage = open_storage("s3://bucket", QUICK, digests=lambda path: digests)
        assert storage.read("a.bin") == content
        assert storage.storage.counters.num_damaged == 3
        storage.close()
        proxy.fault = lambda method, path: "flip" if method == "GET" else ""
        storage = open_storage("s3://bucket", QUICK, digests=lambda path: digests)
        with pytest.raises(
            DataError, match=r"s3://bucket/a\.bin must match its manifest, but its bytes from \d+ to \d+"
        ):
            storage.read("a.bin")
        storage.close()
        proxy.fault = lambda method, path: ""
        storage = open_storage("s3://bucket", QUICK, digests=lambda path: None)
        assert storage.read("a.bin", 5, 9) == content[5:14]
        server.objects["bucket/a.bin"] = content[::-1]  # between two epochs
        assert storage.read("a.bin", 7, 9) == content[7:16]
        with pytest.raises(DataError, match=r"a\.bin must stay as it was when it was first read, but it has changed"):
            storage.read("a.bin", 2 * 2**20, 9)
        storage.close()


def test_an_object_that_changes_between_two_epochs_is_never_trained_on(opened, monkeypatch):
    """Blocks of 1 MiB, of which memory holds a third: the second epoch fetches most of them again."""
    objects = {f"bucket/data/{name}": content for name, content in make_files(24, 2**20).items()}
    first, second = [], []

    def train_and_change(source, server):
        for batch in Loader(source, 3, num_epochs=2, seed=3, prefetch=1):
            (first if batch.interval.stop <= 24 else second).extend(bytes(row.numpy()) for row in batch.data)
            if len(first) == 24:
                server.objects = {name: content[::-1] for name, content in objects.items()}

    with faulty_store(monkeypatch, objects) as (server, _):
        storage = open_storage("s3://bucket/data", QUICK.model_copy(update={"memory_bytes": 8 * 2**20}))
        opened(storage)
        with pytest.raises(DataError, match=r"s3://bucket/data/.*bin must stay as it was when .* has changed since"):
            train_and_change(StoredSamples(storage, 24, 2**20, 2**20), server)
    assert sorted(first) == sorted(objects.values())
    assert set(second) <= set(first)


def test_without_a_version_only_blocks_with_a_digest_outlast_a_run(opened, tmp_path):
    for content, num_fetched in ((b"old", [1, 1]), (b"new", [1, 1]), (b"new", [1, 0])):
        files = {"with": content * 100, "without": content * 100}
        store = CountingStorage(files, version="")
        digests = {"with": [blake3(files["with"]).hexdigest()]}
        cached = cache(store, opened, disk=disk_of(tmp_path, store, 8), digests=digests.get)
        assert [cached.read(path) for path in files] == list(files.values())
        cached.close()
        assert [sum(path == read for read, _, _ in store.reads) for path in ("without", "with")] == num_fetched


def test_a_full_disk_means_streaming_with_one_warning(store, opened, tmp_path, monkeypatch):
    disk = disk_of(tmp_path, store, NUM_BLOCKS)
    cached = cache(store, opened, disk=disk, num_parallel=1)
    write = os.write

    def full(descriptor, content):
        if len(content) >= 32 and not bytes(content[:1]) == b"+":
            raise OSError(28, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr("paceline.data.storage.disk_cache.os.write", full)
    expected = train(store)[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(train(cached)[1], expected)
    told = [str(one.message) for one in caught if one.category is CacheWarning]
    assert len(told) == 1
    assert f"the cache in {tmp_path} takes no more blocks: No space left on device" in told[0]
    assert not list((tmp_path / "parts").iterdir())


def test_a_folder_that_cannot_be_written_means_streaming(store, opened, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.warns(CacheWarning, match="takes no more blocks: Not a directory"):
        disk = disk_of(tmp_path / "taken", store, 4)
    assert cache(store, opened, disk=disk).read("0000.bin", 0, 5) == store.files["0000.bin"][:5]


def test_the_cache_on_disk_is_where_the_settings_say(monkeypatch, tmp_path):
    with faulty_store(monkeypatch, {"bucket/a.bin": b"abc"}) as (server, _):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        for folder in (None, tmp_path / "other"):
            storage = open_storage("s3://bucket", StoreSettings(disk_folder=folder))
            assert storage.read("a.bin") == b"abc"
            storage.close()
        assert server.read_bytes == 6
        storage = open_storage("s3://bucket", StoreSettings())
        assert storage.read("a.bin") == b"abc"
        storage.close()
        assert server.read_bytes == 6
    assert (tmp_path / "paceline/blocks/journal").exists()
    assert (tmp_path / "other/journal").exists()
