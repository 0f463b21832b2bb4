"""`paceline evaluate`: a trained model is judged again, as its run judged it, or otherwise."""

import re

import pytest
import torch

import plain_functions as mine
from paceline.monitor.events import Evaluated
from paceline.monitor.reader import read_log, select
from plain_functions import make_run, train_here


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


def numbers_of(text):
    return {name: float(value) for name, value in re.findall(r"^  (\w+) +(\S+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("num_workers", [1, 3])
def test_it_finds_what_the_run_found(tmp_path, run_here, num_workers):
    settings = {"metrics": mine.measure, "evaluate_interval": 3, "checkpoint_interval": 3, "keep_checkpoints": None}
    train_here(make_run(keep_best="loss", **settings), tmp_path, num_workers, recipe="transformer_lm")
    evaluations = list(select(read_log(tmp_path / "events.jsonl"), Evaluated))
    best = min(evaluations, key=lambda record: record.event.loss)
    for which, record in [("newest", evaluations[-1]), ("best", best), (str(evaluations[0].step), evaluations[0])]:
        done = run_here("evaluate", tmp_path, "--checkpoint", which)
        assert done.returncode == 0, done.stderr
        assert f"step {record.step} of {tmp_path}, its parameters, on 7 held-out samples" in done.stdout
        expected = {"loss": record.event.loss, **record.event.metrics}
        assert numbers_of(done.stdout) == pytest.approx(expected, rel=1e-5)


def test_averages_are_judged_where_there_are_some(tmp_path, run_here):
    train_here(make_run(ema=0.7), tmp_path, 2, recipe="transformer_lm")
    last = select(read_log(tmp_path / "events.jsonl"), Evaluated)[-1].event
    found = {}
    for option in ("--averaged", "--no-averaged"):
        done = run_here("evaluate", tmp_path, option)
        assert done.returncode == 0, done.stderr
        found[option] = numbers_of(done.stdout)["loss"]
    assert found["--averaged"] == pytest.approx(last.loss, rel=1e-5)
    assert found["--no-averaged"] == pytest.approx(last.unaveraged["loss"], rel=1e-5)
    assert found["--averaged"] != found["--no-averaged"]


def test_it_judges_by_other_data_and_metrics(tmp_path, run_here):
    train_here(make_run(), tmp_path, recipe="transformer_lm")
    done = run_here("evaluate", tmp_path, "--data", "plain_functions:make_one", "--metrics", "plain_functions:measure")
    assert done.returncode == 0, done.stderr
    assert "on 30 samples, all of the data" in done.stdout
    assert set(numbers_of(done.stdout)) == {"loss", "right", "length"}


def test_what_has_no_part_in_it_is_refused(tmp_path, run_here):
    train_here(make_run(), tmp_path, recipe="transformer_lm")
    for arguments, words in [
        (("--seed", 3), "may be others where a trained model is judged, but got another seed"),
        (("--checkpoint", "best"), "the best checkpoint must have been kept"),
        (("--checkpoint", 77), "a checkpoint must be newest, best or a step, but got '77'"),
        (("--averaged",), "moving averages must be in a checkpoint"),
    ]:
        done = run_here("evaluate", tmp_path, *arguments)
        assert done.returncode == 2
        assert words in done.stderr
    done = run_here("evaluate", tmp_path / "nothing")
    assert done.returncode == 2
    assert "there is none; check the path" in done.stderr
