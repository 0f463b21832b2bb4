"""Loops with several models, each with its replica, in layouts: equal to plain torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.comm import LocalGroup
from paceline.errors import GradientError
from paceline.parallel.gradient_use import GradientUse
from paceline.replica.buckets import BucketLauncher, make_buckets
from paceline.testing.processes import run_processes

BATCH, NUM_STEPS = 16, 3


def make_models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
    return generator.double(), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)).double()


def make_data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(NUM_STEPS * BATCH, 6).double(), torch.randn(NUM_STEPS * BATCH, 4).double()


def optimize(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train_alone() -> list[float]:
    generator, critic = models = make_models()
    optimizers, losses = [optimize(model) for model in models], []
    for real, noise in zip(*(tensor.split(BATCH) for tensor in make_data()), strict=True):
        fake = generator(noise)
        judged = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
        for number in (1, 0):
            loss = judged if number else F.softplus(-critic(fake)).mean()
            for model in models:
                model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(models[number].parameters(), 0.3)
            optimizers[number].step()
            losses.append(loss.item())
    return losses


def train(layout: dict[str, int]) -> list[float]:
    torch.set_num_threads(1)
    reals, noises = make_data()
    losses: list[float] = []
    with paceline.join():
        pairs = zip(make_models(), (noises[:1], reals[:1]), strict=True)
        models = [paceline.parallelize(model, paceline.Layout(**layout), sample=sample) for model, sample in pairs]
        g, c = (paceline.Replica(model, optimize(model), clip_norm=0.3) for model in models)
        dataset = torch.utils.data.TensorDataset(reals, noises)
        for batch in paceline.Loader(dataset, BATCH, num_steps=NUM_STEPS, shuffle=False):
            real, noise = batch.data
            fake = g(noise)
            judged = F.softplus(c(fake.detach())).mean() + F.softplus(-c(real)).mean()  # the critic runs twice
            c.backward(judged, weight=batch.count())
            losses.append(c.update().loss)
            g.backward(F.softplus(-models[1](fake)).mean(), weight=batch.count())
            losses.append(g.update().loss)
        for replica in (g, c):
            replica.close()
    return losses


SLOW = [{"data": 2, "sharded": 2}, {"sharded": 2, "zero_stage": 2}, {"tensor": 2}]
LAYOUTS = [{"sharded": 2}, *(pytest.param(layout, marks=pytest.mark.slow) for layout in SLOW)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_models_that_train_each_other_do_as_on_one_rank(layout: dict[str, int]) -> None:
    expected = train_alone()
    for result in run_processes(4 if "data" in layout else 2, train, {"layout": layout}, timeout_s=100):
        assert result.exit_code == 0, result.output
        assert result.value == pytest.approx(expected, rel=1e-12)  # the rounding of doubles


def test_gradients_that_one_backward_makes_twice_are_sent_once_they_are_added_up() -> None:
    """FSDP2 makes a block's gradient for each of its forward passes; here backward simply runs twice."""
    layer = nn.Linear(2, 1, bias=False)
    parameters = dict(layer.named_parameters())
    sent: list[list[float]] = []
    buckets = make_buckets(parameters, [["weight"]], LocalGroup(), {})
    launcher = BucketLauncher(buckets, lambda bucket: sent.append(bucket.flat.numerators.tolist()) or object())
    launcher.arm(is_eager=False)
    for _ in range(2):
        layer(torch.tensor([1.0, 2.0])).backward()
    assert sent == []
    launcher.finish()
    assert sent == [[2.0, 4.0]]
    with pytest.raises(GradientError, match="made twice"):
        layer(torch.ones(2)).backward()
    launcher.close()


def test_blocks_that_ran_forward_twice_since_the_last_backward_are_known() -> None:
    use = GradientUse(nn.Linear(2, 2), [], LocalGroup(), "")
    found = []
    for names in (["0", "1"], ["0"], ["1", "1"]):
        use._gathered += names
        found.append(use.repeats_blocks)
        use.end_backward()
    assert found == [False, False, True]
    use.exchange(LocalGroup())
    assert not use.repeats_blocks
