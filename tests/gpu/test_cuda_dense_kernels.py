"""On a CUDA device: 1-bit and int8 through Triton, held to the reference, and to the CPU's kernels on the wire."""

import importlib.util

import pytest
import torch

from paceline.compression import BF16, FP16, Int8, OneBit
from paceline.compression.kernels import find_kernels, torch_int8, torch_one_bit
from paceline.compression.rows import RowLayout
from paceline.testing.codec_contract import make_value
from paceline.testing.lockstep import exchange_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and here is none"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs triton: pip install 'paceline[triton]'"
    ),
]

CODECS = [
    pytest.param(OneBit(dense_below=0), id="one_bit"),
    pytest.param(Int8(dense_below=0), id="int8"),
    pytest.param(Int8(dense_below=0, rounding="stochastic"), id="stochastic int8"),
    pytest.param(FP16(dense_below=0), id="fp16"),
    pytest.param(BF16(dense_below=0), id="bf16"),
]


@pytest.mark.parametrize("num_elements", [1, 511, 513, 2049, 1_000_003])
@pytest.mark.parametrize(("codec", "reference"), [(OneBit, torch_one_bit), (Int8, torch_int8)])
def test_triton_gives_what_the_reference_gives(codec, reference, num_elements):
    value, residual = (make_value((num_elements,), step, 0).cuda() for step in range(2))
    module = find_kernels(codec.name, value.device)
    assert module.__name__.endswith(f"triton_{codec.name}")
    rows = RowLayout(num_elements, 3, codec.tile, codec.bits)
    results = []
    for kernels in (reference, module):
        payload, kept, decoded = rows.new_payload(value.device), torch.empty_like(value), torch.empty_like(value)
        assert kernels.encode(value, residual, rows, payload, kept)
        kernels.decode(payload, rows, decoded)
        results.append((decoded, kept))
    # A 1-bit scale is a sum of 2,048 numbers in float64, whose last bit in fp32 may depend on the order of addition.
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(), (7,), (513, 5), (100_003,)])
def test_gpus_and_cpus_come_to_the_same_sums(codec, shape):
    states = {device: [{}] * 3 for device in ("cpu", "cuda")}
    for step in range(3):
        totals = {}
        for device, kept in states.items():
            values = [make_value(shape, step, rank).to(device) for rank in range(3)]
            results = exchange_all(codec, values, kept, step=step)
            states[device] = [result.state for result in results]
            assert all(torch.equal(result.total, results[0].total) for result in results)
            assert all(result.is_finite for result in results)
            totals[device] = results[0].total.cpu()
        torch.testing.assert_close(totals["cuda"], totals["cpu"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_reported(codec, bad):
    values = [make_value((5000,), 0, rank).cuda() for rank in range(3)]
    values[1][4321] = bad
    assert [result.is_finite for result in exchange_all(codec, values)] == [True, False, True]
