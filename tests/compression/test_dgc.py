import math

import pytest
import torch
from pydantic import ValidationError

from paceline.compression import DGC, TopK
from paceline.compression.codec import AllGather
from paceline.testing.lockstep import exchange_all

Size = torch.Size
SHAPE = (61, 50)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_steps(num_steps, num_workers=3):
    return [[draw(*SHAPE, seed=100 * step + rank) for rank in range(num_workers)] for step in range(num_steps)]


def run(codec, steps):
    states, results = None, []
    for step, values in enumerate(steps):
        results.append(exchange_all(codec, values, states, step=step))
        states = [result.state for result in results[-1]]
    return results


def test_without_momentum_it_is_top_k():
    steps = make_steps(6)
    for ours, theirs in zip(run(DGC(momentum=0), steps), run(TopK(), steps), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.total, other.total)
            assert one.state.keys() == other.state.keys() == {"worker"}
            assert torch.equal(one.state["worker"], other.state["worker"])


def test_it_carries_momentum_unless_that_is_zero():
    assert DGC().carries_momentum
    assert not DGC(momentum=0).carries_momentum
    assert not TopK().carries_momentum


def test_all_elements_without_masking_are_sgd_with_momentum():
    steps, parameters = make_steps(12), []
    for momentum in (0.9, 0.0):
        parameter = torch.nn.Parameter(draw(*SHAPE, seed=7))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=momentum)
        codec = DGC(density=1, momentum=0.9, masking=False)
        totals = [sum(values) for values in steps] if momentum else [r[0].total for r in run(codec, steps)]
        for total in totals:
            parameter.grad = total
            optimizer.step()
        parameters.append(parameter.detach())
    torch.testing.assert_close(*parameters, rtol=1e-4, atol=1e-4)


def test_all_elements_with_masking_are_plain_sums():
    steps = make_steps(4)
    for values, results in zip(steps, run(DGC(density=1), steps), strict=True):
        torch.testing.assert_close(results[0].total, sum(values))


@pytest.mark.parametrize("masking", [True, False])
def test_the_state_follows_the_paper(masking):
    codec, momentum, velocity = DGC(density=0.05, momentum=0.8, masking=masking), 0.0, 0.0
    state = {}
    for step in range(5):
        value = draw(*SHAPE, seed=step)
        result = exchange_all(codec, [value], [state], step=step)[0]
        momentum = 0.8 * momentum + value
        velocity = velocity + momentum
        sent = result.total != 0
        assert int(sent.sum()) == math.ceil(0.05 * 3050)
        torch.testing.assert_close(result.total[sent], velocity[sent])
        assert velocity[sent].abs().min() >= velocity[~sent].abs().max() - 1e-5
        velocity = velocity.masked_fill(sent, 0)
        momentum = momentum.masked_fill(sent, 0) if masking else momentum
        torch.testing.assert_close(result.state["worker"], velocity)
        torch.testing.assert_close(result.state["momentum"], momentum)
        state = result.state


def test_an_element_that_waits_has_its_momentum_when_it_is_sent():
    """A steady gradient's velocity after t steps is the sum of its momenta, not t times itself."""
    value = torch.full((100,), 10.0)
    value[0] = 1.0
    codec, states = DGC(density=0.99, momentum=0.5, dense_below=0), None
    for step in range(100):
        result = exchange_all(codec, [value], states, step=step)[0]
        states = [result.state]
        if result.total[0]:
            break
    assert step >= 4
    momenta = [sum(0.5**power for power in range(age + 1)) for age in range(step + 1)]
    assert float(result.total[0]) == pytest.approx(sum(momenta), rel=1e-5)


def test_small_blocks_have_momentum_too():
    results = run(DGC(momentum=0.5), [[torch.ones(3), torch.ones(3)]] * 3)
    assert [result[0].total[0].item() for result in results] == [2, 3, 3.5]


def test_clipping_bounds_each_worker_s_part_before_it_is_accumulated():
    codec = DGC(density=0.01, momentum=0, clip_norm=3)
    large, small = draw(*SHAPE) * 1000, draw(*SHAPE, seed=1) * 1e-3
    results = exchange_all(codec, [large, small, small, small])
    sent_and_kept = results[0].state["worker"].clone()
    only_large = exchange_all(codec, [large, small * 0, small * 0, small * 0])[0]
    sent_and_kept += only_large.total
    torch.testing.assert_close(sent_and_kept, large / large.norm() * 1.5)
    unclipped = exchange_all(DGC(momentum=0), [large, small, small, small])
    assert torch.equal(results[1].state["worker"], unclipped[1].state["worker"])
    # What waits is the sum of many clipped steps, and may become larger than one.
    kept = run(codec, [[large]] * 20)[-1][0].state["worker"]
    assert float(kept.norm()) > 3


@pytest.mark.parametrize("scale", [1e25, 1e-30])
def test_clipping_holds_at_any_scale(scale):
    result = exchange_all(DGC(density=1, clip_norm=2), [draw(*SHAPE) * scale])[0]
    expected = min(2.0, float(draw(*SHAPE).double().norm()) * scale)
    assert float(result.total.double().norm()) == pytest.approx(expected, rel=1e-5)
    bad = draw(*SHAPE)
    bad[3, 4] = math.inf
    assert not exchange_all(DGC(clip_norm=2), [bad])[0].is_finite


def test_the_density_falls_exponentially_over_the_warm_up():
    codec = DGC(density=0.001, warmup_steps=4, first_density=0.256)
    assert [codec.density_at(step) for step in range(7)] == pytest.approx(
        [0.256, 0.064, 0.016, 0.004, 0.001, 0.001, 0.001]
    )
    requests = []
    shape = Size([10_000])
    for step in range(6):
        exchange_all(codec, [draw(10_000)], step=step, requests=requests)
    assert [request.payload.nbytes // 8 for request in requests] == [2560, 640, 160, 40, 10, 10]
    for step, request in enumerate(requests):
        assert codec.payloads(shape, 2, step) == [(AllGather, request.payload.nbytes)]
    assert codec.payloads(shape, 2) == [(AllGather, 80)]


def test_a_density_that_would_rise_is_refused():
    with pytest.raises(ValidationError, match=r"first_density must be at least density, but got 0\.1 < 0\.2"):
        DGC(density=0.2, first_density=0.1, warmup_steps=5)
    assert DGC(density=0.5).density_at(0) == 0.5


def test_another_number_of_workers_shares_out_the_momentum():
    codec = DGC()
    states = [result.state for result in run(codec, make_steps(3))[-1]]
    resized = [codec.resize(states, Size(SHAPE), rank, 2) for rank in range(2)]
    for site in ("momentum", "worker"):
        torch.testing.assert_close(sum(s[site] for s in resized), sum(s[site] for s in states))
    assert codec.resize([{}, {}], Size(SHAPE), 0, 3) == {}
