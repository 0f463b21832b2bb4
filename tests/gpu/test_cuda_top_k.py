"""Top-k on a CUDA device: its Triton kernels against the reference in plain torch, and the codec on both devices."""

import math

import pytest
import torch

from paceline.compression import DGC, PowerSGD, RandomK, TopK
from paceline.compression.kernels import find_kernels, torch_top_k
from paceline.testing.lockstep import exchange_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and here is none"),
]


def make_block(size, seed, *, ties=False, bad=False):
    value = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    value = (4 * value).round() if ties else value
    if bad:
        value[size // 2] = math.nan
    return value.cuda()


@pytest.mark.parametrize("size", [1, 4095, 4097, 100_003, 3_000_000])
@pytest.mark.parametrize("kind", ["normal", "ties", "bad"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_triton_selects_what_the_reference_does(size, kind, dtype):
    pytest.importorskip("triton")
    kernels = find_kernels("top_k", torch.device("cuda"))
    assert kernels is not torch_top_k
    value, residual = (make_block(size, seed, ties=kind == "ties", bad=kind == "bad") for seed in (0, 1))
    for num_kept in {1, math.ceil(size / 100), size // 2 + 1, size}:
        found = []
        for select in (kernels.select, torch_top_k.select):
            remainder, values = torch.empty_like(value), value.new_empty(num_kept)
            indices = torch.empty(num_kept, dtype=dtype, device="cuda")
            is_finite = select(value, residual, num_kept, remainder, indices, values)
            assert is_finite == (kind != "bad")
            found.append((remainder, indices, values))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "codec",
    [TopK(density=0.05), RandomK(density=0.1), DGC(density=0.05, clip_norm=1.0), PowerSGD(low_rank=4)],
    ids=lambda codec: codec.name,
)
def test_codecs_do_on_a_gpu_what_they_do_on_a_cpu(codec):
    totals = []
    for device in ("cpu", "cuda"):
        states = None
        for step in range(3):
            values = [make_block(200 * 70, 10 * step + rank).view(200, 70).to(device) for rank in range(3)]
            results = exchange_all(codec, values, states, step=step)
            assert all(torch.equal(result.total, results[0].total) for result in results)
            states = [result.state for result in results]
        totals.append(results[0].total.cpu())
    # PowerSGD's products are rounded otherwise there; the others add the same few numbers.
    torch.testing.assert_close(*totals, rtol=1e-3, atol=1e-3)
