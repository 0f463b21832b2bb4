import copy
import io
import pickle
import tarfile
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from file_samples import draw_image
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paceline.comm import LocalGroup
from paceline.data import BadSamples, BadSampleWarning, FileData, FileSource, Images, Loader, Source
from paceline.data.bad_samples import BadSampleCount
from paceline.data.formats.index import write_index
from paceline.data.formats.opening import open_place
from paceline.errors import BadSample, DataError, SettingsError
from paceline.monitor import BadSampleFound, read_log
from paceline.replica import Loss, Replica
from paceline.training import Run, evaluate


class Damaged(Source):
    """Numbers, some of which cannot be read."""

    def __init__(self, size, bad=()):
        self.size, self.bad = size, set(bad)

    def __len__(self):
        return self.size

    def read(self, indices):
        for index in indices.tolist():
            if index in self.bad:
                raise BadSample(f"{index} is bad", path="a.tar", key=f"{index}.jpg", reason="truncated")
        return torch.from_numpy(indices)

    def decode(self, fetched, seeds=None):
        if seeds is None:
            return self.read(fetched)
        return {"index": self.read(fetched), "seed": torch.tensor([seed >> 1 for seed in seeds])}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BadSampleWarning)
        yield


def load(source, *, workers=1, **options):
    """Return the samples that count at each step, over all workers."""
    loaders = [Loader(source, 6, group=group, num_epochs=1, **options) for group in LocalGroup.create(workers)]
    steps = []
    for batches in zip(*loaders, strict=True):
        assert len({batch.interval for batch in batches}) == 1
        assert all(len(batch.data) >= 1 for batch in batches)
        steps.append([sample for batch in batches for sample in batch.data[: batch.num_samples].tolist()])
    return steps, loaders


@settings(deadline=None, derandomize=True, max_examples=60)
@given(size=st.integers(1, 40), bad=st.sets(st.integers(0, 39), max_size=20), workers=st.integers(1, 3))
def test_skipped_samples_count_nothing_and_the_order_stays(size, bad, workers):
    bad = {index for index in bad if index < size}
    if len(bad) == size:
        bad.pop()
    whole, _ = load(Damaged(size), workers=workers)
    steps, loaders = load(Damaged(size, bad), workers=workers, bad_samples=BadSamples(action="skip"))
    assert steps == [[sample for sample in step if sample not in bad] for step in whole]
    found = [one.sample for loader in loaders for one in loader.take_bad_samples()]
    assert bad <= set(found), "a worker without samples borrows one, which may be bad too"


@settings(deadline=None, derandomize=True, max_examples=60)
@given(size=st.integers(2, 40), bad=st.sets(st.integers(0, 39), max_size=20), workers=st.integers(1, 3))
def test_replaced_samples_are_the_next_that_can_be_read(size, bad, workers):
    bad = {index for index in bad if index < size - 1}
    whole, _ = load(Damaged(size), workers=workers)
    steps, _ = load(Damaged(size, bad), workers=workers, bad_samples=BadSamples(action="replace"))
    replaced = [[next(i for i in range(sample, size) if i not in bad) for sample in step] for step in whole]
    assert steps == replaced


def test_the_first_bad_sample_is_fatal_by_default():
    with pytest.raises(BadSample, match="3 is bad") as caught:
        load(Damaged(10, {3}))
    assert (caught.value.path, caught.value.key, caught.value.reason) == ("a.tar", "3.jpg", "truncated")
    sent = pickle.loads(pickle.dumps(caught.value))
    assert (str(sent), sent.key) == ("3 is bad", "3.jpg")


def test_other_errors_are_never_tolerated():
    class Broken(Damaged):
        def read(self, indices):
            raise DataError("the disk is gone")

    with pytest.raises(DataError, match="the disk is gone"):
        load(Broken(10), bad_samples=BadSamples(action="skip"))


def test_the_budget_counts_different_samples():
    source = Damaged(12, {2, 5, 7})
    loader = Loader(source, 4, num_epochs=5, bad_samples=BadSamples(action="skip", budget=3))
    assert sum(batch.num_samples for batch in loader) == 45
    assert sorted(one.sample for one in loader.take_bad_samples()) == [2, 5, 7]
    assert loader.take_bad_samples() == []
    with pytest.raises(DataError, match=r"at most 2 .* but got 3, .* \(a.tar \d.jpg\): truncated; mend the data"):
        load(source, bad_samples=BadSamples(action="skip", budget=2))
    with pytest.raises(DataError, match="at most 0"):
        load(source, bad_samples=BadSamples(action="replace", budget=0))


def test_nothing_readable_is_an_error():
    for action in ("skip", "replace"):
        with pytest.raises(BadSample, match="none of the next 100 is"):
            load(Damaged(8, range(8)), bad_samples=BadSamples(action=action))


@pytest.mark.parametrize("workers", [1, 2])
def test_skipped_samples_are_left_out_where_others_are_mixed(workers):
    class Pictures(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            if index in (4, 5, 20):
                raise BadSample(f"{index} is bad")
            return torch.full((3, 8, 8), float(index)), index % 2

    options = {"num_micro_batches": 3, "augment": [{"name": "mixup", "probability": 0.0, "num_classes": 2}]}
    options |= {"order": "sequential", "bad_samples": BadSamples(action="skip")}
    read = []
    for group in LocalGroup.create(workers):
        for batch in Loader(Pictures(), 9, group=group, num_epochs=1, **options):
            images, labels = batch.data
            pairs = zip(images[:, 0, 0, 0].tolist(), labels.argmax(1).tolist(), strict=True)
            read += list(pairs)[: batch.num_samples]
    assert sorted(read) == [(n, n % 2) for n in range(24) if n not in (4, 5, 20)]


@pytest.mark.parametrize("action", ["skip", "replace"])
def test_processes_read_the_same(action):
    options = {"bad_samples": BadSamples(action=action), "seed": 2}
    here, _ = load(Damaged(30, {4, 5, 20}), **options)
    loader = Loader(Damaged(30, {4, 5, 20}), 6, num_epochs=1, num_processes=1, **options)
    batches = list(loader)
    assert [batch.data["index"][: batch.num_samples].tolist() for batch in batches] == here
    assert sorted(one.sample for one in loader.take_bad_samples()) == [4, 5, 20]
    if action == "skip":
        whole = list(Loader(Damaged(30), 6, num_epochs=1, num_processes=1, seed=2))
        seeds = {i: s for b in whole for i, s in zip(b.data["index"].tolist(), b.data["seed"].tolist(), strict=True)}
        read = [pair for b in batches for pair in zip(*(t.tolist() for t in b.data.values()), strict=True)]
        assert all(seeds[index] == seed for index, seed in read), "a sample's random numbers stay its own"


def test_the_first_one_warns():
    with pytest.warns(BadSampleWarning, match=r"sample \d \(a.tar \d.jpg\): truncated cannot be read"):
        load(Damaged(12, {2, 5}), bad_samples=BadSamples(action="skip"))


def test_a_run_names_the_damaged_file(tmp_path, run_here):
    for name in ("cats", "dogs"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.full((8, 8, 3), number * 20, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    splits = Images(path=tmp_path / "images", size=8).open()
    damaged, held_out = (source._paths[0] for source in (splits.train, splits.held_out))
    for path in (damaged, held_out):
        path.write_bytes(path.read_bytes()[:40])
    options = [
        "--data.path",
        tmp_path / "images",
        "--data.size",
        8,
        "--num_epochs",
        1,
        "--num_steps",
        "none",
        "--workers",
        1,
    ]
    failed = run_here("train", "rnn", *options, "--out", tmp_path / "fatal")
    assert failed.returncode != 0
    assert f"{damaged} must be a whole image" in failed.stdout
    done = run_here("train", "rnn", *options, "--out", tmp_path / "skip", "--bad_samples.action", "skip")
    assert done.returncode == 0, done.stderr
    found = [one.event for one in read_log(tmp_path / "skip" / "events.jsonl") if isinstance(one.event, BadSampleFound)]
    assert [(one.path, one.action) for one in found] == [(str(damaged), "skip"), (str(held_out), "skip")]


def test_other_values_than_settings_are_refused():
    with pytest.raises(SettingsError, match=r"bad_samples must be a BadSamples, but got 'skip'"):
        Loader([1, 2], 1, num_epochs=1, bad_samples="skip")


def test_settings_are_part_of_a_run():
    assert Run.model_fields["bad_samples"].default == BadSamples(action="fatal", budget=100)


def write_broken_images(folder):
    """Write one good image and three files that are none, in an order by name."""
    folder.mkdir(parents=True)
    content = draw_image(0)
    for name, part in {"a": b"", "b": content[: len(content) // 2], "c": b"words, no pixels", "d": content}.items():
        (folder / f"{name}.png").write_bytes(part)
    return folder


@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
def test_a_file_that_is_an_image_by_its_name_alone_is_a_bad_sample(tmp_path):
    folder = write_broken_images(tmp_path / "broken")
    source = FileSource(folder)
    for number, name in enumerate("abc"):
        with pytest.raises(BadSample, match=rf"sample '{name}' of .*/broken/{name}\.png must be readable") as caught:
            source[number]
        assert caught.value.path == f"{folder}/{name}.png"
        assert "0x" not in caught.value.reason, "an address in memory tells nobody anything"
    for action, sizes in {"skip": [0, 1], "replace": [2, 2]}.items():
        batches = list(Loader(source, 2, num_epochs=1, shuffle=False, bad_samples=BadSamples(action=action)))
        assert [batch.num_samples for batch in batches] == sizes
        assert torch.equal(batches[1].data["image"][-1], source[3]["image"])


def test_images_of_shards_that_are_none_are_bad_samples(tmp_path):
    with tarfile.open(tmp_path / "shard-00.tar", "w") as shard:
        for name, content in {"0.x.png": draw_image(1), "1.x.png": b""}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            shard.addfile(entry, io.BytesIO(content))
    write_index(open_place(tmp_path), "tar")
    source = FileSource(tmp_path)
    assert source[0]["x"].shape == (3, 12, 12)
    with pytest.raises(BadSample, match=r"shard-00\.tar must be readable, but: x must be a whole image"):
        source[1]


@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
def test_files_of_a_run_may_begin_with_one_that_is_no_image(tmp_path):
    for name in ("cats", "dogs"):
        write_broken_images(tmp_path / name)
    train = FileData(path=str(tmp_path), held_out_fraction=0.5).open().train
    with pytest.raises(BadSample, match=r"/cats/[abc]\.png must be readable"):
        train.read(np.array([0]))


class MeanSquare:
    def loss(self, model, batch):
        return Loss((model(batch.data[:, None].float()) ** 2).mean(), float(batch.num_samples))


def test_held_out_samples_that_cannot_be_read_are_left_out():
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)

    def judge(group, bad, settings):
        count = BadSampleCount(settings)
        module = copy.deepcopy(model)
        replica = Replica(module, torch.optim.SGD(module.parameters(), 0.1), group=group)
        found = evaluate(replica, MeanSquare(), Damaged(12, bad), batch_size=2, bad_samples=count)
        return found.loss, found.weight, found.num_samples, len(count.take())

    whole = [float((model(torch.tensor([[float(n)]])) ** 2).item()) for n in range(12)]
    for workers, bad in [(1, {0, 1, 5}), (3, {0, 1, 5})]:
        for action in ("skip", "replace"):
            results = LocalGroup.run(workers, partial(judge, bad=bad, settings=BadSamples(action=action)))
            kept = [value for number, value in enumerate(whole) if number not in bad]
            for loss, weight, num_samples, _ in results:
                assert loss == pytest.approx(sum(kept) / len(kept))
                assert weight == num_samples == 9
            assert sum(result[3] for result in results) == 3
    with pytest.raises(BadSample, match="5 is bad"):
        judge(LocalGroup(), {5}, BadSamples())
    with pytest.raises(DataError, match="at most 2"):
        judge(LocalGroup(), {1, 5, 7}, BadSamples(action="skip", budget=2))


@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
def test_the_first_sample_may_be_bad(tmp_path):
    lines = ["{torn", *('{"text": "abc"}' for _ in range(20))]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    splits = FileData(path=str(tmp_path / "a.jsonl"), sequence_length=4).open()
    assert len(splits.train) + len(splits.held_out) == 21
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:1] * 3))
    with pytest.raises(BadSample, match="line at byte"):
        FileData(path=str(tmp_path / "a.jsonl")).open()
