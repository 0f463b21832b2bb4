"""Object stores: reads, writes, and what servers and networks do to them."""

import http.client
import itertools
import subprocess
import sys

import numpy as np
import pytest
from store_fixtures import QUICK, faulty_store, moto_server, use_endpoint

from paceline.data import FileSource
from paceline.data.formats.index import BLOCKS, MANIFEST, RECORDS, write_index
from paceline.data.formats.opening import INDEX_FOLDER, open_place
from paceline.data.storage import FsspecStorage, LocalStorage, ObjectStorage, StoreSettings, is_url, objects, open_store
from paceline.errors import DataError, SettingsError, StorageError
from paceline.testing.object_server import FaultProxy, ObjectServer

CONTENT = bytes(range(256)) * 2000


@pytest.fixture
def store(monkeypatch):
    with faulty_store(monkeypatch, {"bucket/data/a.bin": CONTENT, "bucket/data/b/c.bin": b"abc"}) as (server, proxy):
        yield server, proxy, open_store("s3://bucket/data", QUICK)


def test_a_path_is_a_folder_and_an_url_a_store(tmp_path, monkeypatch):
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    assert isinstance(open_store(tmp_path), LocalStorage)
    assert open_store(f"file://{tmp_path}").url == str(tmp_path)
    assert isinstance(open_store("s3://bucket/data"), ObjectStorage)
    assert isinstance(open_store("memory://data"), FsspecStorage)
    assert [is_url(place) for place in (tmp_path, "a/b", "s3://b", f"file://{tmp_path}")] == [False, False, True, False]
    with pytest.raises(SettingsError, match=r"file://a/b must name a path from the root"):
        open_store("file://a/b")
    with pytest.raises(SettingsError, match=r"nowhere://x must be of a file system that fsspec knows"):
        open_store("nowhere://x")
    with pytest.raises(SettingsError, match=r"s3:// must name a bucket or host"):
        open_store("s3://")


def test_files_of_a_bucket_are_listed_read_and_written(store):
    _, _, storage = store
    assert storage.url == "s3://bucket/data"
    assert [(file.path, file.num_bytes) for file in storage.list_files()] == [("a.bin", 512000), ("b/c.bin", 3)]
    assert [file.path for file in storage.list_files("b/")] == ["b/c.bin"]
    assert [file.path for file in storage.list_files("a")] == ["a.bin"]
    assert storage.read("a.bin") == CONTENT
    assert storage.read("a.bin", 7, 1000) == CONTENT[7:1007]
    assert storage.read("a.bin", len(CONTENT) - 5) == CONTENT[-5:]
    assert storage.read("a.bin", 3, 0) == b""
    assert storage.read_ranges("a.bin", [(500, 20), (0, 3)]) == [CONTENT[500:520], CONTENT[:3]]
    assert storage.find("none") is None
    before = storage.find("b/c.bin")
    storage.write("b/c.bin", b"abcd")
    assert storage.read("b/c.bin") == b"abcd"
    assert storage.find("b/c.bin").version != before.version
    storage.remove(["b/c.bin", "never.bin"])
    assert storage.find("b/c.bin") is None


@pytest.mark.parametrize("fault", ["drop", "503", "truncate", "stall", "short"])
def test_what_passes_is_asked_for_again_from_where_it_broke(store, fault):
    _, proxy, storage = store
    proxy.stall_s = 2.5
    faults = itertools.chain([fault] * 2, itertools.repeat(""))
    proxy.fault = lambda method, path: next(faults)
    assert storage.read("a.bin", 1000, 100_000) == CONTENT[1000:101_000]
    ranges = [asked for method, _, asked in proxy.requests if method == "GET"]
    if fault in ("truncate", "stall"):  # two thirds of it never travel again
        assert ranges == ["bytes=1000-100999", "bytes=51000-100999", "bytes=76000-100999"]
    else:
        assert ranges == ["bytes=1000-100999"] * 3


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("403", DataError, r"s3://bucket/data/a\.bin must allow to read it, but: .*403 Forbidden; check AWS_ACCESS"),
        ("503", StorageError, r"data/a\.bin must answer within 0\.5 s, but: .*503.*; check the network"),
        ("drop", StorageError, r"data/a\.bin must answer within 0\.5 s, but: .*; check the network"),
    ],
)
def test_what_stays_is_one_clear_error(store, fault, kind, message):
    _, proxy, _ = store
    proxy.fault = lambda method, path: fault
    storage = open_store("s3://bucket/data", StoreSettings(patience_s=0.5))
    with pytest.raises(kind, match=message) as caught:
        storage.read("a.bin", 0, 100)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_a_store_that_always_gives_too_little_is_named(store):
    _, proxy, _ = store
    proxy.fault = lambda method, path: "short"
    storage = open_store("s3://bucket/data", StoreSettings(patience_s=0.5))
    with pytest.raises(
        StorageError, match=r"a\.bin must answer in full within 0\.5 s, but breaks off: .*got 0\.\.50000; check"
    ):
        storage.read("a.bin", 0, 100_000)


def test_lists_that_break_off_are_asked_for_as_long_as_patience_lasts(store, monkeypatch):
    monkeypatch.setattr(objects, "_FIRST_PAUSE_S", 0.01)
    _, proxy, storage = store
    faults = itertools.chain(["truncate"] * 7, itertools.repeat(""))
    proxy.fault = lambda method, path: next(faults)
    assert [file.path for file in storage.list_files()] == ["a.bin", "b/c.bin"]
    proxy.fault = lambda method, path: "truncate"
    with pytest.raises(StorageError, match=r"must answer in full within 0\.3 s"):
        open_store("s3://bucket/data", StoreSettings(patience_s=0.3)).list_files()
    proxy.fault = lambda method, path: "403"
    with pytest.raises(DataError, match=r"s3://bucket/data must allow to list it, but: .*403 Forbidden; check AWS_ACC"):
        storage.list_files()


def test_missing_short_and_changed_files_are_named(store):
    server, _, storage = store
    with pytest.raises(DataError, match=r"s3://bucket/data/none must be readable, but the store has no such file"):
        storage.read("none")
    with pytest.raises(DataError, match=r"b/c\.bin must have 6 bytes, but has 3"):
        storage.read("b/c.bin", 2, 4)
    with pytest.raises(DataError, match=r"b/c\.bin must have 6 bytes, but has 3"):
        storage.read_ranges("b/c.bin", [(2, 4)])
    version = storage.find("a.bin").version
    assert storage.read("a.bin", 0, 10, version=version) == CONTENT[:10]
    server.objects["bucket/data/a.bin"] = b"x" * len(CONTENT)
    with pytest.raises(DataError, match=r"a\.bin must stay as it was when it was first read, but it has changed"):
        storage.read("a.bin", 0, 10, version=version)


def test_a_changed_file_of_a_folder_is_named(tmp_path):
    storage = LocalStorage(tmp_path)
    storage.write("a", b"before")
    version = storage.find("a").version
    storage.write("a", b"after")
    with pytest.raises(DataError, match="it has changed"):
        storage.read("a", version=version)


@pytest.mark.parametrize(
    ("url", "advice"),
    [("s3://bucket", "AWS_ACCESS_KEY_ID"), ("gs://bucket", "GOOGLE_APPL"), ("az://container", "AZURE_STORAGE_ACCOUNT")],
)
def test_missing_credentials_are_said_before_anything_is_asked(monkeypatch, tmp_path, url, advice):
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        SettingsError, match=rf"{url} must come with credentials, but the environment has none; set {advice}"
    ):
        open_store(url)


def test_a_web_server_is_read_but_not_listed(monkeypatch):
    with ObjectServer({"files/a.bin": CONTENT}).running() as server:
        storage = open_store(f"{server.endpoint}/files", QUICK)
        assert storage.find("a.bin").num_bytes == len(CONTENT)
        assert storage.read("a.bin", 10, 20, version=storage.find("a.bin").version) == CONTENT[10:30]
        with pytest.raises(DataError, match=r"must list its files, but: .*; give the URL of a file"):
            storage.list_files()


def test_what_fsspec_reaches_is_a_storage():
    storage = open_store("memory://folder-of-tests", QUICK)
    storage.write("x/a.bin", b"0123456789")
    storage.write("b.bin", b"abc")
    assert [(file.path, file.num_bytes) for file in storage.list_files()] == [("b.bin", 3), ("x/a.bin", 10)]
    assert storage.read("x/a.bin", 2, 3, version=storage.find("x/a.bin").version) == b"234"
    assert storage.read_ranges("x/a.bin", [(8, 2), (0, 3)]) == [b"89", b"012"]
    with pytest.raises(DataError, match=r"x/a\.bin must have 12 bytes, but has 10"):
        storage.read("x/a.bin", 2, 10)
    with pytest.raises(DataError, match=r"memory://folder-of-tests/none must be readable, but there is no such file"):
        storage.read("none")
    assert storage.find("none") is None
    assert storage.find("x") is None
    assert storage.list_files() == [storage.find("b.bin"), storage.find("x/a.bin")], "a list has the same versions"
    before = storage.find("b.bin").version
    storage.write("b.bin", b"abd")
    with pytest.raises(DataError, match="it has changed"):
        storage.read("b.bin", version=before)
    storage.remove(["b.bin", "x/a.bin", "none"])
    assert storage.list_files() == []


@pytest.mark.parametrize("mark", ["modificationTime", "last_write_time", ""])
def test_replaced_data_of_the_same_size_is_not_read_from_an_older_cache(mark, tmp_path, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    find, info, version = MemoryFileSystem.find, MemoryFileSystem.info, 0

    def describe(details):
        return {name: value for name, value in details.items() if name != "created"} | ({mark: version} if mark else {})

    monkeypatch.setattr(MemoryFileSystem, "info", lambda *args, **given: describe(info(*args, **given)))
    monkeypatch.setattr(
        MemoryFileSystem, "find", lambda *args, **given: {k: describe(v) for k, v in find(*args, **given).items()}
    )
    settings, found = QUICK.model_copy(update={"disk_bytes": 1 << 22, "disk_folder": tmp_path / "cache"}), []
    local, target = LocalStorage(tmp_path / "data"), open_store("memory://replaced", QUICK)
    for version in (1, 2):
        local.write("a.jsonl", f'{{"n": {version}}}\n'.encode())
        write_index(open_place(tmp_path / "data"), "auto")
        for path in ("a.jsonl", *(f"{INDEX_FOLDER}/{name}" for name in (MANIFEST, RECORDS, BLOCKS))):
            target.write(path, local.read(path))
        source = FileSource("memory://replaced", store=settings)
        assert source.read_trees(np.arange(1)) == [{"n": version}]
        found.append(source.fingerprint)
        source.storage.close()
    assert len(set(found)) == 2


def test_the_optional_client_is_not_imported_until_an_url_is_opened():
    code = "import sys, paceline.data; print(sorted({'obstore', 'fsspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "obstore" not in done.stdout


def test_objects_that_the_client_cannot_name_are_told(store):
    server, _, storage = store
    server.objects["bucket/data//odd.bin"] = b"abc"
    with pytest.raises(DataError, match=r'names of parts between single /, but: .*"data//odd.bin".*; rename it'):
        storage.list_files()


def test_moto_behind_faults(monkeypatch):
    """A real implementation of S3: ranges, conditions and lists mean the same there."""
    faults = itertools.cycle(["", "503", "", "truncate", "drop"])

    def choose(method, path):
        fault = next(faults)
        return fault if fault == "503" or method == "GET" else ""

    with moto_server() as endpoint, FaultProxy(endpoint, choose).running() as proxy:
        use_endpoint(monkeypatch, proxy.url)
        connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
        connection.request("PUT", "/bucket")
        assert connection.getresponse().status == 200
        connection.close()
        storage = open_store("s3://bucket/data", QUICK)
        storage.write("a.bin", CONTENT)
        storage.write("b/large.bin", CONTENT * 30)
        found = storage.list_files()
        assert [(file.path, file.num_bytes) for file in found] == [("a.bin", 512000), ("b/large.bin", 15_360_000)]
        version = storage.find("a.bin").version
        assert storage.read("a.bin", 1000, 100_000, version=version) == CONTENT[1000:101_000]
        assert storage.read("b/large.bin") == CONTENT * 30
        storage.write("a.bin", CONTENT[::-1])
        with pytest.raises(DataError, match="it has changed"):
            storage.read("a.bin", 0, 10, version=version)
        storage.remove(["a.bin"])
        assert storage.find("a.bin") is None
        with pytest.raises(DataError, match="s3://none/data must be in a bucket that is there"):
            open_store("s3://none/data", QUICK).list_files()
