"""What asynchronous SGD does by default about delays, and about the small batch of a push."""

import pytest
import torch
from serving import ByHand, paper

from paceline.sync import ASGD


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize(("pushes_per_step", "factor"), [(1, 0.5), (2, 0.5**0.5), (8, 1.0)])
def test_by_default_a_step_with_a_part_of_the_samples_has_a_lower_rate(make, pushes_per_step, factor):
    """By the root of that part."""
    start = {"num_workers": 4, "learning_rate": 0.1, "start": (0.0, 0.0), "make": make}
    lowered = ByHand(ASGD(pushes_per_step=pushes_per_step, warmup_steps=0), **start)
    plain = ByHand(paper(pushes_per_step=pushes_per_step), **start)
    for by_hand in (lowered, plain):
        for _ in range(pushes_per_step):
            by_hand.swap(0, [1.0, -2.0])
    torch.testing.assert_close(lowered.x, factor * plain.x)


def test_rates_rise_over_the_first_samples_of_several_workers():
    rule = paper(warmup_steps=2)
    by_hand = ByHand(rule, num_workers=2, learning_rate=1.0, start=(0.0, 0.0))
    alone = ByHand(rule, num_workers=1, learning_rate=1.0, start=(0.0, 0.0))
    heights = []
    for _ in range(6):
        before = by_hand.x[0].item()
        by_hand.swap(0, [-1.0, 0.0])
        alone.swap(0, [-1.0, 0.0])
        heights.append(by_hand.x[0].item() - before)
    assert heights == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert alone.x[0] == 6.0


@pytest.mark.parametrize(("num_steps", "chosen"), [(5, 0), (100, 10), (10_000, 30)])
def test_by_default_rates_rise_over_a_tenth_of_the_run_and_not_over_thirty_steps(num_steps, chosen):
    assert ASGD().fit_length(num_steps).warmup_steps == chosen
    assert ASGD(warmup_steps=7).fit_length(num_steps).warmup_steps == 7


def test_by_default_only_adams_momentum_is_lowered_and_not_below_a_half():
    def make(parameters, lr):
        return torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.95))

    by_hand = ByHand(ASGD(), make=make, num_workers=1, start=(0.0, 0.0))
    by_hand.server.server_update._mean_delay = 9.0
    by_hand.server.server_update._num_delays = 10**9
    by_hand.swap(0, [1.0, 1.0])
    [state] = by_hand.shard.optimizer.state.values()
    torch.testing.assert_close(state["exp_avg"], torch.full((2,), 0.5, dtype=torch.float64), rtol=0, atol=0.01)
    plain, sgd = (ByHand(rule, num_workers=1, momentum=0.9) for rule in (paper(), ASGD()))
    for one in (plain, sgd):
        one.server.server_update._mean_delay = 9.0
        for _ in range(3):
            one.swap(0, [1.0, 1.0])
    assert torch.equal(plain.x, sgd.x)
