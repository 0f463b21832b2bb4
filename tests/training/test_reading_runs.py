"""Augmentation, and the times of reading, in a run."""

import pytest

from paceline.data import PackedText
from paceline.data.images import Images
from paceline.monitor.events import DataRead, StepFinished
from paceline.monitor.reader import read_log, select, summarise
from paceline.optim import SGD
from paceline.recipes.resnet import ResNet
from paceline.recipes.transformer_lm import TransformerLM
from paceline.training import Run
from plain_functions import train_here


def make_run(**changes):
    settings = {
        "model": ResNet(depth=18, width=4),
        "data": Images(size=8),
        "loss": "classification",
        "optimizer": SGD(learning_rate=0.05),
        "global_batch": 24,
        "num_steps": 4,
        "evaluate_interval": 0,
        "evaluate_samples": 20,
        "hash_interval": 0,
        "timeline_interval": 2,
    }
    return Run(**{**settings, **changes})


def train(tmp_path, name, num_workers=1, **changes):
    directory = tmp_path / name
    directory.mkdir()
    train_here(make_run(**changes), directory, num_workers)
    return read_log(directory / "events.jsonl")


def losses_of(records):
    return [record.event.loss for record in select(records, StepFinished)]


def test_augmentation_changes_a_run_alike_whoever_reads(tmp_path):
    augment = ["flip", {"name": "crop", "padding": 1}, {"name": "mixup", "alpha": 0.3}]
    first = train(tmp_path, "first", augment=augment)
    assert losses_of(first) == losses_of(train(tmp_path, "processes", augment=augment, num_data_processes=1))
    assert losses_of(first) == losses_of(train(tmp_path, "auto", augment=augment, num_data_processes="auto"))
    assert losses_of(first) != losses_of(train(tmp_path, "plain"))


def test_a_log_has_the_times_of_reading_and_a_report_names_the_stage(tmp_path):
    records = train(tmp_path, "run", num_workers=2, augment=["colour"])
    reads = select(records, DataRead)
    assert sorted((read.rank, read.step) for read in reads) == [(0, 2), (0, 4), (1, 2), (1, 4)]
    assert all(read.event.augment_s > 0 for read in reads)
    assert all(read.event.reader == "thread" for read in reads)
    summary = summarise(records)
    waited_s = sum(step.event.data_s for step in summary.steps)
    assert 0 < summary.data_share <= 1
    assert summary.data_share == pytest.approx(waited_s / sum(step.event.duration_s for step in summary.steps))
    assert summary.slowest_stage in ("fetch", "decode", "augment", "collate")


def test_a_run_keeps_its_augmentation_as_json():
    run = make_run(augment=("flip", {"name": "erase", "fill": "noise"}))
    assert Run.model_validate(run.model_dump(mode="json")) == run
    assert make_run(augment="flip").augment == make_run(augment=["flip"]).augment


def test_processes_and_threads_exclude_each_other():
    with pytest.raises(ValueError, match="num_data_processes or num_data_threads must be left out, but got 2 and 3"):
        make_run(num_data_processes=2, num_data_threads=3)


def make_packed_run(folder, **changes):
    settings = {
        "model": TransformerLM(width=16, num_layers=1, num_heads=2),
        "data": PackedText(path=folder, sequence_length=32),
        "loss": "next_token",
        "global_batch": 6,
        "num_steps": 4,
        "evaluate_interval": 0,
        "timeline_interval": 0,
    }
    return Run(**{**settings, **changes})


def test_a_run_on_packed_text_is_the_same_on_two_workers(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"document {number} " * (1 + number % 4))
    losses = []
    for num_workers in (1, 2):
        directory = tmp_path / f"run-{num_workers}"
        directory.mkdir()
        train_here(make_packed_run(texts), directory, num_workers)
        losses.append(losses_of(read_log(directory / "events.jsonl")))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
