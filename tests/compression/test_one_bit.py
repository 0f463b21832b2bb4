"""1-bit: the rule by hand, its contraction, its two sites, and that owners change nothing."""

import pytest
import torch

from paceline.compression import NoCodec, OneBit
from paceline.errors import SettingsError
from paceline.testing.codec_contract import make_value
from paceline.testing.lockstep import exchange_all

CODEC = OneBit(dense_below=0)


def test_an_element_becomes_its_sign_times_the_mean_magnitude():
    result = exchange_all(CODEC, [torch.tensor([3.0, -1.0, 0.0, -0.0])])[0]
    assert result.total.tolist() == [1.0, -1.0, 1.0, 1.0]
    assert result.state["worker"].tolist() == [2.0, 0.0, -1.0, -1.0]
    assert result.state["owner"].tolist() == [0.0] * 4


def test_a_payload_is_a_scale_and_a_bit_for_each_element():
    requests = []
    value = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0])
    exchange_all(CODEC, [2 * value], requests=requests)
    scatter, gather = (request.payload for request in requests)
    assert scatter.tolist() == [[0, 0, 0, 0x40, 0b10001101, 0b00000010, 0, 0]]  # 2.0 in fp32; first element: bit 0
    assert torch.equal(scatter[0], gather)


@pytest.mark.parametrize("num_elements", [1, 7, 2048, 5000])
def test_the_error_is_exactly_that_of_the_theory(num_elements):
    value = make_value((num_elements,), 0, 0)
    error, norm, bound = 0.0, 0.0, 0.0
    for tile in value.double().split(2048):
        norm += float(tile.square().sum())
        bound += float(tile.square().sum() - tile.abs().sum() ** 2 / len(tile))  # (1 - delta) ||x||^2, by tile
    total = exchange_all(CODEC, [value])[0].total
    error = float((value.double() - total.double()).square().sum())
    assert error == pytest.approx(bound, rel=1e-5, abs=1e-12 * norm)
    whole = norm - float(value.double().abs().sum()) ** 2 / num_elements
    assert error <= whole * (1 + 1e-5)  # one scale for all is never better than one for each tile
    assert error <= (1 - 1 / num_elements) * norm * (1 + 1e-5)


def test_equal_magnitudes_lose_nothing():
    signs = torch.randint(2, (300, 11), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    values = [signs * 0.25, signs * 0.5]
    result = exchange_all(CODEC, values)[0]
    assert torch.equal(result.total, signs * 0.75)
    assert not result.state["worker"].any()


@pytest.mark.parametrize("num_elements", [1, 100, 2048, 2049, 9000])
@pytest.mark.parametrize("num_workers", [2, 3, 5, 8])
def test_the_number_of_owners_changes_nothing(num_elements, num_workers):
    """One worker has everything, the others zeros: then the sum is the same, whoever computes its parts."""
    alone_state, states = {}, [{}] * num_workers
    for step in range(3):
        value = make_value((num_elements,), step, 0)
        alone = exchange_all(CODEC, [value], [alone_state], step=step)[0]
        zeros = [torch.zeros(num_elements)] * (num_workers - 1)
        shared = exchange_all(CODEC, [value, *zeros], states, step=step)
        assert torch.equal(shared[0].total, alone.total)
        assert torch.equal(shared[0].state["worker"], alone.state["worker"])
        assert torch.equal(torch.cat([result.state["owner"] for result in shared]), alone.state["owner"])
        alone_state, states = alone.state, [result.state for result in shared]


def test_the_owner_keeps_what_it_could_not_hand_on():
    results = exchange_all(CODEC, [torch.tensor([1.0, 1.0]), torch.tensor([2.0, -2.0])])
    assert [result.total.tolist() for result in results] == [[2.0, -2.0]] * 2  # of [3, -1]
    assert results[0].state["owner"].tolist() == [1.0, 1.0]
    assert results[1].state["owner"].tolist() == []  # one tile has one owner
    results = exchange_all(CODEC, [torch.zeros(2)] * 2, [result.state for result in results], step=1)
    assert results[0].total.tolist() == [1.0, 1.0]


def test_the_residual_of_another_number_of_owners_is_refused():
    values = [make_value((6000,), 0, rank) for rank in range(3)]
    states = [result.state for result in exchange_all(CODEC, values)]
    with pytest.raises(SettingsError, match=r"block 'layer' must have the 4096 elements that rank 0 of 2 .* got 2048"):
        exchange_all(CODEC, values[:2], states[:2], block="layer")


def test_a_sum_too_large_for_fp32_is_reported_by_its_owner():
    values = [torch.full((5000,), 3e38)] * 2
    assert [result.is_finite for result in exchange_all(CODEC, values)] == [False, False]
    assert exchange_all(CODEC, values[:1])[0].is_finite


@pytest.mark.parametrize("num_workers", [2, 3, 4, 16])
def test_bytes_do_not_grow_with_workers(num_workers):
    shape = torch.Size([4096, 1024])
    ratio = NoCodec().wire_bytes(shape, num_workers) / CODEC.wire_bytes(shape, num_workers)
    assert ratio == pytest.approx(32 / (1 + 32 / 2048), rel=0.01)


def test_feedback_brings_the_mean_of_a_constant_gradient():
    """The error of the mean is the residual divided by the steps: it goes to zero. Without feedback it stays."""
    value = make_value((500,), 0, 0)
    errors = {}
    for feedback in (True, False):
        codec = OneBit(dense_below=0, error_feedback=feedback)
        states, sent = [{}, {}], torch.zeros(500)
        for step in range(400):
            results = exchange_all(codec, [value, 0.5 * value], states, step=step)
            states = [result.state for result in results]
            sent += results[0].total
            if step + 1 in (100, 400):
                errors[feedback, step + 1] = float((sent / (step + 1) - 1.5 * value).norm() / (1.5 * value).norm())
    assert errors[True, 400] < 0.5 * errors[True, 100] < 0.1
    assert errors[False, 400] == pytest.approx(errors[False, 100], rel=1e-4)
    assert errors[False, 400] > 0.5
