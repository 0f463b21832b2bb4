"""Estimates against what a tracker counts in real steps of the same run."""

import threading

import numpy as np
import pytest
import torch

from paceline.comm import LocalGroup
from paceline.data.base import Source, Spec, Splits
from paceline.data.batch import Batch
from paceline.data.order import Interval
from paceline.memory import Memory, counting
from paceline.optim import SGD, AdamW, Optimizer
from paceline.recipes import find_recipe
from paceline.recipes.resnet.model import ResNet
from paceline.recipes.transformer_lm.model import TransformerLM
from paceline.registry import find_variant
from paceline.replica.replica import Replica
from paceline.sync import EveryStep
from paceline.training.memory_fit import estimate
from paceline.training.rehearsal import save_activations, save_optimizer

CPU = torch.device("cpu")
_SEEDING = threading.Lock()


class Samples(Source):
    """Noise of the shape of a text's samples, or of pictures."""

    def __init__(self, spec, is_text):
        self.spec = spec
        self.is_text = is_text

    def __len__(self):
        return 64

    def read(self, indices):
        shape = (len(indices), *self.spec.input_shape)
        if self.is_text:
            tokens = torch.zeros(shape, dtype=torch.int64)
            return tokens, tokens
        return torch.ones(shape), torch.zeros(len(indices), dtype=torch.int64)


def splits_of(spec, is_text):
    return Splits(Samples(spec, is_text), Samples(spec, is_text))


TEXT = splits_of(Spec(num_classes=64, input_shape=(32,)), is_text=True)
PICTURES = splits_of(Spec(num_classes=10, input_shape=(1, 16, 16)), is_text=False)


def make_run(recipe="transformer_lm", **changes):
    model = {
        "transformer_lm": TransformerLM(width=32, num_layers=3, num_heads=2),
        "resnet": ResNet(depth=18, width=8),
    }[recipe]
    run = find_recipe(recipe)()
    return run.model_copy(update={"model": model, "global_batch": 16, "clip_norm": 1.0, **changes})


def measure(run, splits, num_workers):
    """Return the most bytes that a tracker of tensors finds in a worker's third step."""

    def work(group):
        with _SEEDING:
            torch.manual_seed(0)
            module = run.model.build(splits.train.spec)
        save_activations(run, module, splits, group.size, CPU)
        optimizer = save_optimizer(run, run.optimizer.build(module))
        replica = Replica(
            module, optimizer, group=group, sync=run.sync, precision=run.precision, clip_norm=run.clip_norm
        )
        num_samples = run.global_batch // group.size // run.num_micro_batches

        def step():
            for number in range(run.num_micro_batches):
                inputs, targets = splits.train.read(np.arange(num_samples))
                last = number == run.num_micro_batches - 1
                batch = Batch((inputs, targets), num_samples, Interval(0, run.global_batch), last)
                loss = run.loss.loss(replica, batch)
                replica.backward(loss.mean, weight=loss.weight, last=last)
            replica.update()

        for _ in range(2):
            step()
        with counting(module, optimizer, "cpu") as tracker:
            step()
        peak = tracker.peak_bytes
        replica.close()
        return peak

    # Workers that are threads are summed in the memory of one of them, which processes do not need.
    return min(LocalGroup.run(num_workers, work))


def lean(name):
    return find_variant(Optimizer, name)()


CASES = {
    "plain": ("transformer_lm", 2, {}),
    "alone": ("transformer_lm", 1, {}),
    "alone, accumulated": (
        "transformer_lm",
        1,
        {"num_micro_batches": 4, "model": TransformerLM(width=64, num_heads=2)},
    ),
    "accumulated": ("transformer_lm", 2, {"num_micro_batches": 4}),
    "recomputed": ("transformer_lm", 2, {"memory": Memory(recompute="full")}),
    "recomputed selectively": ("transformer_lm", 2, {"memory": Memory(recompute="selective")}),
    "within a budget": ("transformer_lm", 2, {"memory": Memory(recompute="1MB")}),
    "bf16": ("transformer_lm", 2, {"precision": "bf16"}),
    "sgd": ("transformer_lm", 2, {"optimizer": SGD()}),
    "adafactor": ("transformer_lm", 2, {"optimizer": lean("adafactor")}),
    "top-k": ("transformer_lm", 2, {"sync": EveryStep(codec="top_k")}),
    "pictures": ("resnet", 2, {}),
    "pictures recomputed": ("resnet", 2, {"memory": Memory(recompute="full"), "num_micro_batches": 2}),
    "pictures, adamw": ("resnet", 1, {"optimizer": AdamW(), "precision": "bf16"}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_estimate_is_within_a_tenth_of_what_is_measured(case):
    recipe, num_workers, changes = CASES[case]
    run = make_run(recipe, **changes)
    splits = TEXT if recipe == "transformer_lm" else PICTURES
    estimated = estimate(run, splits, num_workers, CPU).peak_bytes
    measured = measure(run, splits, num_workers)
    assert estimated == pytest.approx(measured, rel=0.1)


class Mapped(Samples):
    """The same samples, by names."""

    def read(self, indices):
        tokens, targets = super().read(indices)
        return {"tokens_BT": tokens, "labels": targets}


def test_samples_with_names_need_what_pairs_do():
    run = make_run()
    mapped = Splits(*[Mapped(TEXT.train.spec, is_text=True)] * 2)
    named, paired = estimate(run, mapped, 2, CPU), estimate(run, TEXT, 2, CPU)
    # Labels of a mapping are shifted by the loss, which cuts logits to be as long.
    assert named.peak_bytes == pytest.approx(paired.peak_bytes, rel=0.05)
    for part in ("parameters", "gradients", "optimizer", "communication"):
        assert named.bytes_of[part] == paired.bytes_of[part]
