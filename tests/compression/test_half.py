"""fp16 and bf16: precision, range, and what feedback makes of both."""

import pytest
import torch

from paceline.compression import BF16, FP16, NoCodec
from paceline.compression.half import _CHUNK_ELEMENTS, largest_payload
from paceline.testing.codec_contract import make_value
from paceline.testing.lockstep import exchange_all

CODECS = [pytest.param(FP16, torch.float16, id="fp16"), pytest.param(BF16, torch.bfloat16, id="bf16")]


@pytest.mark.parametrize(("codec", "dtype"), CODECS)
def test_one_worker_sends_the_nearest_number(codec, dtype):
    value = make_value((2053, 3), 0, 0)
    result = exchange_all(codec(), [value])[0]
    assert torch.equal(result.total, value.to(dtype).float())
    assert torch.equal(result.state["worker"], value - value.to(dtype).float())


@pytest.mark.parametrize(("codec", "dtype"), CODECS)
def test_payloads_are_added_in_their_own_dtype(codec, dtype):
    values = [make_value((3001,), 0, rank) for rank in range(3)]
    expected = values[0].to(dtype) + values[1].to(dtype) + values[2].to(dtype)
    assert torch.equal(exchange_all(codec(), values)[0].total, expected.float())


@pytest.mark.parametrize(("codec", "dtype"), CODECS)
def test_blocks_of_several_pieces_are_whole(codec, dtype):
    value = make_value((2 * _CHUNK_ELEMENTS + 5,), 0, 0)
    first = exchange_all(codec(), [value])[0]
    second = exchange_all(codec(), [value], [first.state], step=1)[0]
    assert torch.equal(first.total, value.to(dtype).float())
    assert torch.equal(second.total, (value + first.state["worker"]).to(dtype).float())
    for index in (0, _CHUNK_ELEMENTS, 2 * _CHUNK_ELEMENTS + 4):
        broken = value.clone()
        broken[index] = float("nan")
        assert not exchange_all(codec(), [broken])[0].is_finite


@pytest.mark.parametrize(("codec", "dtype"), CODECS)
def test_it_sends_half_the_bytes(codec, dtype):
    shape = torch.Size([1000, 1000])
    assert 2 * codec().wire_bytes(shape, 4) == NoCodec().wire_bytes(shape, 4) == 6_000_000


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5, 17, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_sums_of_the_largest_payloads_do_not_overflow(dtype, num_workers):
    limit = torch.tensor(largest_payload(dtype, num_workers), dtype=dtype)
    total = torch.zeros((), dtype=dtype)
    for _ in range(num_workers):  # one after another
        total = total + limit
    assert bool(total.isfinite())
    parts = [limit] * num_workers  # and by halves
    while len(parts) > 1:
        parts = [sum(parts[i + 1 : i + 2], start=parts[i]) for i in range(0, len(parts), 2)]
    assert bool(parts[0].isfinite())
    assert float(limit) * 4 * num_workers > torch.finfo(dtype).max  # and no more of the range is given away


def test_what_fp16_has_no_room_for_is_sent_later():
    value = torch.zeros(2048)
    value[0] = 100_000.0
    states, sent = [{}, {}], torch.zeros(2048)
    for step in range(8):
        results = exchange_all(FP16(), [value if step == 0 else torch.zeros(2048)] * 2, states, step=step)
        states = [result.state for result in results]
        assert results[0].is_finite
        sent += results[0].total
    assert sent[0] == 200_000


def test_gradients_too_small_for_fp16_arrive_with_feedback_only():
    value = torch.full((2048,), 1e-8)  # the smallest fp16 is 6e-8
    for feedback, arrived in ((True, 1e-6), (False, 0.0)):
        state, sent = {}, torch.zeros(2048)
        for step in range(100):
            result = exchange_all(FP16(error_feedback=feedback), [value], [state], step=step)[0]
            state = result.state
            sent += result.total
        torch.testing.assert_close(sent, torch.full_like(sent, arrived), rtol=0, atol=6e-8)
