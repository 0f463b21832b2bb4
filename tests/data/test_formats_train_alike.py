"""Training does not depend on the format that the samples are kept in, nor on workers that end and go on."""

import copy

import pytest
import torch
import torch.nn.functional as F
from file_samples import make_images, write_shards
from store_fixtures import use_endpoint

from paceline.comm import LocalGroup
from paceline.data import FileData, FileSource, Loader
from paceline.data.formats.prepare import prepare
from paceline.replica import Replica
from paceline.testing.object_server import ObjectServer

FORMATS = ["folder", "tar", "parquet", "arrow", "hf", "mds", "tfrecord", "jsonl", "jsonl_gz", "jsonl_zst"]
NUM_STEPS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the same samples in each format."""
    root = tmp_path_factory.mktemp("formats")
    write_shards(root / "folder", "folder", make_images(30), num_shards=1)
    source = FileSource(root / "folder")
    for name in FORMATS[1:]:
        prepare(source, root / name, name, 4000)
        assert len(FileSource(root / name).manifest.files) > 1
    return root


def train(path, num_workers, stop_at=None):
    """Return the parameters after some steps, on as many workers; ended once, and gone on from the saved state."""
    source = FileData(path=str(path), size=8, held_out=str(path)).open().train

    torch.manual_seed(0)
    initial = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    def work(group, state=None, num_steps=NUM_STEPS):
        model = copy.deepcopy(initial)  # workers are threads, which would draw from one generator
        replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), group=group)
        loader = Loader(source, global_batch=7, num_steps=num_steps, group=group, seed=3)
        if state is not None:
            model.load_state_dict(state["model"])
            replica.optimizer.load_state_dict(state["optimizer"])
            replica.load_state_dict(state["replica"])
            loader.load_state_dict(state["loader"])
        for batch in loader:
            loss = F.cross_entropy(replica(batch.inputs), batch.targets)
            replica.backward(loss, weight=batch.count())
            replica.update()
            loader.ack(batch)
        saved = {"model": model.state_dict(), "optimizer": replica.optimizer.state_dict()}
        return saved | {"replica": replica.state_dict(), "loader": loader.state_dict()}

    if stop_at is None:
        return LocalGroup.run(num_workers, work)[0]["model"]
    states = LocalGroup.run(num_workers, lambda group: work(group, num_steps=stop_at))
    return LocalGroup.run(num_workers, lambda group: work(group, states[group.rank]))[0]["model"]


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("name", ["tar", "parquet", "mds", "jsonl_zst"])
def test_a_store_trains_like_the_folder_bit_for_bit(folder, name, num_workers, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = [file for file in (folder / name).rglob("*") if file.is_file()]
    with ObjectServer({f"bucket/{file.relative_to(folder)}": file.read_bytes() for file in files}).running() as server:
        use_endpoint(monkeypatch, server.endpoint)
        resumed = train(f"s3://bucket/{name}", num_workers, stop_at=3)
        assert server.read_bytes > 0
    expected = train(folder / "folder", num_workers)
    assert all(torch.equal(expected[leaf], resumed[leaf]) for leaf in expected)


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("name", FORMATS[1:])
def test_every_format_trains_like_the_folder_bit_for_bit(folder, name, num_workers):
    expected = train(folder / "folder", num_workers)
    resumed = train(folder / name, num_workers, stop_at=3)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[leaf], resumed[leaf]) for leaf in expected)


def test_other_samples_train_otherwise(folder, tmp_path):
    """What the test above compares does depend on the samples."""
    samples = make_images(30)
    samples[4]["image"] = samples[5]["image"]
    write_shards(tmp_path, "tar", samples)
    one, other = train(folder / "folder", 2), train(tmp_path, 2)
    assert any(not torch.equal(one[leaf], other[leaf]) for leaf in one)
    assert other["1.weight"].isfinite().all()
