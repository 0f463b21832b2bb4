"""int8: the error bounds of both roundings, unbiasedness, and that owners change nothing."""

import pytest
import torch

from paceline.compression import Int8, NoCodec
from paceline.compression.codec import CodecContext
from paceline.compression.kernels import torch_int8
from paceline.compression.rows import RowLayout
from paceline.testing.codec_contract import check_codec, make_value
from paceline.testing.lockstep import exchange_all

NEAREST = Int8(dense_below=0)
STOCHASTIC = Int8(dense_below=0, rounding="stochastic")
BOTH = [pytest.param(NEAREST, id="nearest"), pytest.param(STOCHASTIC, id="stochastic")]


def scales(value):
    return torch.cat([tile.abs().max().expand(len(tile)) for tile in value.split(512)]) / 127


def test_the_largest_element_has_the_code_127():
    requests = []
    value = torch.tensor([12.7, 0.0, -12.7, 0.26, -0.24, 6.0])
    result = exchange_all(NEAREST, [value], requests=requests)[0]
    assert requests[0].payload[0, 4:10].view(torch.int8).tolist() == [127, 0, -127, 3, -2, 60]
    torch.testing.assert_close(result.total, torch.tensor([12.7, 0.0, -12.7, 0.3, -0.2, 6.0]))
    torch.testing.assert_close(result.state["worker"], value - result.total)


@pytest.mark.parametrize(("codec", "most"), [(NEAREST, 0.5), (STOCHASTIC, 1.0)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("num_elements", [1, 511, 513, 5000])
def test_an_element_is_off_by_less_than_a_step(codec, most, num_elements):
    value = make_value((num_elements,), 0, 0)
    requests = []
    exchange_all(codec, [value], requests=requests)
    rows = RowLayout(num_elements, 1, codec.tile, codec.bits)
    decoded = torch.empty_like(value)
    torch_int8.decode(requests[0].payload, rows, decoded)
    assert bool(((decoded - value).abs() <= most * scales(value) * (1 + 1e-4)).all())
    error, norm = (decoded - value).square().sum(), value.square().sum()
    assert error <= 4 * most**2 * codec.tile / (4 * 127**2) * norm


def test_stochastic_rounding_is_right_on_average_and_nearest_is_not():
    value = make_value((1100,), 0, 0)
    num_steps = 2000
    errors = {}
    for codec in (NEAREST, STOCHASTIC):
        plain = codec.model_copy(update={"error_feedback": False})
        total = torch.zeros(1100, dtype=torch.float64)
        for step in range(num_steps):
            total += exchange_all(plain, [value], step=step)[0].total
        errors[codec.rounding] = (total / num_steps - value).double() / scales(value)
    # Each draw is off by a variable of standard deviation 1/2 at most, at each of the two sites.
    spread = (0.25 * 2 / num_steps) ** 0.5
    assert float(errors["stochastic"].abs().max()) < 5 * spread
    assert abs(float(errors["stochastic"].mean())) < 5 * spread / 1100**0.5
    assert float(errors["nearest"].abs().max()) > 0.45


def test_what_is_drawn_depends_on_seed_step_block_and_site():
    value = make_value((3000,), 0, 0)

    def first_payload(rank, step=0, block="a", seed=0):
        return next(STOCHASTIC.exchange(value, {}, CodecContext(block, step, rank, 2, seed))).payload

    first = first_payload(0)
    assert torch.equal(first, first_payload(0))
    for other in (first_payload(1), first_payload(0, 1), first_payload(0, block="b"), first_payload(0, seed=1)):
        assert not torch.equal(first, other)


@pytest.mark.parametrize("codec", BOTH)
@pytest.mark.parametrize("num_elements", [1, 512, 513, 3000])
@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_the_number_of_owners_changes_nothing(codec, num_elements, num_workers):
    """One worker has everything, the others zeros: then the sum is the same, whoever computes its parts."""
    alone_state, states = {}, [{}] * num_workers
    for step in range(3):
        value = make_value((num_elements,), step, 0)
        alone = exchange_all(codec, [value], [alone_state], step=step)[0]
        zeros = [torch.zeros(num_elements)] * (num_workers - 1)
        shared = exchange_all(codec, [value, *zeros], states, step=step)
        assert torch.equal(shared[0].total, alone.total)
        assert torch.equal(torch.cat([result.state["owner"] for result in shared]), alone.state["owner"])
        alone_state, states = alone.state, [result.state for result in shared]


def test_stochastic_rounding_keeps_the_contract():
    check_codec(STOCHASTIC)


@pytest.mark.parametrize("codec", BOTH)
def test_numbers_too_small_for_a_scale_wait_in_the_residual(codec):
    value = torch.full((600,), 1e-40)  # a scale of it would be 8e-43, and its reciprocal infinite
    result = exchange_all(codec, [value])[0]
    assert not result.total.any()
    assert torch.equal(result.state["worker"], value)


@pytest.mark.parametrize("num_workers", [2, 3, 4, 16])
def test_it_sends_a_quarter_of_the_bytes(num_workers):
    shape = torch.Size([4096, 1024])
    ratio = NoCodec().wire_bytes(shape, num_workers) / NEAREST.wire_bytes(shape, num_workers)
    assert ratio == pytest.approx(4 / (1 + 4 / 512), rel=0.01)


def test_the_error_does_not_grow_with_workers():
    """A ring that encodes again at each hop grows from 1.5% at 4 workers to 4.5% at 64."""
    errors = []
    for num_workers in (4, 64):
        values = [make_value((4096,), 0, rank) / (rank + 0.5) for rank in range(num_workers)]
        total = sum(value.double() for value in values)
        result = exchange_all(NEAREST, values)[0].total.double()
        errors.append(float((result - total).norm() / total.norm()))
    assert errors[1] < 1.2 * errors[0] < 0.02
