import math

import pytest
import torch
from pydantic import ValidationError

from paceline.compression import TopK, top_k
from paceline.compression.codec import AllGather, AllReduce
from paceline.testing.lockstep import exchange_all

Size = torch.Size


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(codec, steps):
    """Exchange each step's values; return the results of all steps."""
    states, results = None, []
    for step, values in enumerate(steps):
        results.append(exchange_all(codec, values, states, step=step))
        states = [result.state for result in results[-1]]
    return results


@pytest.mark.parametrize("shape", [(), (1,), (7,), (31, 3), (5003,)])
def test_all_elements_are_the_exact_sum(shape):
    values = [(draw(*shape, seed=rank) * 100).round() for rank in range(3)]
    result = exchange_all(TopK(density=1, dense_below=0), values)[2]
    assert torch.equal(result.total, sum(values))
    assert not result.state["worker"].any()


@pytest.mark.parametrize("density", [1e-9, 0.01, 0.3, 0.999])
def test_exactly_k_are_sent_and_the_rest_is_kept_to_the_bit(density):
    codec = TopK(density=density)
    value, residual = draw(5003), draw(5003, seed=1)
    result = exchange_all(codec, [value], [{"worker": residual}])[0]
    wanted, kept = value + residual, result.state["worker"]
    assert int((result.total != 0).sum()) == max(math.ceil(density * 5003), 1)
    assert torch.equal(torch.where(result.total != 0, result.total, kept), wanted)
    assert not kept[result.total != 0].any()
    assert kept.abs().max() <= result.total[result.total != 0].abs().min()


@pytest.mark.parametrize(("density", "count"), [(0.07, 7), (0.29, 29), (0.001, 1), (0.101, 11)])
def test_the_count_is_that_of_decimal_arithmetic(density, count):
    assert top_k.count_kept(Size([100]), density) == count


@pytest.mark.parametrize("density", [0.001, 0.01, 0.2, 0.7])
def test_the_error_is_bounded_for_every_value(density):
    """||x - Q(x)||^2 <= (1 - k/d) ||x||^2, with equality where all magnitudes are the same."""
    for value in (draw(4001), draw(4001) ** 5, torch.ones(4001), torch.arange(4001.0)):
        sent = exchange_all(TopK(density=density), [value])[0].total.double()
        share = math.ceil(density * 4001) / 4001
        bound = (1 - share) * value.double().square().sum()
        assert (value.double() - sent).square().sum() <= bound * (1 + 1e-12)


def test_nothing_is_lost_over_many_steps():
    steps = [[draw(60, 50, seed=100 * step + rank) for rank in range(3)] for step in range(40)]
    results = run(TopK(density=0.02), steps)
    given = sum(value.double() for values in steps for value in values)
    received = sum(result[0].total.double() for result in results)
    kept = sum(result.state["worker"].double() for result in results[-1])
    # fp32 rounds each addition of a residual: 40 steps of 3 workers, of sums up to 40.
    assert (given - received - kept).abs().max() < 40 * 3 * 40 * 6e-8


def test_feedback_sends_small_elements_in_the_end_and_without_it_they_never_arrive():
    value = torch.full((3000,), 0.01)
    value[:30] = 1
    received = {}
    for feedback in (True, False):
        results = run(TopK(error_feedback=feedback), [[value]] * 400)
        received[feedback] = sum(result[0].total for result in results)
    assert not received[False][30:].any()
    assert (received[True][30:] > 0).all()


def test_equal_magnitudes_are_sent_from_the_first():
    value = torch.ones(100) * torch.tensor([1.0, -1.0]).repeat(50)
    result = exchange_all(TopK(density=0.05, dense_below=0), [value])[0]
    assert result.total.nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    assert result.total[:5].tolist() == [1, -1, 1, -1, 1]


def test_workers_that_choose_the_same_elements_are_added():
    values = [torch.tensor([0.0, 5.0, 1.0, 0.0]), torch.tensor([4.0, -2.0, 0.0, 0.0])]
    totals = [result.total.tolist() for result in exchange_all(TopK(density=0.5, dense_below=0), values)]
    assert totals == [[4, 3, 1, 0]] * 2


def test_a_payload_is_eight_bytes_an_element_and_grows_with_the_workers():
    codec, shape = TopK(density=0.01), Size([1000, 1000])
    assert codec.payloads(shape, 4) == [(AllGather, 80_000)]
    assert codec.wire_bytes(shape, 4) == 3 * 80_000
    assert codec.wire_bytes(shape, 8) == 7 * 80_000
    assert codec.payloads(Size([2047]), 4) == [(AllReduce, 4 * 2047)]
    assert codec.payloads(Size([2048]), 4) == [(AllGather, 21 * 8)]


def test_huge_blocks_have_indices_of_eight_bytes(monkeypatch):
    assert TopK(density=0.5).payloads(Size([2**31 - 2]), 2) == [(AllGather, (2**30 - 1) * 8)]
    assert TopK(density=0.5).payloads(Size([2, 2**30]), 2) == [(AllGather, 2**30 * 12)]
    values = [draw(4099, seed=rank) for rank in range(3)]
    usual = exchange_all(TopK(), values)
    monkeypatch.setattr(top_k, "INT64_ELEMENTS", 4099)
    requests = []
    huge = exchange_all(TopK(), values, requests=requests)
    assert requests[0].payload.nbytes == 41 * 12  # 41 * 12 is no multiple of 8: rows are not aligned
    for one, other in zip(usual, huge, strict=True):
        assert torch.equal(one.total, other.total)
        assert torch.equal(one.state["worker"], other.state["worker"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("site", ["value", "residual"])
def test_what_is_not_finite_is_reported_wherever_it_hides(bad, site):
    tensors = {"value": draw(3000), "residual": draw(3000, seed=1)}
    tensors[site][1234] = bad
    state = {"worker": tensors["residual"]}
    assert not exchange_all(TopK(density=0.001), [tensors["value"]], [state])[0].is_finite


@pytest.mark.parametrize("density", [0, -0.1, 1.01])
def test_a_density_outside_0_to_1_is_refused(density):
    with pytest.raises(ValidationError, match="density"):
        TopK(density=density)
