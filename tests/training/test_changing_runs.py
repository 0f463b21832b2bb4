"""Runs whose batch or model changes on the way: what they write, and that a stopped run goes on as if it had not."""

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn

from paceline.comm import LocalGroup
from paceline.data import Data, Source, Spec, Splits
from paceline.errors import CommunicationError, DataError, SettingsError
from paceline.memory import Memory
from paceline.monitor.events import BatchChanged, GradientNoiseMeasured, ModelGrown, RunStarted, StepFinished
from paceline.monitor.log import EventLog
from paceline.monitor.reader import read_log, select
from paceline.optim import SGD, AdamW
from paceline.recipes.transformer_lm.model import TransformerLM
from paceline.registry import register
from paceline.schedules import Constant, FixedBatch, GrowingBatch, Linear, NoiseScaleBatch, PerWorkerBatch, SteppedBatch
from paceline.sync import EveryStep, LocalSGD
from paceline.training import Model, NextToken, Run, train
from paceline.training.growth import Growth

sys.path.append(str(Path(__file__).parents[1] / "sync"))
from distant import DEVICE, OnDevice


@register("test_changing_words")
class Words(Data):
    """Random sequences with a pattern in them; reading past `fail_at` reads fails."""

    fail_at: int = -1

    def open(self):
        return Splits(WordSource(60, self.fail_at), WordSource(5, -1))


class WordSource(Source):
    def __init__(self, num_samples, fail_at):
        self.spec = Spec(num_classes=7, input_shape=(6,))
        generator = torch.Generator().manual_seed(num_samples)
        first = torch.randint(7, (num_samples, 1), generator=generator)
        noise = torch.randint(2, (num_samples, 7), generator=generator)
        self.tokens = (first + torch.arange(7) + noise) % 7
        self.reads_left = fail_at

    def __len__(self):
        return len(self.tokens)

    def read(self, indices):
        self.reads_left -= 1
        if self.reads_left == 0:
            raise DataError("the power must be on, but it is off")
        return self.tokens[indices, :-1], self.tokens[indices, 1:]


@register("test_changing_flat")
class Flat(Model):
    """Without layers that could be more."""

    def build(self, spec):
        return nn.Embedding(spec.num_classes, spec.num_classes)


def make_run(**changes):
    settings = {
        "model": TransformerLM(width=8, num_layers=1, num_heads=2),
        "data": Words(),
        "loss": NextToken(sample_tokens=0),
        "optimizer": AdamW(learning_rate=0.01),
        "schedule": Linear(warmup_steps=2),
        "global_batch": 6,
        "num_steps": 14,
        "evaluate_interval": 0,
        "checkpoint_interval": 5,
        "keep_checkpoints": None,
        "hash_interval": 3,
        "bucket_bytes": 600,
        "timeline_interval": 0,
    }
    return Run(**(settings | changes))


def train_here(run, directory, num_workers=1):
    directory.mkdir(exist_ok=True)

    def worker(group):
        with EventLog(directory / "events.jsonl", run="r", rank=group.rank) as log:
            return train(run, directory, group, log, recipe="test")

    assert LocalGroup.run(num_workers, worker) == [True] * num_workers
    return read_log(directory / "events.jsonl")


def fail_then_go_on(run, directory, fail_at, num_workers, num_later=None):
    """Train with a power cut after the checkpoint of step 5, and again; return what both wrote."""
    with pytest.raises((DataError, CommunicationError), match="the power must be on"):
        train_here(run.model_copy(update={"data": Words(fail_at=fail_at)}), directory, num_workers)
    records = train_here(run, directory, num_later or num_workers)
    assert [record.event.start_step for record in select(records, RunStarted)] == [0, 5]
    return records


def told(records, kind):
    """Return the events of a kind by step; what was told twice is what was told last."""
    return {record.step: record.event for record in select(records, kind)}


def steps_of(records):
    kept = told(records, StepFinished)
    return {step: (event.loss, event.num_samples, event.learning_rate) for step, event in kept.items()}


def read_tensors(directory):
    (checkpoint,) = directory.glob("checkpoints/step-00000014*")
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_end(straight, resumed):
    expected, actual = read_tensors(straight), read_tensors(resumed)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


GROWING = GrowingBatch(factor=2, interval=4, max_batch=20)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_growing_batch_goes_on_bit_for_bit(tmp_path, num_workers):
    optimizer = AdamW(learning_rate=0.01, scaling="square_root", base_batch=6)
    run = make_run(batch_schedule=GROWING, optimizer=optimizer)
    straight = train_here(run, tmp_path / "straight", num_workers)
    steps = told(straight, StepFinished)
    # 60 samples an epoch: the second ends after 8 of step 10's 20.
    sizes = [6, 6, 6, 6, 12, 12, 12, 12, 20, 20, 8, 20, 20, 20]
    assert [steps[step].num_samples for step in range(1, 15)] == sizes
    assert [steps[step].position for step in range(1, 15)] == list(itertools.accumulate(sizes))
    changes = told(straight, BatchChanged)
    assert {step: (event.global_batch, event.start) for step, event in changes.items()} == {4: (12, 24), 8: (20, 72)}
    for step in range(14):
        factor = run.schedule.factor(step, 14) * math.sqrt(min(20, 6 * 2 ** (step // 4)) / 6)
        assert steps[step + 1].learning_rate == pytest.approx(0.01 * factor)
    resumed = fail_then_go_on(run, tmp_path / "resumed", 12, num_workers)
    assert steps_of(resumed) == steps_of(straight)
    assert select(resumed, RunStarted)[-1].event.global_batch == 12
    assert_same_end(tmp_path / "straight", tmp_path / "resumed")


def test_a_growing_batch_goes_on_with_other_workers_and_micro_batches(tmp_path):
    """Sums of other parts round differently; Adam makes at most a few times its rate of it."""
    run = make_run(batch_schedule=GROWING)
    straight = train_here(run, tmp_path / "straight")
    larger = make_run(batch_schedule=GROWING.model_copy(update={"micro_batches": "larger"}))
    resumed = fail_then_go_on(larger, tmp_path / "resumed", 9, num_workers=3, num_later=2)
    for step, (loss, num_samples, rate) in steps_of(straight).items():
        assert steps_of(resumed)[step] == (pytest.approx(loss, abs=1e-4), num_samples, rate)


def test_workers_that_seldom_synchronise_take_a_growing_batch(tmp_path):
    run = make_run(batch_schedule=SteppedBatch(steps=((3, 15),)), sync=LocalSGD(period=2))
    straight = train_here(run, tmp_path / "straight", 2)
    assert [event.num_samples for event in told(straight, StepFinished).values()][:6] == [6, 6, 6, 15, 15, 12]
    resumed = fail_then_go_on(run, tmp_path / "resumed", 13, 2)
    assert steps_of(resumed) == steps_of(straight)
    assert_same_end(tmp_path / "straight", tmp_path / "resumed")


@pytest.mark.parametrize(("num_workers", "num_micro_batches"), [(1, 2), (2, 1)])
def test_a_batch_that_follows_the_noise_goes_on_bit_for_bit(tmp_path, num_workers, num_micro_batches):
    schedule = NoiseScaleBatch(interval=3, min_batch=4, max_batch=40, multiple_of=1)
    run = make_run(batch_schedule=schedule, num_micro_batches=num_micro_batches, clip_norm=None)
    straight = train_here(run, tmp_path / "straight", num_workers)
    measured = told(straight, GradientNoiseMeasured)
    assert list(measured) == [3, 6, 9, 12]
    batch, chosen = 6, []
    for event in measured.values():
        batch = schedule.choose(event.noise_scale, batch, 6)
        chosen.append(batch)
    changes = [event.global_batch for event in told(straight, BatchChanged).values()]
    assert changes
    # What was chosen at the end is beyond the samples that were read ahead.
    assert [key for key, _ in itertools.groupby([6, *chosen])][1 : 1 + len(changes)] == changes
    resumed = fail_then_go_on(run, tmp_path / "resumed", 16 if num_micro_batches == 2 else 9, num_workers)
    assert told(resumed, GradientNoiseMeasured) == measured
    assert steps_of(resumed) == steps_of(straight)
    assert_same_end(tmp_path / "straight", tmp_path / "resumed")


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("method", ["stack", "identity"])
def test_a_run_goes_on_across_growth_bit_for_bit(tmp_path, num_workers, method):
    """It grows at step 5, right after a checkpoint, and at step 8; the power fails after the first."""
    run = make_run(growth=Growth(steps=(5, 8), method=method), noise_scale_interval=4, num_micro_batches=2)
    straight = train_here(run, tmp_path / "straight", num_workers)
    grown = told(straight, ModelGrown)
    assert {step: event.num_layers for step, event in grown.items()} == {5: 2, 8: 4}
    resumed = fail_then_go_on(run, tmp_path / "resumed", 15, num_workers)
    assert told(resumed, ModelGrown) == grown
    assert told(resumed, GradientNoiseMeasured) == told(straight, GradientNoiseMeasured)
    assert steps_of(resumed) == steps_of(straight)
    assert_same_end(tmp_path / "straight", tmp_path / "resumed")
    assert "model/layers.3.mlp.project.weight" in read_tensors(tmp_path / "resumed")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_run_goes_on_across_widening_bit_for_bit(tmp_path, num_workers):
    run = make_run(growth=Growth(steps=(5, 8), widths=(16, 32)))
    straight = train_here(run, tmp_path / "straight", num_workers)
    grown = told(straight, ModelGrown)
    assert {step: (event.width, event.num_layers) for step, event in grown.items()} == {5: (16, 1), 8: (32, 1)}
    resumed = fail_then_go_on(run, tmp_path / "resumed", 9, num_workers)
    assert told(resumed, ModelGrown) == grown
    assert steps_of(resumed) == steps_of(straight)
    assert_same_end(tmp_path / "straight", tmp_path / "resumed")
    assert read_tensors(tmp_path / "resumed")["model/embedding.weight"].shape == (7, 32)
    later = run.model_copy(update={"growth": Growth(steps=(9,), widths=(16,)), "num_steps": 16})
    with pytest.raises(SettingsError, match="narrower, but it has 1 layers of width 32 and growth gives it 1 layers"):
        train_here(later, tmp_path / "straight", num_workers)


def test_a_checkpoint_after_growth_has_the_right_depth(tmp_path):
    run = make_run(growth=Growth(steps=(3,), depths=(3,)), sync=EveryStep(codec="top_k"))
    straight = train_here(run, tmp_path / "straight", 2)
    resumed = fail_then_go_on(run, tmp_path / "resumed", 9, 2)
    assert steps_of(resumed) == steps_of(straight)
    assert_same_end(tmp_path / "straight", tmp_path / "resumed")
    later = run.model_copy(update={"growth": Growth(steps=(20,)), "num_steps": 16})
    with pytest.raises(
        SettingsError, match="shallower or narrower, but it has 3 layers of width 8 and growth gives it 1 layers of"
    ):
        train_here(later, tmp_path / "straight", 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_schedule": GrowingBatch(max_batch=4)}, "global_batch must be from 1 to 4"),
        ({"num_steps": None, "num_epochs": 2, "sync": "asgd"}, "num_steps must be given with sync asgd"),
        ({"batch_schedule": "growing", "sync": "asgd"}, "batch_schedule must be constant with sync asgd"),
        ({"noise_scale_interval": 5, "sync": "local_sgd"}, "summed exactly at every step, but got sync local_sgd"),
        ({"noise_scale_interval": 5, "sync": EveryStep(codec="top_k")}, "sync every_step with codec top_k"),
        (
            {"noise_scale_interval": 5, "clip_norm": None, "landing": "next_forward"},
            "landing must be update, but got",
        ),
        (
            {"noise_scale_interval": 5, "layout": {"tensor": 2}},
            r"since it compares the norm of .*--noise_scale_interval 0",
        ),
        ({"noise_scale_interval": 5, "batch_schedule": "noise_scale"}, "noise_scale_interval must be that of batch"),
        ({"memory": {"offload": "parameters"}, "layout": {"sharded": 2}}, "must come with a layout of data alone"),
        ({"memory": {"offload": "parameters"}, "compiler": "eager"}, "must come without a compiler, but got eager"),
        ({"growth": {"steps": (3, 3)}}, "must ascend from 1 on"),
        ({"growth": {"steps": (0,)}}, "must ascend from 1 on"),
        ({"growth": {"steps": (3, 5), "depths": (4,)}}, "a depth for each step, but got 1 depths for 2 steps"),
        ({"growth": {"steps": (3,), "depths": (1,)}}, "growth.depths must ascend from the model's 1 layers"),
        ({"growth": {"steps": (3,), "widths": (12,)}}, "larger multiple of the one before, from the model's 8 on"),
        ({"growth": {"steps": (3,), "widths": (8,)}}, "larger multiple of the one before, from the model's 8 on"),
        ({"growth": {"steps": (3, 5), "widths": (16,)}}, "a width for each step, but got 1 widths for 2 steps"),
        ({"growth": {"steps": (3,), "widths": (16,), "depths": (2,)}}, "must grow in depth or in width"),
        ({"growth": {"steps": (3,), "widths": (16,)}, "sync": EveryStep(codec="top_k")}, "without a codec, whose"),
        (
            {"growth": {"steps": (3,), "widths": (16,)}, "model": "test_changing_flat"},
            "growth must be of a model that knows its width",
        ),
        ({"growth": {"steps": (3,)}, "sync": "local_sgd"}, "keeps replicas equal, but got local_sgd"),
        ({"growth": {"steps": (3,)}, "layout": {"pipeline": 2}}, "copies units and layers of whole .*--initial"),
        (
            {"shares": "measured", "layout": {"tensor": 2}},
            "since each waits for the others .*give one weight per worker",
        ),
        ({"growth": {"steps": (3,)}, "model": "test_changing_flat"}, "growth must be of a model that knows its depth"),
    ],
)
def test_what_cannot_be_right_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        make_run(**changes)


def test_a_run_whose_parameters_wait_in_cpu_memory_learns_the_same(tmp_path, monkeypatch):
    """It computes on a device that refuses tensors of the CPU, whose attention is another kernel."""
    monkeypatch.setattr("paceline.training.rehearsal.default_device", lambda: DEVICE)
    ends = []
    for offload in ("none", "parameters"):
        run = make_run(optimizer=SGD(), memory=Memory(offload=offload, check=False))
        (tmp_path / offload).mkdir()
        with EventLog(tmp_path / offload / "events.jsonl", run="r", rank=0) as log, LocalGroup() as group, OnDevice():
            assert train(run, tmp_path / offload, group, log, recipe="test")
        ends.append(read_tensors(tmp_path / offload))
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-4, atol=1e-6)


def test_a_batch_that_may_fall_below_the_workers_is_refused_at_once(tmp_path):
    run = make_run(batch_schedule=NoiseScaleBatch(min_batch=2))
    with pytest.raises(SettingsError, match="batch_schedule noise_scale may take it to 2 with 3 workers"):
        train_here(run, tmp_path, 3)


@pytest.mark.parametrize(("scaling", "power"), [("none", 0.0), ("linear", 1.0), ("square_root", 0.5)])
def test_a_batch_per_worker_follows_the_number_of_workers(tmp_path, scaling, power):
    policy = PerWorkerBatch(samples=3, scaling=scaling)
    run = make_run(batch_policy=policy, schedule=Constant(), num_steps=8)
    records = fail_then_go_on(run, tmp_path / "run", 9, num_workers=2, num_later=4)
    steps = told(records, StepFinished)
    assert [steps[step].num_samples for step in range(1, 9)] == [6] * 5 + [12, 12, 6]  # 60 an epoch
    assert steps[8].position == 60  # none is lost or used twice
    assert [steps[step].learning_rate for step in (5, 6)] == pytest.approx([0.01, 0.01 * 2**power])
    assert told(records, BatchChanged) == {5: BatchChanged(global_batch=12, start=30, rate_factor=2**power)}


def test_a_batch_per_worker_of_as_many_workers_is_the_fixed_batch(tmp_path):
    steps = [
        steps_of(train_here(make_run(batch_policy=policy, num_steps=4), tmp_path / policy.name, num_workers=2))
        for policy in (FixedBatch(), PerWorkerBatch(samples=3))
    ]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": None, "num_epochs": 2}, "got num_epochs, whose number of steps would change"),
        ({"batch_schedule": GROWING}, "got batch_schedule growing, which chooses the batch itself"),
        ({"num_virtual_workers": 2, "num_threads": 1}, "got num_virtual_workers, whose steps are the same"),
        ({"optimizer": AdamW(learning_rate=0.01, scaling="linear")}, "got optimizer.scaling linear; give the rule as"),
    ],
)
def test_a_batch_per_worker_refuses_what_has_another_batch(changes, message):
    with pytest.raises(ValidationError, match=message):
        make_run(batch_policy=PerWorkerBatch(samples=3), **changes)


def make_virtual(**changes):
    larger = GrowingBatch(factor=2, interval=4, max_batch=20, micro_batches="larger")
    settings = {"num_virtual_workers": 5, "num_threads": 1, "batch_schedule": larger, "ema": 0.9}
    return make_run(**(settings | changes))


def test_virtual_workers_train_the_same_bits_on_other_workers(tmp_path):
    straight = train_here(make_virtual(), tmp_path / "straight")
    resumed = fail_then_go_on(make_virtual(), tmp_path / "resumed", 20, num_workers=3, num_later=2)
    assert steps_of(resumed) == steps_of(straight)
    assert_same_end(tmp_path / "straight", tmp_path / "resumed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_threads": None}, r"got no num_threads, whose default depends on .*; give one \(--num_threads 1\)"),
        ({"num_micro_batches": 2}, "got more than one micro-batch of each; take more virtual workers"),
        ({"batch_schedule": GROWING}, "got more than one micro-batch of each; .* with larger micro_batches"),
        ({"shares": (1.0, 2.0)}, r"got shares \(1.0, 2.0\), but all virtual workers have equal ones"),
        ({"noise_scale_interval": 5}, "got the gradient noise scale, which compares the gradients of real workers"),
        ({"num_virtual_workers": 7}, "num_virtual_workers 7 must fit other settings, but got global_batch 6, too few"),
        ({"sync": LocalSGD()}, "got sync local_sgd, whose workers train models of their own"),
    ],
)
def test_virtual_workers_refuse_what_depends_on_workers(changes, message):
    with pytest.raises(ValidationError, match=message):
        make_virtual(**changes)
