"""Shards that appear in a folder while training goes on: taken at an epoch's end, by all ranks, and after a resume."""

import json
import shutil

import numpy as np
import pytest
import torch
from file_samples import write_shards
from store_fixtures import QUICK, faulty_store

from paceline.comm import LocalGroup
from paceline.data import FileData, FileSource, Loader
from paceline.data.formats.index import write_index
from paceline.data.formats.opening import open_place
from paceline.errors import DataError, SettingsError
from paceline.monitor import DataGrown, read_log
from paceline.monitor.events import RunStarted, StepFinished
from paceline.monitor.log import EventLog
from paceline.monitor.reader import select
from paceline.recipes.rnn import RNN
from paceline.training import Run, train
from paceline.training.objective import Classification

FOLDERS = {}
"""Folder that a run's callback adds a shard to, and the step after which it does."""


def make_rows(first, num_rows=10):
    return [
        {"__key__": f"{number:04d}", "x": np.full((2, 2), number / 40, np.float32), "label": number % 2, "n": number}
        for number in range(first, first + num_rows)
    ]


def add_shard(folder, number, *, indexed=True):
    made = write_shards(folder.parent / f"new-{number}", "jsonl", make_rows(10 * number), 1, indexed=False)
    (path,) = made.glob("*.jsonl")
    path.rename(folder / f"shard-{number:02d}.jsonl")
    if indexed:
        write_index(open_place(folder), "auto")


def appear(event, training):
    """Add a shard after some step, as a callback."""
    if isinstance(event, StepFinished) and training.step == FOLDERS["step"]:
        add_shard(FOLDERS["folder"], 2, indexed=FOLDERS["indexed"])


def train_here(folder, directory, num_workers):
    run = Run(
        model=RNN(width=4),
        data=FileData(path=str(folder), input="x", num_classes=2, grows=True),
        loss=Classification(),
        global_batch=4,
        num_steps=20,
        checkpoint_interval=4,
        keep_checkpoints=None,
        evaluate_interval=0,
        num_threads=1,
        callbacks=(appear,),
    )
    directory.mkdir(exist_ok=True)

    def work(group):
        with EventLog(directory / "events.jsonl", run="run", rank=group.rank) as log:
            return train(run, directory, group, log, recipe="mine")

    assert LocalGroup.run(num_workers, work) == [True] * num_workers
    records = read_log(directory / "events.jsonl")
    return {one.step: (one.event.loss, one.event.position) for one in select(records, StepFinished)}, records


def take_numbers(loaders):
    batches = [next(iter(loader)) for loader in loaders]
    for loader, batch in zip(loaders, batches, strict=True):
        if loader.position == batch.interval.start:
            loader.ack(batch)
    return [int(number) for batch in batches for number in batch.data["n"][: batch.num_samples]]


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.filterwarnings("ignore::paceline.data.NoIndexWarning")
def test_a_run_takes_new_shards_and_resumes_with_them(tmp_path, indexed, num_workers):
    folder = write_shards(tmp_path / "data", "jsonl", make_rows(0, 20), 2, indexed=indexed)
    FOLDERS.update(folder=folder, step=3, indexed=indexed)
    steps, records = train_here(folder, tmp_path / "straight", num_workers)
    ((grown_at, grown),) = [(one.step, one.event) for one in select(records, DataGrown)]
    # An epoch is 18 samples, of 5 steps; at step 6 none of the third one can have been read.
    assert (grown_at, grown.start, grown.num_samples, grown.num_shards) == (6, 36, 27, 3)
    positions = [steps[step][1] for step in range(1, 21)]
    assert positions == [4, 8, 12, 16, 18, 22, 26, 30, 34, 36, 40, 44, 48, 52, 56, 60, 63, 67, 71, 75]
    for step, is_known in ((4, False), (12, True)):
        shutil.copytree(tmp_path / "straight", tmp_path / f"from-{step}")
        for path in (tmp_path / f"from-{step}" / "checkpoints").glob("step-*"):
            if int(path.name.split("-")[1]) > step:
                shutil.rmtree(path)
        (tmp_path / f"from-{step}" / "events.jsonl").unlink()
        FOLDERS["step"] = None
        resumed, again = train_here(folder, tmp_path / f"from-{step}", num_workers)
        assert select(again, RunStarted)[0].event.start_step == step
        assert resumed == {number: steps[number] for number in range(step + 1, 21)}
        assert [one.event.start for one in select(again, DataGrown)] == ([] if is_known else [36])


def test_a_shard_that_some_rank_does_not_see_is_left_to_the_next_time(tmp_path):
    folder = write_shards(tmp_path / "data", "jsonl", make_rows(0, 20), 2)
    sources = [FileSource(folder, grows=True) for _ in range(2)]
    blind = [True]

    def work(group):
        source = sources[group.rank]
        loader = Loader(source, 5, group=group, prefetch=0, num_epochs=9)
        starts = []
        for see in (False, True):
            blind[0] = not see
            group.barrier()
            if group.rank == 1 and blind[0]:
                look, source._look = source._look, lambda: source._found
                starts.append(loader.grow())
                source._look = look
            else:
                starts.append(loader.grow())
            group.barrier()
        return starts, len(source), source.fingerprint

    add_shard(folder, 2)
    one, other = LocalGroup.run(2, work)
    assert one == other
    assert one[:2] == ([None, 20], 30)


def test_every_sample_is_used_once_in_each_epoch_of_its_time(tmp_path):
    folder = write_shards(tmp_path / "data", "jsonl", make_rows(0, 20), 2)
    source = FileSource(folder, grows=True)
    loader = Loader(source, 6, prefetch=0, num_epochs=3)
    used = take_numbers([loader])
    add_shard(folder, 2)
    assert loader.grow() == 20
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = Loader(FileSource(folder, grows=True), 6, prefetch=0, num_epochs=3)
    resumed.load_state_dict(state)
    while not resumed._ending.is_reached(resumed.position):
        used += take_numbers([resumed])
    assert sorted(used[:20]) == list(range(20))
    assert sorted(used[20:50]) == sorted(used[50:]) == list(range(30))
    torch.testing.assert_close(len(used), 80)


def test_held_out_samples_grow_too_where_a_function_makes_batches(tmp_path):
    folder = write_shards(tmp_path / "data", "jsonl", make_rows(0, 20), 2)
    splits = FileData(path=str(folder), input="x", num_classes=2, grows=True).open()
    for parts in (splits, splits.with_collate(torch.utils.data.default_collate)):
        assert (len(parts.train), len(parts.held_out)) == (18, 2)
    add_shard(folder, 2)
    parts.train.list_shards(looks=True)
    parts.train.take_shards(3)
    assert (len(parts.train), len(parts.held_out)) == (27, 3)
    assert len(parts.held_out.read(np.arange(3))[1]) == 3


def test_what_was_there_must_stay(tmp_path):
    folder = write_shards(tmp_path / "data", "jsonl", make_rows(0, 20), 2)
    loader = Loader(FileSource(folder, grows=True), 6)
    state = loader.state_dict()
    assert loader.grow() is None
    (folder / "shard-01.jsonl").rename(folder / "shard-00b.jsonl")
    with pytest.raises(DataError, match=r"shard-01\.jsonl must have"):
        loader.grow()
    (folder / "shard-00b.jsonl").rename(folder / "shard-01.jsonl")
    shutil.copy(folder / "shard-01.jsonl", folder / "shard-00a.jsonl")
    write_index(open_place(folder), "auto")
    with pytest.raises(DataError, match=r"names behind those that .* got shard-00a\.jsonl in place of"):
        loader.grow()
    with pytest.raises(DataError, match="must be that of the checkpoint"):
        Loader(FileSource(folder, grows=True), 6).load_state_dict(state)


def test_an_index_that_is_being_written_is_read_the_next_time(tmp_path):
    folder = write_shards(tmp_path / "data", "jsonl", make_rows(0, 20), 2)
    loader = Loader(FileSource(folder, grows=True), 6)
    add_shard(folder, 2)
    manifest = folder / ".paceline" / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-20])
    with pytest.warns(UserWarning, match="looked at again after the next epoch"):
        assert loader.grow() is None
    manifest.write_bytes(whole)
    assert loader.grow() == 20


@pytest.mark.parametrize("disk_bytes", [0, 2**24])
def test_an_index_in_a_store_is_read_anew(tmp_path, monkeypatch, disk_bytes):
    settings = QUICK.model_copy(update={"disk_bytes": disk_bytes, "disk_folder": tmp_path / "cache"})
    folder = write_shards(tmp_path / "data", "jsonl", make_rows(0, 20), 2)
    with faulty_store(monkeypatch, {}) as (server, _):

        def upload():
            for path in folder.rglob("*.*"):
                if path.is_file():
                    server.objects[f"bucket/data/{path.relative_to(folder).as_posix()}"] = path.read_bytes()

        upload()
        source = FileSource("s3://bucket/data", grows=True, store=settings)
        loader = Loader(source, 6, prefetch=0, num_epochs=2)
        used = take_numbers([loader])
        add_shard(folder, 2)
        upload()
        assert loader.grow() == 20
        while not loader._ending.is_reached(loader.position):
            used += take_numbers([loader])
        source.storage.close()
    assert sorted(used[:20]) == list(range(20))
    assert sorted(used[20:]) == list(range(30))


def test_growth_does_not_go_with_what_fixes_the_data(tmp_path):
    folder = write_shards(tmp_path / "data", "jsonl", make_rows(0, 20), 2)
    data = FileData(path=str(folder), input="x", num_classes=2, grows=True)
    run = Run(model=RNN(width=4), data=data, loss=Classification(), global_batch=4, num_epochs=2)
    with pytest.raises(SettingsError, match="num_steps must be given for data that grows"):
        run.count_steps(run.open_data())
    with pytest.raises(DataError, match=r"leave --data\.snapshot out"):
        FileSource(folder, grows=True, snapshot="b3-12345678")
    with pytest.raises(SettingsError, match="num_processes must be 0 for data that grows"):
        Loader(FileSource(folder, grows=True), 6, num_processes=1)
