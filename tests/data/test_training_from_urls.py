"""Runs whose data lies in an object store."""

import numpy as np
import pytest
import torch
from file_samples import make_images, write_shards
from store_fixtures import use_endpoint

from forked_launcher import ForkedLauncher
from paceline.data import FileSource
from paceline.data.formats.index import write_index
from paceline.data.formats.opening import open_place
from paceline.errors import DataError
from paceline.monitor import StoreRead, read_log
from paceline.testing.object_server import ObjectServer

SMALL = ("--data.size", 8, "--model.width", 4, "--global_batch", 6, "--num_steps", 4, "--evaluate_samples", 2)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Yield a store that holds shards and their index under ``s3://bucket/photos``."""
    write_shards(tmp_path / "photos", "tar", make_images(30), num_shards=3)
    write_index(open_place(tmp_path / "photos"), "auto")
    files = [file for file in sorted((tmp_path / "photos").rglob("*")) if file.is_file()]
    objects = {f"bucket/{file.relative_to(tmp_path)}": file.read_bytes() for file in files}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ObjectServer(objects).running() as server:
        use_endpoint(monkeypatch, server.endpoint)
        yield server


@pytest.mark.slow
def test_a_run_trains_from_a_store_as_from_its_copy_here(server, tmp_path, run_here):
    def list_arguments(name, place):
        run = ("train", "resnet", "--workers", 1, "--out", tmp_path / name, "--data", "files", "--data.path", place)
        return [str(word) for word in (*run, "--order", "windows", "--augment", '["flip"]', *SMALL)]

    near = run_here(*list_arguments("near", tmp_path / "photos"))
    # A process of its own: workers take the environment of the one that forks them.
    far = ForkedLauncher(list_arguments("far", "s3://bucket/photos"), tmp_path / "far.txt")
    output, _ = far.communicate(timeout=50)
    assert far.returncode == 0, output
    losses = [said.rpartition("finished: held-out loss")[2].split()[0] for said in (near.stdout, output)]
    assert losses[0] == losses[1]
    read = [one.event for one in read_log(tmp_path / "far" / "events.jsonl") if isinstance(one.event, StoreRead)]
    assert sum(event.store_bytes for event in read) > 0


def test_samples_of_one_file_are_read_from_its_url(server, tmp_path):
    shard = sorted((tmp_path / "photos").glob("*.tar"))[1]
    place = open_place(shard)
    write_index(place, "auto")
    for file in (tmp_path / "photos" / place.index_folder).iterdir():
        server.objects[f"bucket/{file.relative_to(tmp_path)}"] = file.read_bytes()
    far = FileSource(f"s3://bucket/photos/{shard.name}")
    assert len(far) == 10
    assert far.fingerprint == FileSource(shard).fingerprint
    far.storage.close()


def test_an_indexed_folder_is_read_from_a_server_that_lists_nothing(server, tmp_path):
    far, near = FileSource(f"{server.endpoint}/bucket/photos"), FileSource(tmp_path / "photos")
    assert far.fingerprint == near.fingerprint
    assert torch.equal(far.read(np.arange(30))["image"], near.read(np.arange(30))["image"])
    far.storage.close()
    server.objects.pop("bucket/photos/shard-01.tar")
    with pytest.raises(DataError, match=r"photos/shard-01\.tar must have .* bytes, as when .* but is missing"):
        FileSource(f"{server.endpoint}/bucket/photos")
    for name in [name for name in server.objects if ".paceline" in name]:
        server.objects.pop(name)
    with pytest.raises(DataError, match=r"must list its files, but: .*; give the URL of a file, or index the folder"):
        FileSource(f"{server.endpoint}/bucket/photos")


def test_a_block_that_is_not_as_it_was_indexed_is_refused(server, tmp_path):
    name = next(name for name in server.objects if name.endswith(".tar"))
    content = bytearray(server.objects[name])
    content[len(content) // 2] ^= 1
    server.objects[name] = bytes(content)
    source = FileSource("s3://bucket/photos")
    with pytest.raises(DataError, match=name.rpartition("/")[2]):
        source.read(np.arange(len(source)))
    source.storage.close()
