"""Copies of checkpoints in a store: complete, shared files once, and back on another machine."""

import os
import warnings

import pytest
import torch

from paceline.checkpoint import CheckpointStore
from paceline.checkpoint.mirror import CheckpointMirror, MirrorWarning
from paceline.data.storage import StoreSettings
from paceline.errors import CheckpointError
from paceline.testing.object_server import FaultProxy, ObjectServer

QUICK = StoreSettings(timeout_s=1.0, patience_s=0.5)


def ignore(path, reason):
    raise AssertionError(f"{path}: {reason}")


@pytest.fixture(params=["folder", "s3"])
def place(request, tmp_path, monkeypatch):
    """A place for copies, and a function that returns the names in it."""
    if request.param == "folder":
        root = tmp_path / "copies"
        yield str(root), lambda: sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
        return
    with ObjectServer().running() as server:
        use_server(monkeypatch, server.endpoint)
        yield "s3://bucket/run", lambda: sorted(name.removeprefix("bucket/run/") for name in server.objects)


def use_server(monkeypatch, endpoint):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": "x"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)


def open_checkpoints(folder, url, **settings):
    return CheckpointStore(folder, mirror=CheckpointMirror(url, QUICK), **settings)


def test_a_run_goes_on_on_a_machine_that_has_nothing(tmp_path, place):
    url, _ = place
    with open_checkpoints(tmp_path / "here", url) as store:
        for step in (1, 2):
            store.save({"x": torch.full((1000,), float(step))}, {"step": step}, step)
    with open_checkpoints(tmp_path / "there", url) as store:
        found = store.find_newest_valid(ignore)
        assert found.step == 2
        assert found.read_document() == {"step": 2}
        assert torch.equal(found.read("x"), torch.full((1000,), 2.0))
        store.save({"x": torch.zeros(1000)}, {}, 3)
    with open_checkpoints(tmp_path / "here", url) as store:  # its own newest is older than that of the store
        assert store.find_newest_valid(ignore).step == 3


def test_surplus_copies_go_and_shared_files_are_there_once(tmp_path, place):
    url, names = place
    frozen, store = torch.randn(2**18), open_checkpoints(tmp_path / "here", url, keep=2, incremental=10)
    for step in range(1, 5):
        store.save({"frozen": frozen, "x": torch.full((10,), float(step))}, {}, step)
    store.close()
    kept = [name for name in names() if name.endswith("COMMITTED")]
    assert kept == ["step-00000003/COMMITTED", "step-00000004/COMMITTED"]
    assert len([name for name in names() if name.startswith("files/")]) == 3  # the frozen one, and one for each step
    with open_checkpoints(tmp_path / "there", url) as again:
        assert torch.equal(again.find_newest_valid(ignore).read("frozen"), frozen)


def test_a_damaged_copy_is_passed_over(tmp_path, monkeypatch):
    with ObjectServer().running() as server:
        use_server(monkeypatch, server.endpoint)
        with open_checkpoints(tmp_path / "here", "s3://bucket/run") as store:
            for step in (1, 2):
                store.save({"x": torch.full((1000,), float(step))}, {}, step)
        newest = [name for name in server.objects if "files/" in name][-1]
        content = server.objects[newest]
        server.objects[newest] = content[:-1] + bytes([content[-1] ^ 1])
        with (
            open_checkpoints(tmp_path / "there", "s3://bucket/run") as store,
            pytest.warns(MirrorWarning, match="its copy in s3://bucket/run cannot be read: .* has another digest"),
        ):
            found = store.find_newest_valid(lambda path, reason: None)
        assert found.step == 1


def test_a_store_that_is_away_stops_no_training_but_a_start(tmp_path, monkeypatch):
    with ObjectServer().running() as server, FaultProxy(server.endpoint).running() as proxy:
        use_server(monkeypatch, proxy.url)
        with open_checkpoints(tmp_path / "here", "s3://bucket/run") as store:
            proxy.fault = lambda method, path: "503"
            with pytest.warns(MirrorWarning, match="is not in s3://bucket/run: .*503.*; the next save tries again"):
                store.save({"x": torch.ones(10)}, {}, 1)
            with pytest.raises(CheckpointError, match=r"must be reachable when a run starts, but: .*503"):
                store.find_newest_valid(ignore)
            proxy.fault = lambda method, path: ""
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                store.save({"x": torch.ones(10)}, {}, 2)
        assert "bucket/run/step-00000002/COMMITTED" in server.objects
