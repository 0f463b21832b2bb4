import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.compression import RandomK
from paceline.compression.codec import AllReduce, CodecContext, shared_generator
from paceline.compression.random_k import draw_indices
from paceline.testing.lockstep import exchange_all


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, derandomize=True)
@given(num_elements=st.integers(1, 5000), share=st.floats(0, 1), seed=st.integers(0, 3))
def test_exactly_k_different_indices_are_drawn(num_elements, share, seed):
    num_drawn = max(math.ceil(share * num_elements), 1)
    indices = draw_indices(num_elements, num_drawn, torch.Generator().manual_seed(seed))
    assert len(indices) == num_drawn
    assert int(indices[0]) >= 0
    assert int(indices[-1]) < num_elements
    assert (indices.diff() > 0).all()


@pytest.mark.parametrize("num_drawn", [2, 3], ids=["by rejection", "by permutation"])
def test_every_set_is_as_likely(num_drawn):
    generator = torch.Generator().manual_seed(0)
    counts = {frozenset(indices): 0 for indices in combinations(range(8), num_drawn)}
    expected = 100
    for _ in range(expected * len(counts)):
        counts[frozenset(draw_indices(8, num_drawn, generator).tolist())] += 1
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    freedom = len(counts) - 1
    assert chi_squared < freedom + 4 * math.sqrt(2 * freedom)  # four standard deviations


@pytest.mark.parametrize("change", [{"step": 8}, {"block": "another"}, {"seed": 1}], ids=["step", "block", "seed"])
def test_the_draw_differs_with_step_block_and_seed(change):
    usual = {"block": "block", "step": 7, "seed": 0}
    value = draw(3000)
    once, again, other = (
        exchange_all(RandomK(), [value], **place)[0].total for place in (usual, usual, {**usual, **change})
    )
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_the_generator_is_the_same_on_every_worker():
    seeds = {shared_generator(CodecContext("weight", 3, rank, 5, seed=2)).initial_seed() for rank in range(5)}
    assert len(seeds) == 1
    assert seeds != {shared_generator(CodecContext("weight", 32, 0, 5)).initial_seed()}


def test_all_elements_are_the_exact_sum():
    values = [(draw(50, 50, seed=rank) * 100).round() for rank in range(3)]
    for codec in (RandomK(density=1), RandomK(density=1, error_feedback=False, scaled=True)):
        assert torch.equal(exchange_all(codec, values)[1].total, sum(values))


def test_only_values_travel_and_only_once():
    requests = []
    results = exchange_all(RandomK(density=0.01), [draw(5000), draw(5000, seed=1)], requests=requests)
    assert [(type(request), request.payload.numel()) for request in requests] == [(AllReduce, 50)]
    assert int((results[0].total != 0).sum()) == 50


def test_scaled_sums_are_right_on_average():
    """The mean of n draws of x * d/k with probability k/d has variance x^2 (d/k - 1) / n."""
    values, num_steps = [draw(40, seed=rank) for rank in range(2)], 2000
    codec = RandomK(density=0.1, error_feedback=False, scaled=True, dense_below=0)
    mean = sum(exchange_all(codec, values, step=step)[0].total for step in range(num_steps)) / num_steps
    exact = sum(values)
    deviation = exact.abs() * math.sqrt((10 - 1) / num_steps)
    assert ((mean - exact).abs() <= 4.5 * deviation).all()


def test_the_error_is_as_large_as_the_share_left_out_on_average():
    """E||x - Q(x)||^2 = (1 - k/d) ||x||^2."""
    value, errors = draw(200), []
    for step in range(1000):
        total = exchange_all(RandomK(density=0.25, dense_below=0), [value], step=step)[0].total
        errors.append((value - total).square().sum() / value.square().sum())
    errors = torch.stack(errors)
    assert float(errors.mean()) == pytest.approx(0.75, abs=4 * float(errors.std()) / math.sqrt(1000))


def test_what_was_not_sent_is_kept_to_the_bit():
    value, residual = draw(3000), draw(3000, seed=1)
    result = exchange_all(RandomK(density=0.1), [value], [{"worker": residual}])[0]
    assert torch.equal(result.total + result.state["worker"], value + residual)
    assert not (result.total * result.state["worker"]).any()


def test_scaling_with_feedback_is_refused_with_the_reason():
    with pytest.raises(ValidationError, match=r"scaled must be false with error feedback, but got true: .*grows"):
        RandomK(scaled=True)
    assert RandomK(scaled=True, error_feedback=False).scaled
