"""Training does not depend on the format that the samples are kept in, nor on workers that end and go on."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from file_samples import make_images, write_shards
from store_fixtures import use_endpoint

from paceline.comm import LocalGroup
from paceline.data import FileData, FileSource, Loader, PackedText
from paceline.data.formats.prepare import prepare
from paceline.data.masked_text import NOT_ASKED
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
    """Return the parameters after some steps on images: see `train_on`."""
    source = FileData(path=str(path), size=8, held_out=str(path)).open().train

    def make_model():
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    return train_on(source, make_model, num_workers, stop_at)


class Rows(torch.nn.Module):
    """Next tokens of rows, or of packed rows, which have three numbers for each token."""

    def __init__(self, num_inputs):
        super().__init__()
        self.embeddings = torch.nn.ModuleList(torch.nn.Embedding(256, 4) for _ in range(num_inputs))
        self.head = torch.nn.Linear(4, 256)

    def forward(self, rows):
        rows = rows if isinstance(rows, tuple) else (rows,)
        hidden = sum(embedding(row) for embedding, row in zip(self.embeddings, rows, strict=True))
        return self.head(hidden).transpose(1, 2)


def train_on(source, make_model, num_workers, stop_at=None):
    """Return the parameters after some steps, on as many workers; ended once, and gone on from the saved state."""
    torch.manual_seed(0)
    initial = make_model()

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
            is_text = batch.targets.ndim == 2
            replica.backward(loss, weight=batch.count(batch.targets != NOT_ASKED) if is_text else batch.count())
            replica.update()
            loader.ack(batch)
        saved = {"model": model.state_dict(), "optimizer": replica.optimizer.state_dict()}
        return saved | {"replica": replica.state_dict(), "loader": loader.state_dict()}

    if stop_at is None:
        return LocalGroup.run(num_workers, work)[0]["model"]
    states = LocalGroup.run(num_workers, lambda group: work(group, num_steps=stop_at))
    return LocalGroup.run(num_workers, lambda group: work(group, states[group.rank]))[0]["model"]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_text_trains_alike_from_every_format(tmp_path, num_workers):
    rng = np.random.default_rng(0)
    samples = [{"text": bytes(rng.integers(97, 123, rng.integers(4, 40)).astype(np.uint8)).decode()} for _ in range(40)]
    write_shards(tmp_path / "jsonl", "jsonl", samples)

    def train_from(name, stop_at=None):
        data = FileData(path=str(tmp_path / name), sequence_length=24, padding="longest").open().train
        return train_on(data, lambda: Rows(1), num_workers, stop_at)

    expected = train_from("jsonl")
    for name in ("tar", "parquet", "mds", "tfrecord"):
        write_shards(tmp_path / name, name, samples, num_shards=3)  # in the same order, which balancing may change
        resumed = train_from(name, stop_at=3)
        assert all(torch.equal(expected[leaf], resumed[leaf]) for leaf in expected), name


@pytest.mark.parametrize("pack", ["best_fit", "concatenate"])
@pytest.mark.parametrize("num_workers", [2, 3])
def test_packed_text_that_goes_on_is_the_uninterrupted_one_bit_for_bit(tmp_path, num_workers, pack):
    rng = np.random.default_rng(0)
    (tmp_path / "folder").mkdir()
    texts = [bytes(rng.integers(97, 123, rng.integers(4, 40)).astype(np.uint8)) for _ in range(80)]
    for number, text in enumerate(texts):
        (tmp_path / f"folder/{number:03d}.txt").write_bytes(text)
    source = PackedText(path=str(tmp_path / "folder"), sequence_length=16, pack=pack).open().train
    expected = train_on(source, lambda: Rows(3), num_workers)
    resumed = train_on(source, lambda: Rows(3), num_workers, stop_at=3)
    assert all(torch.equal(expected[leaf], resumed[leaf]) for leaf in expected)


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
