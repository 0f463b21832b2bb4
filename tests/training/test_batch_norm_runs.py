"""Runs of models with BatchNorm: over all workers as in one process, and refused where a batch would be too small."""

import pytest
import torch
from test_loop import Points, losses_of, make_run, read_tensors, train_here
from torch import nn

from paceline.data import Loader
from paceline.errors import CommunicationError, DataError, SettingsError
from paceline.memory.absent_group import AbsentGroup
from paceline.monitor.events import Evaluated, StepFinished
from paceline.monitor.reader import read_log, select
from paceline.optim import SGD
from paceline.registry import register
from paceline.training import Model
from paceline.training.loading import make_loader
from paceline.training.rehearsal import check_batch_norm_sizes


@register("test_normed_vectors")
class NormedVectors(Model):
    """Cannot learn from one sample."""

    def build(self, spec):
        return nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def make_normed_run(**changes):
    """Return a run of 50 samples an epoch in batches of 12: the fifth has 2."""
    return make_run(**({"model": NormedVectors(), "optimizer": SGD(learning_rate=0.05)} | changes))


def evaluations_of(directory):
    return [record.event.loss for record in select(read_log(directory / "events.jsonl"), Evaluated)]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_run_equals_one_of_one_worker_and_goes_on_bit_for_bit(tmp_path, num_workers):
    """Of 3 workers one has no sample of the epoch's last batch."""
    run = make_normed_run(batch_norm="global")
    alone, straight, broken = (tmp_path / name for name in ("alone", "straight", "broken"))
    train_here(run, alone)
    train_here(run, straight, num_workers)
    assert list(losses_of(straight).values()) == pytest.approx(list(losses_of(alone).values()), abs=1e-5)
    assert evaluations_of(straight) == pytest.approx(evaluations_of(alone), abs=1e-5)
    expected, tensors = read_tensors(alone, 14), read_tensors(straight, 14)
    assert expected.keys() == tensors.keys(), "statistics that all workers share are saved once"
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, atol=1e-5, rtol=1e-5)
    with pytest.raises((DataError, CommunicationError), match="the power must be on"):
        train_here(make_normed_run(batch_norm="global", data=Points(fail_at=9)), broken, num_workers)
    train_here(run, broken, num_workers)
    assert losses_of(broken) == losses_of(straight)
    resumed = read_tensors(broken, 14)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in tensors.items())


ASYNCHRONOUS = {"sync": "asgd", "optimizer": SGD(momentum=0.0), "clip_norm": None}

SIZES = [
    (2, {}, "some worker"),
    (3, {}, "some worker"),
    (1, {}, ""),
    (1, {"num_micro_batches": 2}, "some worker"),
    (2, {"num_steps": 4}, ""),  # before the epoch's end
    (2, {"drop_last": True}, ""),
    (2, {"join_epochs": True}, ""),
    (2, {"batch_norm": "global"}, ""),
    (2, {"batch_norm": "global", "num_micro_batches": 2, "global_batch": 7}, "all workers together"),  # the last has 1
    (2, {"global_batch": 2, "drop_last": True}, "some worker"),
    (2, {"shares": (11, 1), "drop_last": True}, "some worker"),
    (2, {"shares": (1, 0)}, ""),  # who has no sample learns from none
    (2, ASYNCHRONOUS, ""),  # 6 samples each, and one of 2
    (2, {**ASYNCHRONOUS, "global_batch": 14}, "some worker"),
    (1, {"global_batch": 4}, ""),
    (1, {"global_batch": 4, "layout": {"pipeline": 2}}, "some worker"),  # which cuts them into 4
    (2, {"model": make_run().model}, ""),  # a picture has more than one pixel
]


@pytest.mark.parametrize("changes", [{}, ASYNCHRONOUS], ids=["together", "at their own pace"])
def test_the_check_looks_at_as_many_boundaries_however_long_the_run_is(monkeypatch, changes):
    """`--num_steps 1e9` was silent for minutes before its first step."""
    counts = []
    list_sizes = Loader.list_sizes

    def count(self, boundaries, **options):
        counts.append(len(boundaries))
        return list_sizes(self, boundaries, **options)

    monkeypatch.setattr(Loader, "list_sizes", count)
    for num_steps in (10**5, 10**6):
        run = make_normed_run(num_steps=num_steps, global_batch=4, checkpoint_interval=5, **changes)
        splits = run.open_data()
        check_batch_norm_sizes(run, splits, make_loader(run, splits, AbsentGroup(0, 1, torch.device("cpu"))))
    assert counts[0] == counts[1] <= 10_000


@pytest.mark.parametrize(("num_workers", "changes", "whose"), SIZES, ids=str)
def test_a_micro_batch_of_one_sample_is_refused_where_the_model_cannot_learn_from_it(num_workers, changes, whose):
    run = make_normed_run(**changes)
    splits = run.data.open()
    loader = make_loader(run, splits, AbsentGroup(0, num_workers, torch.device("cpu")))
    if not whose:
        check_batch_norm_sizes(run, splits, loader)
        return
    with pytest.raises(SettingsError, match=f"where a micro-batch of {whose} has one sample .50 samples in global"):
        check_batch_norm_sizes(run, splits, loader)


def test_it_is_refused_before_the_first_step_and_only_if_it_is_to_come(tmp_path):
    with pytest.raises(SettingsError, match=r"leave out an epoch's last samples \(drop_last\)"):
        train_here(make_normed_run(), tmp_path, 2)
    assert not select(read_log(tmp_path / "events.jsonl"), StepFinished)
    train_here(make_normed_run(num_steps=5), tmp_path)  # alone
    train_here(make_normed_run(num_steps=8), tmp_path, 2)  # steps of the second epoch, but not its last
    assert list(losses_of(tmp_path)) == list(range(1, 9))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"drop_last": True}, [12, 12, 12, 12, 12, 12]), ({"join_epochs": True}, [12] * 6), ({}, [12, 12, 12, 12, 2, 12])],
    ids=str,
)
def test_what_becomes_of_an_epochs_last_samples(tmp_path, changes, expected):
    train_here(make_normed_run(num_steps=6, **changes), tmp_path)
    steps = select(read_log(tmp_path / "events.jsonl"), StepFinished)
    assert [record.event.num_samples for record in steps] == expected
    last = {"drop_last": 50 + 24, "join_epochs": 72}.get(next(iter(changes), ""), 62)
    assert steps[-1].event.position == last


def test_a_run_has_one_end_of_its_epochs():
    with pytest.raises(ValueError, match="drop_last and join_epochs must not both be true"):
        make_normed_run(drop_last=True, join_epochs=True)
