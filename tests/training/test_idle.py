"""What never acts in a run is told before it."""

import re

import pytest
import torch

from paceline.compression import Int8, OneBit, PowerSGD, TopK
from paceline.recipes import find_recipe
from paceline.schedules import Cosine, GrowingBatch, NoiseScaleBatch, SteppedBatch
from paceline.sync import ASGD, ChocoSGD, DiLoCo, EveryStep, LocalSGD, PostLocalSGD, StreamingDiLoCo
from paceline.testing.rule_contract import every_rule
from paceline.training.growth import Growth
from paceline.training.idle import list_idle

SHAPES = [torch.Size([64, 64]), torch.Size([8])]


def idle(num_steps, num_workers=2, **changes):
    run = find_recipe("transformer_lm")().model_copy(update={"schedule": Cosine(warmup_steps=0), **changes})
    return list(list_idle(run, num_steps, SHAPES, num_workers))


@pytest.mark.parametrize(
    ("changes", "num_steps", "told"),
    [
        ({"sync": DiLoCo(period=50)}, 49, "sync diloco exchanges nothing in 49 steps, since its period is 50"),
        ({"sync": LocalSGD(period=50)}, 49, "sync local_sgd exchanges nothing in 49 steps"),
        ({"sync": PostLocalSGD()}, 1000, "sync post_local_sgd is every_step .* lower --sync.synchronous_steps"),
        ({"sync": EveryStep(codec="int8", dense_steps=9)}, 9, "begins with step 9; lower --sync.dense_steps"),
        ({"sync": DiLoCo(period=16)}, 300, "sync diloco has 18 rounds in 300 steps, .* take --sync.period 12"),
        ({"sync": StreamingDiLoCo(period=16)}, 300, "streaming_diloco has 18 rounds"),
        ({"sync": DiLoCo(period=16)}, 99, "diloco has 6 rounds .* take --sync every_step, or at least 100 steps"),
        ({"sync": DiLoCo(period=16)}, 100, "diloco has 6 rounds in 100 steps, .* take --sync.period 4"),
        (
            {"sync": DiLoCo(period=4, synchronous_steps=60)},
            150,
            "diloco has 22 rounds .* every_step, or at least 160 steps with --sync.period 4",
        ),
        (
            {"sync": StreamingDiLoCo(period=4, outer_momentum_warmup=26)},
            100,
            "warm-up takes 26 rounds, the run has 25; lower --sync.outer_momentum_warmup",
        ),
        (
            {"schedule": Cosine(warmup_steps=20)},
            20,
            "warm-up takes 20 steps, the run 20; lower --schedule.warmup_steps",
        ),
        (
            {"sync": ASGD(warmup_steps=100)},
            30,
            "only rises: its warm-up takes 100 steps, the run 30; lower --sync.warmup",
        ),
        (
            {"sync": StreamingDiLoCo(period=4, num_fragments=4, codec="int8")},
            100,
            "codec int8 codes nothing: all blocks are below dense_below=2048; lower --sync.codec.dense_below",
        ),
        ({"sync": EveryStep(codec=OneBit(dense_below=4097))}, 9, "codec one_bit codes nothing: .*dense_below=4097"),
        ({"sync": ChocoSGD(codec=TopK(dense_below=4097))}, 9, "codec top_k codes nothing"),
        (
            {"sync": ASGD(pull_codec=Int8(dense_below=4097))},
            99,
            "pull_codec int8 .* lower --sync.pull_codec.dense_below",
        ),
        ({"sync": EveryStep(codec=PowerSGD(dense_below=0, low_rank=32))}, 9, "below the size for which it pays"),
        ({"batch_schedule": GrowingBatch(interval=30)}, 30, "growing never .* its interval is 30 steps, the run 30"),
        ({"batch_schedule": GrowingBatch(interval=3, factor=1)}, 30, "growing never .* its factor is 1 and max_batch"),
        ({"batch_schedule": NoiseScaleBatch(interval=31)}, 30, "noise_scale never changes the batch: its interval"),
        (
            {"batch_schedule": NoiseScaleBatch(interval=3, max_batch=32), "global_batch": 32},
            30,
            "noise_scale never changes the batch of 32, since it is the smallest and the largest",
        ),
        ({"batch_schedule": SteppedBatch(steps=((5, 64), (30, 128)))}, 30, "batch does not change at step 30: the run"),
        ({"batch_schedule": SteppedBatch()}, 30, "stepped never changes the batch, since it has no steps"),
        ({"growth": Growth(steps=(5, 30), depths=(8, 16))}, 30, "does not grow at step 30: the run ends after 30"),
    ],
)
def test_what_never_acts_is_told(changes, num_steps, told):
    [sentence] = idle(num_steps, **changes)
    assert re.search(told, sentence)


@pytest.mark.parametrize(
    ("changes", "num_steps"),
    [
        ({"sync": LocalSGD(period=50)}, 50),
        ({"sync": PostLocalSGD()}, 1100),
        ({"sync": EveryStep(codec="int8", dense_steps=9)}, 10),
        ({"sync": ASGD(warmup_steps=29)}, 30),
        ({"sync": StreamingDiLoCo(period=4, num_fragments=1, codec="int8")}, 100),
        ({"sync": EveryStep(codec="int8")}, 9),
        ({"sync": DiLoCo(period=12)}, 300),
        ({"sync": DiLoCo(period=12, outer_momentum_warmup=25)}, 300),
        ({"schedule": Cosine(warmup_steps=20)}, 21),
        ({"growth": Growth(steps=(5, 29), depths=(8, 16))}, 30),
        ({"batch_schedule": GrowingBatch(interval=29)}, 30),
        ({"batch_schedule": NoiseScaleBatch(interval=29)}, 30),
        ({"batch_schedule": SteppedBatch(steps=((5, 64), (29, 128)))}, 30),
    ],
)
def test_what_acts_is_not_told(changes, num_steps):
    assert idle(num_steps, **changes) == []


def test_a_worker_alone_needs_no_exchange():
    assert idle(49, num_workers=1, sync=DiLoCo(period=50)) == []


@pytest.mark.parametrize("name", sorted(every_rule()))
def test_every_rule_acts_in_a_long_run(name):
    assert idle(2000, sync=every_rule()[name]) == []
