"""`--data mixture` from the command line, of sources that differ in format and place."""

import json
import shutil

import pytest
from file_samples import make_images, write_shards

from paceline.monitor import read_log
from paceline.monitor.events import RunFinished, RunStarted, StepFinished
from paceline.monitor.reader import select

SMALL = ("--model.width", 4, "--global_batch", 6, "--checkpoint_interval", 2, "--evaluate_interval", 0)


@pytest.fixture
def train(tmp_path, run_here):
    """Return a function that trains on a mixture of two formats, and returns the records of the run."""
    write_shards(tmp_path / "tar", "tar", make_images(30))
    write_shards(tmp_path / "rows", "parquet", make_images(20))
    sources = [{"name": "files", "path": str(tmp_path / name), "size": 8} for name in ("tar", "rows")]
    mixture = ("--data", "mixture", "--data.sources", json.dumps(sources), "--data.weights", "[0.75, 0.25]")

    def run(name, num_steps):
        words = ("train", "resnet", "--workers", 1, "--out", tmp_path / name, *mixture, *SMALL)
        done = run_here(*map(str, words), "--schedule", "constant", "--num_steps", str(num_steps))
        assert "finished: held-out loss" in done.stdout
        return read_log(tmp_path / name / "events.jsonl")

    return run


def read_losses(records):
    return {one.step: one.event.loss for one in select(records, StepFinished)}


@pytest.mark.slow
def test_a_mixture_of_formats_trains(train):
    records = train("run", 4)
    settings = select(records, RunStarted)[0].event.settings["data"]
    assert (settings["name"], settings["weights"]) == ("mixture", [0.75, 0.25])
    assert [source["path"].rpartition("/")[2] for source in settings["sources"]] == ["tar", "rows"]
    assert select(records, RunFinished)[0].event.held_out_loss > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_mixture_goes_on_as_if_it_had_not_ended(train, tmp_path, run_here):
    losses = read_losses(train("run", 6))
    for newer in (tmp_path / "run" / "checkpoints").glob("step-00000006*"):
        shutil.rmtree(newer)
    (tmp_path / "run" / "events.jsonl").unlink()
    assert "finished: held-out loss" in run_here("train", "--resume", str(tmp_path / "run")).stdout
    resumed = read_losses(read_log(tmp_path / "run" / "events.jsonl"))
    assert resumed == {step: losses[step] for step in (5, 6)}
